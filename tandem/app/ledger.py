"""How much memory a run will need, said before a model is loaded.

Owns: the sizes of weights, gradients, optimizer state, activations and KV cache, for each phase of a run, and the
refusal of a run that cannot fit. Weights, state and KV are exact; activations are what the layers keep for the backward
pass, counted by hand; what libraries and the allocator take on top is a measured share. The tests compare the sum with
the peak of a real step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tandem.algorithms.spec import Data, resolve
from tandem.app.build import DTYPES, lora_of
from tandem.app.preflight import ModelFiles, pick_device
from tandem.config.tree import Recipe
from tandem.core.errors import ConfigError
from tandem.kernels.functions import HEAD_CHUNK
from tandem.kernels.ops import Ops
from tandem.models.causal_lm import CausalLM
from tandem.models.lora import add_adapters
from tandem.models.spec import ModelSpec

FULL = 4  # bytes of a float32: masters, moments, summed gradients, logits
LOGITS_COPIES = 3  # a chunk of logits, its exponentials, its gradient
GAPS = 0.25  # of the rest: scratch of the libraries and gaps of the allocator, as measured on CPU; not derived
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Bytes by name: ``kept`` through the whole run, ``train`` and ``rollout`` on top of it in their phase."""

    kept: dict[str, int]
    train: dict[str, int]
    rollout: dict[str, int]

    @property
    def peak(self) -> int:
        """The larger of the two phases. One process holds both: what a phase frees, the other one uses."""
        exact = sum(self.kept.values()) + max(sum(self.train.values()), sum(self.rollout.values()))
        return int(exact * (1 + GAPS))

    def rows(self) -> list[list[str]]:
        """A table in GiB, largest first in each phase."""
        lines = [["memory", "GiB"]]
        for phase, part in (("kept", self.kept), ("training", self.train), ("rollout", self.rollout)):
            for name, size in sorted(part.items(), key=lambda entry: -entry[1]):
                lines.append([f"{phase}: {name}", f"{size / GIB:.2f}"])
        return [*lines, [f"peak, with {GAPS:.0%} for scratch and gaps", f"{self.peak / GIB:.2f}"]]


def predict(recipe: Recipe, model: ModelFiles) -> Ledger:
    """What this recipe needs on its device, in bytes; the libraries of the process itself are not counted."""
    algorithm, spec = resolve(recipe.algorithm), model.spec
    size = DTYPES[recipe.model.dtype].itemsize
    total, trained = _parameters(recipe, spec)
    episodes = algorithm.data is Data.EPISODES
    kept = {"weights": total * size, "moments of the optimizer": 2 * FULL * trained}
    # A float32 weight is its own master, and its gradient the sum.
    kept["summed gradients"] = FULL * trained
    if size < FULL:
        kept["float32 masters"] = FULL * trained
    if pick_device(recipe.model.device).type == "cpu":
        kept["weights in the layout of the products"] = total * size
    if algorithm.critic:
        kept["critic and its state"] = total * size + trained * FULL * (3 if size == FULL else 4)
    if algorithm.needs_reference and not algorithm.teacher:
        kept["reference"] = total * size
    rollout: dict[str, int] = {}
    if episodes:
        infer = recipe.engine.infer
        width = spec.num_kv_heads * spec.head_dim
        blocks = infer.kv_tokens // infer.block_size
        kept["KV cache"] = blocks * infer.block_size * 2 * width * spec.num_layers * size
        rollout["rows of logits"] = infer.max_num_seqs * spec.vocab_size * FULL * LOGITS_COPIES
    tokens = recipe.engine.train.micro_batch_tokens
    layer = _kept_of_layer(spec) * size
    train = {
        "activations": tokens * (
            spec.num_layers * spec.hidden_size * size + layer
            if recipe.engine.train.checkpoint_activations else spec.num_layers * layer
        ),
        "logits": min(HEAD_CHUNK, tokens) * spec.vocab_size * FULL * LOGITS_COPIES,
    }  # fmt: skip
    if size < FULL:
        train["gradients of a micro-batch"] = trained * size
    return Ledger(kept=kept, train=train, rollout=rollout)


def check_memory(recipe: Recipe, model: ModelFiles) -> Ledger:
    """The prediction, where it fits.

    Raises:
        ConfigError: it does not; with the largest parts and what would make them smaller.
    """
    ledger = predict(recipe, model)
    free = free_memory(pick_device(recipe.model.device))
    if free is None or ledger.peak <= free:
        return ledger
    parts = {**ledger.kept, **max((ledger.train, ledger.rollout), key=lambda part: sum(part.values()))}
    largest = sorted(parts.items(), key=lambda entry: -entry[1])[:3]
    hints = {
        "KV cache": "lower engine.infer.kv_tokens",
        "activations": "lower engine.train.micro_batch_tokens or set engine.train.checkpoint_activations",
        "moments of the optimizer": "train adapters (lora.rank = 16)",
        "weights": "a smaller model",
    }
    raise ConfigError(
        f"this run needs about {ledger.peak / GIB:.1f} GiB and {free / GIB:.1f} GiB are free: "
        + ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest),
        hint="; ".join(hints[name] for name, _ in largest if name in hints) or "tandem config check shows all parts",
    )


def free_memory(device: torch.device) -> int | None:
    """Bytes that this process can still take on ``device``; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = [_available(), _left_in_group()]
    return min((each for each in found if each is not None), default=None)


def _parameters(recipe: Recipe, spec: ModelSpec) -> tuple[int, int]:
    """All, and those that are trained."""
    model = CausalLM(spec, Ops("fast", "cpu"), dtype=torch.float32, device="meta")
    lora = lora_of(recipe)
    if lora is not None:
        # The lengths that DoRA adds are measured on real weights, and are too few to count.
        add_adapters(model, replace(lora, dora=False), seed=0)
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


def _kept_of_layer(spec: ModelSpec) -> int:
    """Numbers a token that one layer keeps for its backward pass: what enters and leaves both norms, query, key and
    value before and after rotation, what attention gave; gate, up and their product."""
    width = spec.intermediate_size if spec.experts is None else (
        spec.experts.per_token * spec.experts.intermediate_size
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
