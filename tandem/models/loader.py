"""Weights in and out of Hugging Face folders.

Owns: the match between a checkpoint's tensors and our parameters. Every parameter is filled exactly once and
every tensor is used; a name without a partner on either side is an error that names it. Files are mapped, not
read: each tensor is copied once, straight into its parameter.
Refuses: formats that execute code (pickles), quantised checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tandem.core.errors import ModelError
from tandem.core.wire import derive_seed
from tandem.kernels.ops import Ops
from tandem.models.causal_lm import CausalLM
from tandem.models.family import Piece, find_family, read_config
from tandem.models.spec import ModelSpec

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LM_HEAD, SCORE = "lm_head.weight", "score.weight"
DERIVED = ("rotary_emb.inv_freq",)  # tables that old checkpoints saved; made anew from the configuration


def read_spec(path: str | Path, *, scoring: bool = False) -> ModelSpec:
    """The spec of a model folder (``scoring``: of a reward model's), without touching its weights.

    Raises:
        ModelError: no such folder, no or broken ``config.json``, an unsupported architecture or field.
    """
    folder = Path(path)
    if not folder.is_dir():
        beside = sorted(p.name for p in folder.parent.glob("*") if p.is_dir()) if folder.parent.is_dir() else []
        raise ModelError(
            f"model folder not found: {folder}",
            hint=f"beside it: {', '.join(beside[:5])}" if beside else "give the folder of a Hugging Face model",
        )
    spec = read_config(_read_json(folder / "config.json"), where=str(folder / "config.json"), scoring=scoring)
    generation = folder / "generation_config.json"
    if generation.is_file() and (eos := _read_json(generation).get("eos_token_id")) is not None:
        eos_ids = tuple(eos) if isinstance(eos, list) else (eos,)
        return replace(spec, eos_ids=tuple(dict.fromkeys((*spec.eos_ids, *eos_ids))))
    return spec


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    numerics: str = "exact",
    portable: bool | None = None,
) -> CausalLM:
    """Load a model folder; weights are converted to ``dtype`` on the way. ``portable`` as in ``Ops``.

    Raises:
        ModelError: see ``read_spec``; or a tensor is missing, unknown, of another shape, or a file is broken.
    """
    spec = read_spec(path)
    model = CausalLM(spec, Ops(numerics, device, portable=portable), dtype=dtype, device=device)
    pieces = find_family(spec.family, where=str(path)).pieces(spec)
    with ExitStack() as stack:
        fill_parameters(model, pieces, open_tensors(Path(path), stack), where=str(path))
    return model


def load_scoring_model(
    path: str | Path, *, dtype: torch.dtype, device: torch.device | str = "cpu", numerics: str = "exact"
) -> tuple[CausalLM, torch.Tensor]:
    """A sequence classifier with one label (``save_scoring_model`` writes such): its body, whose vocabulary head is
    never read, and its float32 score head ``[1, hidden]``.

    Raises:
        ModelError: as ``load_model``; it has no score head, or more than one label.
    """
    spec = read_spec(path, scoring=True)
    model = CausalLM(spec, Ops(numerics, device), dtype=dtype, device=device)
    pieces = [piece for piece in find_family(spec.family, where=str(path)).pieces(spec) if piece.source != LM_HEAD]
    with ExitStack() as stack:
        source = open_tensors(Path(path), stack)
        if SCORE not in source or source.shape(SCORE)[0] != 1:
            raise ModelError(
                f"{path} is no reward model: it has no {SCORE} of one row",
                hint='train one with algorithm.name = "reward"; tandem export writes it',
            )
        head = source.read(SCORE).to(device=device, dtype=torch.float32)
        body = source.without(SCORE)
        fill_parameters(model, pieces, body, where=str(path), unread={"head.weight"})
    return model, head


def init_model(
    spec: ModelSpec,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    numerics: str = "exact",
    portable: bool | None = None,
) -> CausalLM:
    """A model with random weights. Each parameter draws from its own seed and name, so that it does not depend
    on what else the model has, nor on the device."""
    model = CausalLM(spec, Ops(numerics, device, portable=portable), dtype=dtype, device=device)
    draw_weights(model, seed=seed)
    return model


@torch.no_grad()
def draw_weights(model: CausalLM, *, seed: int) -> None:
    """Fill a model with random weights, as ``init_model`` says."""
    spec = model.spec
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(0.0 if spec.unit_offset_norms else 1.0)
        elif name.endswith(".bias"):
            parameter.zero_()
        else:
            # Projections that write into the residual stream start smaller, so that depth does not add variance.
            writes = name.endswith((".out.weight", ".down.weight"))
            deviation = 0.02 * ((2 * spec.num_layers) ** -0.5 if writes else 1.0)
            generator = torch.Generator().manual_seed(derive_seed("init", seed, name))
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation)


class TensorSource:
    """The tensors of a checkpoint by name, each read when it is asked for."""

    def __init__(self, files: dict[str, safe_open]) -> None:
        self._files = files  # tensor name -> open safetensors file

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def without(self, name: str) -> TensorSource:
        return TensorSource({each: file for each, file in self._files.items() if each != name})

    def read(self, name: str) -> torch.Tensor:
        return self._files[name].get_tensor(name)


def fill_parameters(
    model: CausalLM, pieces: list[Piece], source: TensorSource, *, where: str, unread: Collection[str] = ()
) -> None:
    """Copy every piece into its parameter, and complain of every name left over on either side, but for parameters that
    are ``unread``."""
    parameters = dict(model.named_parameters())
    wanted = {piece.source for piece in pieces}
    unknown = [name for name in source if name not in wanted and not name.endswith(DERIVED)]
    if model.spec.tied_head and LM_HEAD in unknown:
        # Some tied checkpoints store the head a second time. It must be the same one.
        if not torch.equal(source.read(LM_HEAD), source.read("model.embed_tokens.weight")):
            raise ModelError(f"{where}: lm_head.weight differs from the embedding, but the configuration ties them")
        unknown.remove(LM_HEAD)
    if unknown:
        raise ModelError(f"{where}: the model has no parameter for {_some(unknown)}")
    missing = [piece.source for piece in pieces if piece.source not in source]
    if missing:
        raise ModelError(f"{where}: the checkpoint lacks {_some(missing)}")
    filled = dict.fromkeys(parameters.keys() - set(unread), 0)
    with torch.no_grad():
        for piece in pieces:
            target = parameters[piece.parameter][piece.start : piece.stop]
            tensor = source.read(piece.source)
            if not tensor.dtype.is_floating_point or tensor.element_size() < 2:
                raise ModelError(f"{where}: {piece.source} is {tensor.dtype}, expected float32, bfloat16 or float16")
            if tensor.shape != target.shape:
                raise ModelError(
                    f"{where}: {piece.source} has shape {tuple(tensor.shape)}, expected {tuple(target.shape)}"
                )
            target.copy_(tensor)
            filled[piece.parameter] += piece.stop - piece.start
    short = [name for name, rows in filled.items() if rows != parameters[name].shape[0]]
    if short:
        raise ModelError(f"{where}: family {model.spec.family!r} does not fill {_some(short)}")


def open_tensors(folder: Path, stack: ExitStack) -> TensorSource:
    """The tensors of a folder, mapped for as long as ``stack`` is open.

    Raises:
        ModelError: no weights, a file that is missing or broken, or an index that disagrees with its files.
    """
    declared = None
    if (folder / INDEX).is_file():
        declared = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(declared, dict):
            raise ModelError(f"{folder / INDEX}: no weight_map")
        names = sorted(set(declared.values()))
    elif (folder / SINGLE).is_file():
        names = [SINGLE]
    else:
        other = sorted(p.name for p in folder.glob("*.bin"))
        raise ModelError(
            f"{folder} has no {SINGLE} and no {INDEX}",
            hint=f"{other[0]} is a pickle, which is not read: convert the model to safetensors" if other else "",
        )
    files: dict[str, safe_open] = {}
    for name in names:
        if not (folder / name).is_file():
            raise ModelError(f"{folder / INDEX} names {name}, which is not there", hint="copy the folder again")
        try:
            handle = stack.enter_context(safe_open(folder / name, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{folder / name} is broken: {error}", hint="copy the file again") from error
        files |= dict.fromkeys(handle.keys(), handle)
    if declared is not None and (lost := set(declared) ^ set(files)):
        raise ModelError(f"{folder / INDEX} and its files disagree about {_some(sorted(lost))}")
    return TensorSource(files)


def _read_json(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ModelError(f"{path.parent} has no {path.name}", hint="is it a Hugging Face model folder?") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is broken: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold an object")
    return value


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
