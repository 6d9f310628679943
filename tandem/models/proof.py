"""Whether sampler and trainer get the same bits from this kind of model, on this device of this machine.

Owns: the check at the start of an engine, and what follows from it: ``fast`` where ``exact`` does not hold, never a
claim that nobody looked at. Refuses: the model itself; a small one of the same family (layers of each kind, experts,
windows, norms, head) takes its place, so the check is done in well under a second.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import Tensor

from tandem.kernels import functions
from tandem.kernels.keys import KeyIndex
from tandem.kernels.ops import Ops
from tandem.kernels.self_check import Uses, varying
from tandem.models.attention import AttentionContext, KVCache
from tandem.models.causal_lm import CausalLM
from tandem.models.loader import draw_weights
from tandem.models.spec import ExpertSpec, ModelSpec

log = logging.getLogger(__name__)
WINDOW = 11  # of the small model; shorter than its sequences
LENGTHS = (47, 38)
CUTS = (0, 1, 8, 21, 37)  # where the first sequence's pieces begin; the other one comes token by token beside them


def proven(numerics: str, dtype: torch.dtype, device: torch.device | str, spec: ModelSpec) -> str:
    """``numerics``, or ``fast`` (and a warning that names what varies) where ``exact`` does not hold."""
    if numerics != "exact":
        return numerics
    found = found_varying(dtype, torch.device(device), spec)
    if not found:
        return numerics
    log.warning(
        "exact numerics do not hold on this machine (%s): the bits of a row depend on its batch in %d cases (%s). "
        "Going on with fast numerics: log-probabilities of sampler and trainer differ a little. Set engine.numerics to "
        "fast to say so in the recipe",
        device,
        len(found),
        ", ".join(found[:4]),
    )
    return "fast"


def found_varying(
    dtype: torch.dtype, device: torch.device, spec: ModelSpec, *, portable: bool | None = None
) -> list[str]:
    """What does not hold: operations with their case, then the small model's tokens; empty: nothing that was tried.
    ``portable`` as in ``Ops``."""
    ops = Ops("exact", device, portable=portable)
    return varying(ops, dtype, uses_of(spec, device)) or gaps(small(spec), dtype, ops)


def uses_of(spec: ModelSpec, device: torch.device) -> Uses:
    """The operations of a family. Beside an accelerator its very projections are tried, whose kernels a library picks
    by their shape; on the CPU they would take too long, and our own have one road for all shapes."""
    inner = {spec.intermediate_size, *([spec.experts.intermediate_size] if spec.experts else [])}
    shapes = {(spec.hidden_size, spec.query_size + 2 * spec.kv_size), (spec.query_size, spec.hidden_size)}
    shapes |= {(spec.hidden_size, 2 * size) for size in inner} | {(size, spec.hidden_size) for size in inner}
    shapes.add((spec.hidden_size, spec.vocab_size))
    return Uses(
        head_dim=spec.head_dim,
        queries=spec.num_heads // spec.num_kv_heads,
        window=min(WINDOW, max(spec.windows, default=0)),
        activation=spec.activation,
        offset=spec.unit_offset_norms,
        routed=spec.experts is not None,
        shapes=tuple(sorted(shapes)) if device.type == "cuda" else (),
    )


def small(spec: ModelSpec) -> ModelSpec:
    """A model of two layers with the traits of ``spec``: one layer of each kind that it has."""
    groups = min(2, spec.num_kv_heads)
    experts = spec.experts and ExpertSpec(
        num_experts=min(5, spec.experts.num_experts),
        per_token=min(2, spec.experts.per_token),
        intermediate_size=96,
        normalised=spec.experts.normalised,
        dense_layers=(1,) if spec.experts.dense_layers else (),
    )
    windowed = [bool(spec.window(layer)) for layer in range(spec.num_layers)]
    windows = (WINDOW, WINDOW if all(windowed) else 0) if any(windowed) else ()
    return replace(
        spec, vocab_size=259, hidden_size=160, num_layers=2, num_kv_heads=groups,
        num_heads=groups * (spec.num_heads // spec.num_kv_heads), intermediate_size=288, max_positions=64,
        windows=windows, experts=experts, bos_id=None, eos_ids=(), pad_id=None,
    )  # fmt: skip


def gaps(spec: ModelSpec, dtype: torch.dtype, ops: Ops) -> list[str]:
    """Tokens whose log-probability is not the same bits in a training pass, with gradients and both sequences packed,
    and served: one sequence in pieces, the other token by token beside it, from scattered places of a cache."""
    device = ops.device
    model = CausalLM(spec, ops, dtype=dtype, device=device)
    draw_weights(model, seed=17)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # distributions with a shape
    generator = torch.Generator().manual_seed(17)
    ids = [torch.randint(spec.vocab_size, (length + 1,), generator=generator).to(device) for length in LENGTHS]
    trained = _trained(model, ids)
    served = _served(model, ids)
    same = torch.stack([left == right for left, right in zip(trained, served, strict=True)]).tolist()
    return [f"the {spec.family} model's token {number}" for number, equal in enumerate(same) if not equal]


def _trained(model: CausalLM, ids: list[Tensor]) -> list[Tensor]:
    device, lists = model.device, [torch.arange(length) for length in LENGTHS]
    begins = [0, LENGTHS[0]]
    keys = KeyIndex(
        slots_L=torch.arange(sum(LENGTHS), dtype=torch.int32).to(device),
        starts_T=torch.tensor(begins).repeat_interleave(torch.tensor(LENGTHS)).to(device),
        counts_T=torch.cat([each + 1 for each in lists]).int().to(device),
    )
    inputs, targets = torch.cat([each[:-1] for each in ids]), torch.cat([each[1:] for each in ids])
    hidden = model(inputs, torch.cat(lists).to(device), AttentionContext(keys=keys))
    logprobs, _ = model.ops.token_logprobs(hidden, model.head_weight, targets, torch.ones_like(targets).float())
    return list(logprobs.detach())


@torch.no_grad()
def _served(model: CausalLM, ids: list[Tensor]) -> list[Tensor]:
    device, width = model.device, max(LENGTHS)
    cache = KVCache(model.spec, 2 * width, dtype=model.dtype, device=device)
    slots_L = torch.randperm(2 * width, generator=torch.Generator().manual_seed(1)).int().to(device)
    found: list[list[Tensor]] = [[], []]
    pieces = {begin: end for begin, end in zip(CUTS, (*CUTS[1:], LENGTHS[0]), strict=True)}
    ends = {1 + 4 * place: piece for place, piece in enumerate(pieces.items())}  # steps that have a piece beside them
    for step in range(LENGTHS[1]):
        rows = [(1, step)] + [(0, place) for place in range(*ends.get(step, (0, 0)))]
        number, place = (torch.tensor(each, device=device) for each in zip(*rows, strict=True))
        context = AttentionContext(
            keys=KeyIndex(slots_L, number * width, (place + 1).int()), cache=cache,
            write_slots_T=slots_L[number * width + place].long(),
        )  # fmt: skip
        tokens, targets = (torch.stack([ids[of][at + more] for of, at in rows]) for more in (0, 1))
        logits = model.logits(model(tokens, place, context))
        logp = functions.row_logprobs(logits, torch.ones(len(rows), device=device), portable=model.ops.portable)
        for (of, _), logprob in zip(rows, logp.gather(1, targets[:, None])[:, 0], strict=True):
            found[of].append(logprob)
    return [*found[0], *found[1]]
