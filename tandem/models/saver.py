"""Models out to Hugging Face folders that plain ``transformers`` loads.

Owns: splitting our fused parameters into the names of the family, sharding, and that a folder appears whole.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from tandem.core.errors import ModelError
from tandem.models.causal_lm import CausalLM
from tandem.models.family import find_family
from tandem.models.loader import INDEX, SINGLE
from tandem.models.spec import ModelSpec

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)


def save_model(
    model: CausalLM, folder: str | Path, *, tokenizer_from: str | Path | None, max_shard_bytes: int = 4 * 2**30
) -> None:
    """Write ``model`` (and the tokenizer of another folder) as a Hugging Face folder, in one step.

    Raises:
        ModelError: ``folder`` exists and is not empty, or ``tokenizer_from`` has no tokenizer.
    """
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(f"{target} exists and is not empty", hint="give a new folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        write_model(model, scratch, max_shard_bytes=max_shard_bytes)
        if tokenizer_from is not None:
            _copy_tokenizer(Path(tokenizer_from), scratch)
        scratch.chmod(0o755)
        os.replace(scratch, target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def save_scoring_model(model: CausalLM, head_1D: torch.Tensor, folder: Path, *, tokenizer_from: Path) -> None:
    """Write a reward model as the family's sequence classifier with one label: the body of ``model`` and its score
    head ``[1, hidden]``, which reads the last token.

    Raises:
        ModelError: the family has no such class.
    """
    scorer = find_family(model.spec.family, where=str(folder)).scorer
    if not scorer:
        raise ModelError(f"{folder}: a {model.spec.family} has no class that reads scores")
    folder.mkdir(parents=True)
    write_config(model.spec, folder, dtype=model.dtype)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {"architectures": [scorer], "num_labels": 1, "id2label": {"0": "score"}, "label2id": {"score": 0}}
    if config.get("pad_token_id") is None:
        config["pad_token_id"] = model.spec.eos_ids[0] if model.spec.eos_ids else 0
    path.write_text(json.dumps(config, indent=2) + "\n")
    body = ((name, tensor) for name, tensor in _named_tensors(model) if not name.startswith("lm_head"))
    write_tensors([*body, ("score.weight", head_1D.detach().cpu().to(model.dtype))], folder)
    _copy_tokenizer(tokenizer_from, folder)


def write_model(model: CausalLM, folder: Path, *, max_shard_bytes: int = 4 * 2**30) -> None:
    """Write configuration and weights into an existing folder."""
    write_config(model.spec, folder, dtype=model.dtype)
    write_tensors(_named_tensors(model), folder, max_shard_bytes=max_shard_bytes)


def write_config(spec: ModelSpec, folder: Path, *, dtype: torch.dtype) -> None:
    """Write ``config.json`` and ``generation_config.json``."""
    config = find_family(spec.family, where=str(folder)).write(spec)
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def write_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]], folder: Path, *, max_shard_bytes: int = 4 * 2**30
) -> None:
    """Write named tensors as safetensors: one file, or shards with an index where they do not fit one."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    size, total = 0, 0
    for name, tensor in tensors:
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / SINGLE, metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _named_tensors(model: CausalLM) -> Iterator[tuple[str, torch.Tensor]]:
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for piece in find_family(model.spec.family, where="saved model").pieces(model.spec):
        yield piece.source, parameters[piece.parameter][piece.start : piece.stop].cpu().contiguous()


def _copy_tokenizer(source: Path, folder: Path) -> None:
    found = [source / name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not found:
        raise ModelError(f"{source} has no tokenizer files", hint=f"looked for {', '.join(TOKENIZER_FILES[:3])} ...")
    for file in found:
        shutil.copyfile(file, folder / file.name)
