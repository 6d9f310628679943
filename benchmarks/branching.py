"""Branching a conversation against replaying it: ``python benchmarks/branching.py``.

Eight ways on from turn 6 of an episode: each leaf is the conversation so far and an answer of its own. Branching: the
leaves go on from the keys and values of the trunk, shared to the last token. Replaying: each leaf computes the whole
conversation again (the same engine without its prefix cache). The same seeds on both sides, so the leaves must be
equal to the token and to the bit of each log-probability.
What is compared is exact: rows that went through the model, and their floating-point operations (two a weight, and
attention over what each row sees). Times are printed beside it. Exit status 1 where a leaf differs or the ratio is
below ``--least``.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

import numpy as np
from pieces.runs import machine, recipe

from tandem.app.build import LiveModel, engine_of
from tandem.app.preflight import ModelFiles, prepare_model
from tandem.core.types import Completion, GenerateRequest, SamplingParams, ids
from tandem.models.spec import ModelSpec
from tandem.record.summary import table


def flags(options: argparse.Namespace, cached: bool) -> list[str]:
    longest = options.prompt + (options.turn + 1) * (options.new + options.observed)
    return [
        f"model.path={options.model}", f"model.dtype={options.dtype}", "model.device=cpu",
        f"model.max_context_tokens={longest}", f"engine.infer.prefix_cache={str(cached).lower()}",
        f"engine.infer.kv_tokens={(options.ways + 2) * (longest + 64)}",
    ]  # fmt: skip


def operations(spec: ModelSpec, rows: list[tuple[int, int]], num_sampled: int) -> float:
    """Of rows at places ``begin .. end - 1`` of their sequences; the head counts where a row is sampled from."""
    layer = spec.hidden_size * (2 * spec.query_size + 2 * spec.kv_size + 3 * spec.intermediate_size)
    count = sum(end - begin for begin, end in rows)
    seen = sum((end * (end + 1) - begin * (begin + 1)) / 2 for begin, end in rows)
    attention = 4.0 * spec.num_layers * spec.query_size * seen
    return 2.0 * spec.num_layers * layer * count + attention + 2.0 * spec.vocab_size * spec.hidden_size * num_sampled


async def trunk(live: LiveModel, spec: ModelSpec, options: argparse.Namespace) -> list[int]:
    """An episode up to the observation that its turn ``options.turn`` answers."""
    draw = np.random.default_rng(options.seed)
    tokens = draw.integers(0, spec.vocab_size, options.prompt).tolist()
    params = SamplingParams(max_tokens=options.new, ignore_eos=True)
    for turn in range(options.turn - 1):
        asked = GenerateRequest(id=f"trunk-{turn}", prompt_ids=ids(tokens), params=params, seed=turn)
        tokens += (await live.engine.generate(asked)).token_ids
        tokens += draw.integers(0, spec.vocab_size, options.observed).tolist()
    return tokens


async def leaves(
    live: LiveModel, prompt: list[int], options: argparse.Namespace
) -> tuple[list[Completion], int, float]:
    """The leaves, the rows that they took, and the seconds."""
    params = SamplingParams(max_tokens=options.new, ignore_eos=True)
    before, started = live.engine.stats().computed_tokens or 0, time.perf_counter()
    made = await asyncio.gather(
        *(
            live.engine.generate(GenerateRequest(id=f"leaf-{way}", prompt_ids=ids(prompt), params=params, seed=way))
            for way in range(options.ways)
        )
    )
    return made, (live.engine.stats().computed_tokens or 0) - before, time.perf_counter() - started


async def measure(options: argparse.Namespace) -> bool:
    chosen = recipe(*flags(options, cached=True))
    files: ModelFiles = prepare_model(chosen)
    spec = files.spec
    print(f"{machine()}; {options.model} {options.dtype}, {options.ways} ways at turn {options.turn}", flush=True)
    async with engine_of(chosen, files) as live:
        prompt = await trunk(live, spec, options)
        branched, branch_rows, branch_s = await leaves(live, prompt, options)
    async with engine_of(recipe(*flags(options, cached=False)), files) as live:
        replayed, replay_rows, replay_s = await leaves(live, prompt, options)
    length, new = len(prompt), options.new - 1  # the last token of an answer is not computed
    replay_flops = operations(spec, [(0, length + new)] * options.ways, options.ways * options.new)
    # What was not in the cache: the trunk's last token but never computed ones, once; then one row a leaf, and answers.
    fresh = branch_rows - options.ways * new - (options.ways - 1)
    spans = [(length - fresh, length + new), *[(length - 1, length + new)] * (options.ways - 1)]
    branch_flops = operations(spec, spans, options.ways * options.new)
    equal = all(
        (a.token_ids, a.logprobs) == (b.token_ids, b.logprobs) for a, b in zip(branched, replayed, strict=True)
    )
    ratio = replay_flops / branch_flops
    print(table([
        ["", "rows", "GFLOP", "seconds"],
        ["branch", str(branch_rows), f"{branch_flops / 1e9:.1f}", f"{branch_s:.1f}"],
        ["replay", str(replay_rows), f"{replay_flops / 1e9:.1f}", f"{replay_s:.1f}"],
        ["replay / branch", f"{replay_rows / branch_rows:.2f}", f"{ratio:.2f}", f"{replay_s / branch_s:.2f}"],
    ]))  # fmt: skip
    assert replay_rows == options.ways * (length + new), "the engine did not replay everything"
    print(f"leaves of {options.new} tokens behind {length}: {'equal to the bit' if equal else 'NOT equal'}")
    return equal and ratio >= options.least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="what model.path takes")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--observed", type=int, default=64, help="tokens between two answers")
    parser.add_argument("--turn", type=int, default=6, help="the turn that is answered in several ways")
    parser.add_argument("--ways", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--least", type=float, default=4.0, help="operations of replaying over those of branching")
    sys.exit(0 if asyncio.run(measure(parser.parse_args())) else 1)


if __name__ == "__main__":
    main()
