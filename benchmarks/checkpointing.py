"""What a checkpoint that is written while training goes on costs the steps: ``python benchmarks/checkpointing.py``.

SmolLM2's shapes with random weights, the real train engine and store. A round: steps alone; steps from the moment a
checkpoint is taken until it is on the disk; a save that training waits for. What an asynchronous one costs is the time
of its steps above that of as many alone, and how long taking it held training up. Sizes: the state, and how much of it
had to be copied because a step was about to change it before it was written.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from pieces.runs import machine

from tandem.algorithms.catalog.sft import SFT
from tandem.algorithms.credit import demonstration
from tandem.config.sections.engine import TrainSection
from tandem.config.sections.optimizer import OptimizerSection
from tandem.core.types import ids, mask
from tandem.engine.compute import ComputeQueue
from tandem.engine.memory import keep_freed_memory
from tandem.engine.train import checkpoint
from tandem.engine.train.checkpoint import CheckpointStore
from tandem.engine.train.step import LocalTrainEngine
from tandem.engine.weights import PublishedWeights
from tandem.models.builtin import resolve_model
from tandem.models.loader import init_model, read_spec
from tandem.record.summary import table
from tandem.trainer.batcher import make_plan

GB = 1e9


@dataclasses.dataclass
class Round:
    alone: list[float]
    during: list[float]
    held: float  # while it was taken
    written: float  # from then until it was on the disk
    copied: int
    waited: float  # for a save that training waits for

    @property
    def cost(self) -> float:
        return self.held + sum(self.during) - len(self.during) * statistics.median(self.alone)


class Bench:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        spec = dataclasses.replace(read_spec(resolve_model("smollm2")), num_layers=options.layers)
        self.compute, self.number = ComputeQueue(), 0
        weights = PublishedWeights(init_model(spec, seed=0, dtype=torch.float32, numerics=options.numerics))
        self.section = TrainSection(micro_batch_tokens=options.tokens)
        self.engine = LocalTrainEngine(
            weights, self.compute, train=self.section, optimizer=OptimizerSection(), algorithm=SFT, total_steps=10_000
        )
        self.store = CheckpointStore(folder, weights, self.engine.optimizer, keep=1)
        stream = np.random.default_rng(0).integers(1, spec.vocab_size, options.tokens).tolist()
        self.rows = [demonstration("r", ids(stream), mask([0] + [1] * (len(stream) - 1)))]

    async def step(self) -> float:
        self.number += 1
        started = time.perf_counter()
        await self.engine.step(make_plan(self.number, self.rows, SFT, self.section))
        return time.perf_counter() - started

    async def round(self, steps: int) -> Round:
        copied: list[int] = []
        plain = checkpoint.keep_all

        def counted(held: object) -> int:
            copied.append(plain(held))  # type: ignore[arg-type]
            return copied[-1]

        checkpoint.keep_all = counted
        alone = [await self.step() for _ in range(steps)]
        started = time.perf_counter()
        writing = await asyncio.to_thread(self.store.begin, self.number, {})
        held, during = time.perf_counter() - started, list[float]()
        done: list[float] = []
        writing.add_done_callback(lambda _: done.append(time.perf_counter()))
        while not done:
            during.append(await self.step())
        checkpoint.keep_all = plain
        before = time.perf_counter()
        await asyncio.to_thread(self.store.save, self.number, {})
        waited = time.perf_counter() - before
        return Round(alone, during, held, done[0] - started, sum(copied), waited)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=256, help="of a step")
    parser.add_argument("--steps", type=int, default=3, help="alone, in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--numerics", default="fast", choices=["exact", "fast"])
    parser.add_argument("--folder", type=Path, help="on the disk that is meant")
    options = parser.parse_args()
    keep_freed_memory()
    folder = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=options.folder))
    try:
        bench = Bench(options, folder)
        asyncio.run(bench.step())  # warms up, and makes the state
        rounds = [asyncio.run(bench.round(options.steps)) for _ in range(options.rounds)]
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    finally:
        shutil.rmtree(folder)
    print(f"{machine()}; state {size / GB:.2f} GB, {options.tokens} tokens a step, {options.numerics}")
    rows = [["round", "step alone s", "steps during s", "held s", "on the disk after s", "copied GB", "cost s",
             "a save that is waited for s"]]  # fmt: skip
    for number, each in enumerate(rounds, start=1):
        during = " ".join(f"{one:.2f}" for one in each.during)
        alone = statistics.median(each.alone)
        numbers = (each.held, each.written, each.copied / GB, each.cost, each.waited)
        rows.append([str(number), f"{alone:.2f}", during, *(f"{one:.2f}" for one in numbers)])
    print(table(rows))


if __name__ == "__main__":
    main()
