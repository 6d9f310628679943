"""The sampler's log-probabilities against the trainer's forward, bit for bit: ``python benchmarks/exactness.py``.

For every family (Llama, Qwen3, Gemma 3 with windows, Qwen3-MoE) of a small random model, in bfloat16 and float32, with
one and with two threads: random episodes through an engine that is disturbed on purpose. Prompts of a few common
trunks (cache hits), random chunk sizes (the step budget changes from round to round), mates that come and go, a pool
too small for all (preemption, swap to CPU memory and back), forks at random tokens, and second turns. Each sampled
token's log-probability is compared with that of one packed training sequence, gradients on.
``--portable``: by the operations that run on every device, which an accelerator takes, and the CPU when told so.
Prints a table; exit status 1 on a single differing bit, or where a disturbance did not happen.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from pieces.runs import machine

from tandem.config.sections.engine import EngineSection, InferSection
from tandem.core.types import Completion, GenerateRequest, SamplingParams, ids
from tandem.engine.compute import ComputeQueue
from tandem.engine.infer.loop import InferEngine
from tandem.engine.weights import PublishedWeights
from tandem.kernels.ops import KeyIndex
from tandem.models.attention import AttentionContext
from tandem.models.causal_lm import CausalLM
from tandem.models.loader import init_model
from tandem.models.spec import ExpertSpec, ModelSpec, RopeSpec
from tandem.record.summary import table

CONTEXT, VOCABULARY = 192, 320
DISTURBANCES = ("cached", "preempted", "swapped", "forks")


def specs() -> dict[str, ModelSpec]:
    plain = ModelSpec(
        family="llama", vocab_size=VOCABULARY, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
        intermediate_size=96, max_positions=256, tied_head=True,
    )  # fmt: skip
    return {
        "llama": plain,
        "qwen3": replace(plain, family="qwen3", qk_norm=True, tied_head=False),
        "gemma3": replace(
            plain, family="gemma3_text", qk_norm=True, num_kv_heads=1, windows=(16, 0), intermediate_size=75,
            local_rope=RopeSpec(theta=500.0), query_scalar=24, activation="gelu_tanh", unit_offset_norms=True,
            post_norms=True, scaled_embedding=True,
        ),
        "qwen3_moe": replace(
            plain, family="qwen3_moe", qk_norm=True, tied_head=False,
            experts=ExpertSpec(num_experts=8, per_token=2, intermediate_size=32, normalised=True),
        ),
    }  # fmt: skip


@dataclass
class Count:
    """What was compared and what happened meanwhile."""

    tokens: int = 0
    differing: int = 0
    worst: float = 0.0
    happened: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DISTURBANCES, 0))


def model_of(spec: ModelSpec, dtype: torch.dtype, device: str, *, portable: bool) -> CausalLM:
    model = init_model(spec, seed=0, dtype=dtype, device=device, portable=portable or None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # distributions with a shape: neither flat nor one-hot
    return model


def trained(model: CausalLM, prompt: list[int], answer: Completion, temperature: float) -> np.ndarray:
    """What training computes for the answer: one packed sequence, gradients on."""
    tokens = [*prompt, *answer.token_ids]
    n, first, device = len(tokens) - 1, len(prompt) - 1, model.device
    slots = torch.arange(n, dtype=torch.int32, device=device)
    keys = KeyIndex(slots, torch.zeros(n, dtype=torch.int64, device=device), slots + 1)
    ids_T, positions_T = torch.tensor(tokens[:-1], device=device), torch.arange(n, device=device)
    hidden = model(ids_T, positions_T, AttentionContext(keys=keys))
    targets, at = (torch.tensor(tokens[first + 1 :], device=device), torch.full((n - first,), temperature))
    logprobs, _ = model.ops.token_logprobs(hidden[first:], model.head_weight, targets, at.to(device))
    return logprobs.detach().cpu().numpy()


async def round_of(model: CausalLM, draw: random.Random, count: Count) -> None:
    """One engine of random measures, its requests, some of their forks, and a second turn of each."""
    infer = InferSection(
        max_num_seqs=draw.choice([3, 8, 16]), max_step_tokens=draw.choice([16, 23, 48, 200]),
        block_size=draw.choice([4, 8, 16]), kv_tokens=draw.choice([208, 240, 2048]), swap_tokens=1024,
    )  # fmt: skip
    compute = ComputeQueue()
    section = EngineSection(infer=infer)
    engine = InferEngine(model, PublishedWeights(model), section, compute, max_context_tokens=CONTEXT, eos_ids=())
    trunks = [[draw.randrange(VOCABULARY) for _ in range(70)] for _ in range(3)]
    found: list[tuple[list[int], Completion, float]] = []

    async def run(name: str, prompt: list[int], new: int, fork_at: int | None = None) -> None:
        temperature = draw.choice([1.0, 1.0, 0.7, 1.5])
        params = SamplingParams(max_tokens=new, temperature=temperature)
        forks: list[asyncio.Task[list[Completion]]] = []

        def hear(_: object) -> None:
            nonlocal heard
            heard += 1
            if heard == fork_at:
                at = draw.randrange(heard + 1)
                ways = {f"{name}/{way}": draw.randrange(2**31) for way in range(3)}
                forks.append(asyncio.ensure_future(engine.fork(name, ways, at=at)))

        heard = 0
        asked = GenerateRequest(
            id=name, prompt_ids=ids(prompt), params=params, seed=draw.randrange(2**31), group=draw.choice("abc")
        )
        answers = [await engine.generate(asked, on_tokens=hear)]
        for task in forks:
            answers += await task
            count.happened["forks"] += 3
        found.extend((prompt, answer, temperature) for answer in answers)

    async def episode(number: int) -> None:
        await asyncio.sleep(draw.random() * 0.05)
        prompt = draw.choice(trunks)[: draw.randint(1, 70)] + [draw.randrange(VOCABULARY)]
        new = draw.randint(2, 60)
        before = len(found)
        await run(f"{number}.1", prompt, new, draw.randint(1, new - 1) if draw.random() < 0.4 else None)
        mine = next(answer for given, answer, _ in found[before:] if given is prompt)
        await run(f"{number}.2", [*prompt, *mine.token_ids, draw.randrange(VOCABULARY)], draw.randint(1, 30))

    try:
        await asyncio.wait_for(asyncio.gather(*(episode(number) for number in range(20))), 300)
        stats = engine.stats()
        assert stats.blocks_in_use == 0, f"{stats.blocks_in_use} blocks are held by nobody"
    finally:
        await engine.close()
        compute.close()
    for name, more in (
        ("cached", stats.cached_tokens), ("preempted", stats.preemptions), ("swapped", stats.returned_blocks)
    ):  # fmt: skip
        count.happened[name] += more or 0
    for prompt, answer, temperature in found:
        expected, sampled = trained(model, prompt, answer, temperature), np.array(answer.logprobs)
        count.tokens += len(sampled)
        count.differing += int((expected != sampled).sum())
        count.worst = max(count.worst, float(np.abs(expected - sampled).max()))


def measure(options: argparse.Namespace) -> bool:
    print(f"{machine()}; {options.tokens} tokens each, seed {options.seed}", flush=True)
    rows = [["family", "type", "threads", "tokens", "cached", "preempted", "blocks back", "forks", "differ", "worst"]]
    passed = True
    for family in options.family:
        spec = specs()[family]
        for dtype in (getattr(torch, name) for name in options.dtype):
            for threads in options.threads:
                torch.set_num_threads(threads)
                model = model_of(spec, dtype, options.device, portable=options.portable)
                count, draw = Count(), random.Random(options.seed)
                while count.tokens < options.tokens:
                    asyncio.run(round_of(model, draw, count))
                passed &= not count.differing and all(count.happened.values())
                rows.append([
                    family, str(dtype).removeprefix("torch."), str(threads), str(count.tokens),
                    *map(str, count.happened.values()), str(count.differing), f"{count.worst:.1e}",
                ])  # fmt: skip
                print(" ".join(rows[-1]), flush=True)
    print(table(rows))
    print("every bit is equal" if passed else "BITS DIFFER, or a disturbance did not happen")
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=10_000, help="at least so many for each row of the table")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", nargs="+", default=list(specs()), choices=list(specs()))
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--portable", action="store_true")
    sys.exit(0 if measure(parser.parse_args()) else 1)


if __name__ == "__main__":
    main()
