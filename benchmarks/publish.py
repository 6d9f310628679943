"""Time of a weight publish to an engine in another process, beside one copy of the same weights in memory.

    python benchmarks/publish.py --model smollm2 --rounds 20

The two alternate. A publish is everything: the copy into shared memory with the sum of each tensor, the message, the
comparison of every tensor on the other side, the switch between two engine steps, and the answer. Within a process a
publish copies nothing; the script checks that it computes on the same memory. Ends with 1 above ``--most`` times.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time

import torch

from tandem.app.build import LiveModel, engine_of
from tandem.app.preflight import prepare_model
from tandem.config.load import from_mapping
from tandem.config.tree import Recipe
from tandem.core.types import GenerateRequest, SamplingParams, ids
from tandem.engine.infer.loop import InferEngine


def recipe_of(model: str, *, process: bool) -> Recipe:
    return from_mapping({"model": {"path": model}, "engine": {"process": process}})


async def one_token(live: LiveModel, name: str) -> None:
    request = GenerateRequest(id=name, prompt_ids=ids(range(10, 26)), params=SamplingParams(max_tokens=1))
    await live.engine.generate(request)


async def apart(model: str, rounds: int) -> float:
    recipe = recipe_of(model, process=True)
    async with engine_of(recipe, prepare_model(recipe)) as live:
        tensors = [parameter.detach() for parameter in live.weights.model.parameters()]
        copies = [torch.zeros_like(tensor) for tensor in tensors]
        copied, published = [], []
        for number in range(rounds + 2):
            started = time.perf_counter()
            for tensor, copy in zip(tensors, copies, strict=True):
                copy.copy_(tensor)
            middle = time.perf_counter()
            live.weights.bump(number)
            await live.engine.load(live.weights.current)
            ended = time.perf_counter()
            if number >= 2:  # each slot's pages are there
                copied.append(middle - started)
                published.append(ended - middle)
        await one_token(live, "after")
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    ratio = min(published) / min(copied)
    print(f"{model}: {num_bytes / 1e6:.0f} MB in {len(tensors)} tensors, {torch.get_num_threads()} threads")
    for name, times in (("one copy in memory", copied), ("publish to a process", published)):
        print(f"  {name:<22} {1e3 * min(times):7.1f} ms (median {1e3 * statistics.median(times):.1f})")
    median = statistics.median(published) / statistics.median(copied)
    print(f"  publish / copy         {ratio:7.2f} (of medians {median:.2f})")
    return ratio


async def within(model: str) -> bool:
    recipe = recipe_of(model, process=False)
    async with engine_of(recipe, prepare_model(recipe)) as live:
        assert isinstance(live.engine, InferEngine)
        before = [parameter.data_ptr() for parameter in live.weights.model.parameters()]
        started = time.perf_counter()
        live.weights.bump(1)
        await live.engine.load(live.weights.current)
        spent = time.perf_counter() - started
        await one_token(live, "here")
        same = before == [parameter.data_ptr() for parameter in live.weights.model.parameters()]
    print(f"  within the process     {1e3 * spent:7.2f} ms, {0 if same else 'some'} copies")
    return same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--most", type=float, default=1.2, help="largest ratio that is good")
    options = parser.parse_args()
    ratio = asyncio.run(apart(options.model, options.rounds))
    return 0 if asyncio.run(within(options.model)) and ratio <= options.most else 1


if __name__ == "__main__":
    sys.exit(main())
