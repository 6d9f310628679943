"""How far another engine's log-probabilities are from the trainer's: ``python benchmarks/mismatch.py --python PYTHON``.

PYTHON is the interpreter of an environment with vLLM. Random prompts are answered under the live weights, the trainer
scores the answers, and the gap of each sampled token is told as a step would: mean, largest, share outside a ratio of
1/2 to 2, and both estimators of the KL of sampler from trainer. Then a publish is timed: all of it, and the copy of it.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import time

import numpy as np
from pieces.runs import machine, recipe

from tandem.app.build import LiveModel, engine_of
from tandem.app.preflight import prepare_model
from tandem.core.types import Completion, GenerateRequest, SamplingParams, Trajectory, floats, ids, mask
from tandem.engine.train.score import Scorer
from tandem.record.summary import table

Answered = tuple[GenerateRequest, Completion]


async def answers(live: LiveModel, options: argparse.Namespace, vocab_size: int) -> list[Answered]:
    draw = np.random.default_rng(0)
    params = SamplingParams(max_tokens=options.new, temperature=options.temperature, ignore_eos=True)
    asked = [
        GenerateRequest(id=f"r{place}", prompt_ids=ids(row), params=params, seed=place)
        for place, row in enumerate(draw.integers(1000, vocab_size, (options.samples, options.prompt)).tolist())
    ]
    made = await asyncio.gather(*map(live.engine.generate, asked))
    return list(zip(asked, made, strict=True))


def scored(request: GenerateRequest, made: Completion) -> Trajectory:
    prompt, new = len(request.prompt_ids), len(made.token_ids)
    return Trajectory(
        episode_id=request.id, group_id="g", token_ids=request.prompt_ids + made.token_ids,
        loss_mask=mask([0] * prompt + [1] * new), logprobs=floats([0.0] * prompt) + made.logprobs,
        versions=ids([-1] * prompt) + made.versions, num_prompt_tokens=prompt, temperature=request.params.temperature,
    )  # fmt: skip


async def measure(options: argparse.Namespace) -> None:
    engine = [f"engine.name={options.engine}", f"engine.numerics={options.numerics}"]
    engine += [f"engine.python={options.python}"] if options.python else []
    chosen = recipe(
        f"model.path={options.model}", f"model.dtype={options.dtype}", "model.device=cpu",
        f"model.max_context_tokens={options.prompt + options.new}", f"rollout.max_turn_tokens={options.new}", *engine,
    )  # fmt: skip
    files = prepare_model(chosen)
    print(f"{machine()}; {options.model} {options.dtype}, {options.engine}", flush=True)
    started = time.perf_counter()
    async with engine_of(chosen, files) as live:
        print(f"start: {time.perf_counter() - started:.1f} s", flush=True)
        pairs = await answers(live, options, files.spec.vocab_size)
        scorer = Scorer(live.weights.model, live.compute, chosen.engine.train)
        streams = await scorer.score([scored(*pair) for pair in pairs])
        sampler = np.concatenate([np.asarray(made.logprobs, np.float64) for _, made in pairs])
        trainer = np.concatenate([np.asarray(stream[options.prompt :], np.float64) for stream in streams])
        published = []
        for _ in range(options.publishes):
            await live.compute.run("train", lambda: live.weights.bump(1))
            started = time.perf_counter()
            await live.engine.load(live.weights.current)
            published.append(time.perf_counter() - started)
    difference = trainer - sampler
    gap = np.abs(difference)
    for place in np.argsort(gap)[: -options.worst - 1 : -1].tolist():
        where = f"{pairs[place // options.new][0].id}, token {place % options.new}"
        print(f"{where}: sampler {sampler[place]:.3f}, trainer {trainer[place]:.3f}")
    print(table([
        ["tokens", "mean gap", "largest", "outside 1/2 to 2", "KL, k1", "KL, k3", "publish, s"],
        [
            str(len(gap)), f"{gap.mean():.3g}", f"{gap.max():.3g}", f"{(gap > math.log(2)).mean():.2%}",
            f"{-difference.mean():.3g}", f"{(np.exp(difference) - 1 - difference).mean():.3g}",
            f"{statistics.median(published):.3f}",
        ],
    ]))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="vllm", choices=["vllm", "tandem"])
    parser.add_argument("--python", default="", help="interpreter of an environment with vLLM")
    parser.add_argument("--numerics", default="exact", choices=["exact", "fast"])
    parser.add_argument("--model", default="smollm2", help="what model.path takes")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--worst", type=int, default=3, help="how many of the largest gaps to show")
    parser.add_argument("--publishes", type=int, default=5)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
