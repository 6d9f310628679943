"""How much memory a run will need, said before a model is loaded.

Owns: the sizes of weights, gradients, optimizer state, activations, KV cache and copies on their way to the disk, for
each phase of a run, and the refusal of a run that cannot fit. Weights, state, KV and copies are exact; activations are
what the layers keep for the backward pass, counted by hand; what libraries and the allocator take on top is a measured
share. The tests compare the sum with the peak of real steps, saves and exports.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from tandem.algorithms.spec import Data, resolve
from tandem.app.build import DTYPES, lora_of
from tandem.app.preflight import ModelFiles, pick_device
from tandem.app.ranks import count_ranks
from tandem.config.tree import Recipe
from tandem.core.errors import ConfigError
from tandem.engine.train.eight_bit import BLOCK
from tandem.kernels.functions import HEAD_CHUNK
from tandem.kernels.ops import Ops
from tandem.models.builtin import resolve_model
from tandem.models.causal_lm import CausalLM
from tandem.models.loader import read_spec
from tandem.models.lora import adapters_of, add_adapters
from tandem.models.spec import ModelSpec

FULL = 4  # bytes of a float32: masters, moments, summed gradients, logits
LOGITS_COPIES = 3  # a chunk of logits, its exponentials, its gradient
GAPS = 0.25  # of the rest: scratch of the libraries and gaps of the allocator, as measured on CPU; not derived
GIB = 2**30
MOMENTS, SUMS, MASTERS = "moments of the optimizer", "summed gradients", "float32 masters"
STATE = {MOMENTS, SUMS, MASTERS}  # what the ranks share among themselves
PACKED = "weights in the layout of the products"
COPIES = "copies of the state to save"
HINTS = {
    "KV cache": "lower engine.infer.kv_tokens",
    "activations": "lower engine.train.micro_batch_tokens or set engine.train.checkpoint_activations",
    MOMENTS: 'optimizer.moments = "8bit", or train adapters (lora.rank = 16)',
    COPIES: "trainer.checkpoint_every = 0 saves at the end only",
    "weights": "a smaller model",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """One memory, bytes by name: ``kept`` through the whole run; on top of it ``train`` and ``rollout`` in their phase,
    with either of them ``saving`` while a checkpoint is written, and ``export`` at the end. ``host`` is the memory of
    the CPU, where the device is another one."""

    kept: dict[str, int]
    train: dict[str, int]
    rollout: dict[str, int]
    saving: dict[str, int] = field(default_factory=dict)
    export: dict[str, int] = field(default_factory=dict)
    host: Ledger | None = None

    @property
    def peak(self) -> int:
        """The largest of the phases. One process holds them all: what a phase frees, the next one uses. A checkpoint is
        counted as if a slow disk kept it waiting through the next step; copies have no gaps."""
        kept = sum(self.kept.values()) * (1 + GAPS)
        phase = max(sum(self.train.values()), sum(self.rollout.values())) * (1 + GAPS)
        return int(kept + max(phase + sum(self.saving.values()), sum(self.export.values())))

    def rows(self) -> list[list[str]]:
        """A table in GiB, largest first in each phase."""
        lines = [["memory", "GiB"], *self._lines("")]
        return lines if self.host is None else [*lines, *self.host._lines("of the CPU, ")]

    def _lines(self, prefix: str) -> list[list[str]]:
        phases = (
            ("kept", self.kept), ("training", self.train), ("rollout", self.rollout), ("saving", self.saving),
            ("export", self.export),
        )  # fmt: skip
        lines = [
            [f"{prefix}{phase}: {name}", f"{size / GIB:.2f}"]
            for phase, part in phases
            for name, size in sorted(part.items(), key=lambda entry: -entry[1])
        ]
        return [*lines, [f"{prefix}peak, with {GAPS:.0%} for scratch and gaps", f"{self.peak / GIB:.2f}"]]

    def largest(self) -> list[tuple[str, int]]:
        """The three largest parts of the peak."""
        phase = max((self.train, self.rollout), key=lambda part: sum(part.values())) | self.saving
        parts = self.kept | max((phase, self.export), key=lambda part: sum(part.values()))
        return sorted(parts.items(), key=lambda entry: -entry[1])[:3]


def predict_rank(recipe: Recipe, model: ModelFiles, num_ranks: int, *, device: torch.device | None = None) -> Ledger:
    """What each rank but rank 0 needs of ``num_ranks``: its part of masters, moments and gradients, and, while it
    computes, the gathered weights and their gradients, counted whole as an upper bound."""
    alone = predict(recipe, model, device=device)
    total, trained = _parameters(recipe, model.spec)
    size = DTYPES[recipe.model.dtype].itemsize
    kept = {name: part // num_ranks for name, part in alone.kept.items() if name in (MOMENTS, SUMS)}
    kept["shard of the weights"] = (trained * FULL + (total - trained) * size) // num_ranks
    kept |= {PACKED: alone.kept[PACKED]} if PACKED in alone.kept else {}
    gathered = {"gathered weights": total * size, "gradients of a micro-batch": trained * size}
    host = None
    if alone.host is not None:
        parts = {name: part // num_ranks for name, part in alone.host.kept.items() if name in STATE}
        host = Ledger(kept=parts, train={}, rollout={})
    return Ledger(kept=kept, train=alone.train | gathered, rollout={}, host=host)


def predict_first(recipe: Recipe, model: ModelFiles, num_ranks: int, *, device: torch.device | None = None) -> Ledger:
    """What rank 0 needs of ``num_ranks``: its shard as every rank, the whole model that samples, with what stands
    beside it, and the whole state of the policy's optimizer while it is written: all ranks' parts of it are gathered,
    in the memory of the CPU."""
    alone = predict(recipe, model, device=device)
    if num_ranks == 1:
        return alone
    rank = predict_rank(recipe, model, num_ranks, device=device)
    whole = {name: part for name, part in alone.kept.items() if name not in STATE}
    first = replace(alone, kept=whole | rank.kept, train=rank.train)
    state = {"gathered state to save": _state_bytes(recipe, _parameters(recipe, model.spec)[1])}
    host = alone.host or first
    saving, export = {name: part for name, part in host.saving.items() if name != COPIES}, host.export
    if recipe.trainer.checkpoint_every:
        saving |= state
    else:  # it comes once, when the last step is done
        export = max((state, export), key=lambda part: sum(part.values()))
    if alone.host is None or rank.host is None:
        return replace(first, saving=saving, export=export)
    others = {name: part for name, part in alone.host.kept.items() if name not in STATE}
    return replace(first, host=replace(alone.host, kept=others | rank.host.kept, saving=saving, export=export))


def predict(recipe: Recipe, model: ModelFiles, *, device: torch.device | None = None) -> Ledger:
    """What this recipe needs on one device (unset: the recipe's), in bytes; the libraries of the process itself are not
    counted."""
    algorithm, spec = resolve(recipe.algorithm), model.spec
    size = DTYPES[recipe.model.dtype].itemsize
    total, trained = _parameters(recipe, spec)
    on_cpu = (device or pick_device(recipe.model.device)).type == "cpu"
    apart = recipe.optimizer.offload and not on_cpu
    # A float32 weight is its own master, and its gradient the sum; what is offloaded is a copy always.
    state = {MOMENTS: int(_moment_bytes(recipe) * trained), SUMS: FULL * trained}
    state |= {MASTERS: FULL * trained} if size < FULL or apart else {}
    kept, host = {"weights": total * size}, dict[str, int]()
    (host if apart else kept).update(state)
    if on_cpu:
        kept[PACKED] = total * size
    copies = {COPIES: _state_bytes(recipe, trained)}
    if algorithm.critic:
        kept["critic"] = total * size
        (host if apart else kept)["state of the critic's optimizer"] = sum(state.values())
        copies["copies of the critic to save"] = copies[COPIES]
    if algorithm.needs_reference and not algorithm.teacher:
        kept["reference"] = total * size
    for role, path in {"teacher": recipe.algorithm.teacher, "reward model": recipe.reward_model.path}.items():
        if path:
            kept[role] = _parameters(Recipe(), read_spec(resolve_model(path), scoring=role == "reward model"))[0] * size
    tokens = recipe.engine.train.micro_batch_tokens
    layer = _kept_of_layer(spec) * size
    train = {
        "activations": tokens * (
            spec.num_layers * spec.hidden_size * size + layer
            if recipe.engine.train.checkpoint_activations else spec.num_layers * layer
        ),
        "logits": min(HEAD_CHUNK, tokens) * spec.vocab_size * FULL * LOGITS_COPIES,
    }  # fmt: skip
    if size < FULL or apart:
        train["gradients of a micro-batch"] = trained * size
    rollout: dict[str, int] = {}
    if algorithm.data is Data.EPISODES:
        infer = recipe.engine.infer
        width = spec.num_kv_heads * spec.head_dim
        blocks = infer.kv_tokens // infer.block_size
        part = rollout if recipe.engine.train.hand_over else kept
        part["KV cache"] = blocks * infer.block_size * 2 * width * spec.num_layers * size
        rollout["rows of logits"] = infer.max_num_seqs * spec.vocab_size * FULL * LOGITS_COPIES
    saving = copies if recipe.trainer.checkpoint_every else {}  # else nothing changes while the last one is written
    export: dict[str, int] = {}
    if lora_of(recipe) is not None:
        export["copy with the adapters merged"] = total * size
        export["sums of one matrix"] = 3 * FULL * _largest(recipe, spec)
    if on_cpu:
        return Ledger(kept=kept, train=train, rollout=rollout, saving=saving, export=export)
    written = {"weights to write": total * size}
    beside = Ledger(kept=host, train={}, rollout={}, saving=saving, export=written)
    return Ledger(kept=kept, train=train, rollout=rollout, export=export, host=beside)


def check_memory(recipe: Recipe, model: ModelFiles) -> Ledger:
    """The prediction for rank 0, where all ranks fit: side by side on a CPU, each on its own device elsewhere.

    Raises:
        ConfigError: it does not; with the largest parts and what would make them smaller.
    """
    num_ranks, device = count_ranks(recipe), pick_device(recipe.model.device)
    ledger = predict_first(recipe, model, num_ranks)
    rank = predict_rank(recipe, model, num_ranks)
    if device.type == "cpu":
        _refuse_unless_fits(ledger, (num_ranks - 1) * rank.peak, device)
        return ledger
    _refuse_unless_fits(ledger, 0, device)
    if ledger.host is not None:
        _refuse_unless_fits(ledger.host, (num_ranks - 1) * (rank.host.peak if rank.host else 0), torch.device("cpu"))
    return ledger


def _refuse_unless_fits(ledger: Ledger, others: int, device: torch.device) -> None:
    """Raise unless what is free on ``device`` takes the ledger and the ``others`` beside it."""
    needed, free = ledger.peak + others, free_memory(device)
    if free is None or needed <= free:
        return
    largest, kind = ledger.largest(), device.type.upper()
    raise ConfigError(
        f"this run needs about {needed / GIB:.1f} GiB of {kind} memory and {free / GIB:.1f} GiB are free: "
        + ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest),
        hint="; ".join(HINTS[name] for name, _ in largest if name in HINTS) or "tandem config check shows all parts",
    )


def free_memory(device: torch.device) -> int | None:
    """Bytes that this process can still take on ``device``; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = [_available(), _left_in_group()]
    return min((each for each in found if each is not None), default=None)


def _parameters(recipe: Recipe, spec: ModelSpec) -> tuple[int, int]:
    """All, and those that are trained."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in _shapes(recipe, spec).parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


def _largest(recipe: Recipe, spec: ModelSpec) -> int:
    """Numbers in the largest matrix that has an adapter."""
    adapted = adapters_of(_shapes(recipe, spec))
    return max(adapter.a.shape[1] * adapter.b.shape[0] for adapter in adapted.values())


def _shapes(recipe: Recipe, spec: ModelSpec) -> CausalLM:
    model = CausalLM(spec, Ops("fast", "cpu"), dtype=torch.float32, device="meta")
    lora = lora_of(recipe)
    if lora is not None:
        # The lengths that DoRA adds are measured on real weights, and are too few to count.
        add_adapters(model, replace(lora, dora=False), seed=0)
    return model


def _state_bytes(recipe: Recipe, trained: int) -> int:
    """What a checkpoint holds of a trained model: float32 masters and both moments."""
    return int((FULL + _moment_bytes(recipe)) * trained)


def _moment_bytes(recipe: Recipe) -> float:
    """Bytes of both moments of one trained parameter; the few that have one dimension are not told apart."""
    return 2 * (1 + FULL / BLOCK) if recipe.optimizer.moments == "8bit" else 2 * FULL


def _kept_of_layer(spec: ModelSpec) -> int:
    """Numbers a token that one layer keeps for its backward pass: what enters and leaves both norms, query, key and
    value before and after rotation, what attention gave; gate, up and their product."""
    width = (
        spec.intermediate_size if spec.experts is None else (spec.experts.per_token * spec.experts.intermediate_size)
    )
    heads = spec.num_heads + spec.num_kv_heads
    return 4 * spec.hidden_size + 3 * heads * spec.head_dim + 3 * width


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None


def _left_in_group() -> int | None:
    """What the control group of this process leaves, version 2 or 1."""
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            most, now = Path(limit).read_text().strip(), Path(used).read_text().strip()
        except OSError:
            continue
        return None if most == "max" else max(int(most) - int(now), 0)
    return None
