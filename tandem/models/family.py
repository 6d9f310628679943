"""What a family of models must say about itself, and how a configuration finds its family.

Owns: the contract of the plug-in kind ``model`` (name: the ``model_type`` of a Hugging Face configuration) and
the table of built-in families.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tandem.core.errors import ModelError
from tandem.core.registry import Registry
from tandem.models.spec import ModelSpec

BUILTIN = {
    "gemma3_text": "tandem.models.families.gemma3:FAMILY",
    "llama": "tandem.models.families.llama:FAMILY",
    "qwen3": "tandem.models.families.qwen3:FAMILY",
    "qwen3_moe": "tandem.models.families.qwen3_moe:FAMILY",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One tensor of a checkpoint is rows ``start`` to ``stop`` of one of our parameters (we fuse, files do not)."""

    parameter: str
    source: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one architecture is written in a Hugging Face folder and, where there is one, in a GGUF file."""

    name: str
    architecture: str
    read: Callable[[Mapping[str, object]], ModelSpec]
    write: Callable[[ModelSpec], dict[str, object]]
    pieces: Callable[[ModelSpec], list[Piece]]
    scorer: str = ""  # the library's class that reads one number off the last token, as a reward model is exported
    gguf_architecture: str = ""
    gguf_permuted: bool = False  # GGUF keeps q and k of some architectures in interleaved rotary order
    gguf_windows: bool = False  # whether its readers give layers of this architecture sliding windows


def families() -> Registry:
    """All registered families."""
    return Registry("model", BUILTIN)


def find_family(name: str, *, where: str) -> Family:
    """The family of a ``model_type``.

    Raises:
        ModelError: nobody registered it; says where the name was read and which are near.
    """
    registry = families()
    known = registry.names()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=2)
        raise ModelError(
            f"{where}: model type {name!r} is not supported",
            hint=f"did you mean {' or '.join(near)}?" if near else f"supported: {', '.join(known)}",
        )
    family = registry.resolve(name)
    if not isinstance(family, Family):
        raise ModelError(f"model plug-in {name!r} is not a Family but {type(family).__name__}")
    return family


def read_config(config: Mapping[str, object], *, where: str, scoring: bool = False) -> ModelSpec:
    """The spec that a Hugging Face configuration describes, of a language model or (``scoring``) a reward model."""
    name = config.get("model_type")
    if not isinstance(name, str):
        raise ModelError(f"{where}: no model_type", hint="this must be the config.json of a Hugging Face model")
    family = find_family(name, where=where)
    architectures = config.get("architectures")
    needed = family.scorer if scoring else family.architecture
    if isinstance(architectures, list) and architectures and needed not in architectures:
        raise ModelError(
            f"{where}: architecture {architectures[0]!r} is not supported", hint=f"needs {needed}"
        )
    return family.read(config)
