"""Real steps, saves and exports in processes of their own: what each took beside what was predicted, in bytes.

``python ledger_steps.py CASE...`` prints one line of JSON for each case: the name of a function below, and options of
the recipe. The libraries are loaded once; each case is a fork of that process, so its peak is its own and begins where
the libraries end. Steps of a few tokens make the optimizer's state; one of a whole micro-batch makes the peak.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from tandem.algorithms.credit import demonstration
from tandem.algorithms.spec import resolve
from tandem.app.build import DTYPES, lora_of
from tandem.app.ledger import PACKED, predict, predict_first, predict_rank
from tandem.app.preflight import ModelFiles
from tandem.config.load import load
from tandem.config.tree import Recipe
from tandem.core.types import BatchPlan, ids, mask
from tandem.engine.compute import ComputeQueue
from tandem.engine.train.checkpoint import CheckpointStore
from tandem.engine.train.optimizer import AdamW
from tandem.engine.train.parallel import Setup
from tandem.engine.train.ranked import RankedTrainEngine
from tandem.engine.train.ranks import RankGroup
from tandem.engine.train.step import LocalTrainEngine
from tandem.engine.weights import PublishedWeights
from tandem.models.loader import init_model
from tandem.models.lora import add_adapters, merged_copy
from tandem.models.saver import save_model
from tandem.models.spec import ModelSpec
from tandem.trainer.batcher import make_plan

TOKENS, FEW = 512, 8
SMALL, LARGE = (64, 1), (512, 6)  # width and layers: what warms the libraries up, and the case itself
Found = dict[str, list[int]]


def resident(name: str = "VmRSS", process: int | str = "self") -> int:
    status = Path(f"/proc/{process}/status").read_text()
    return int(re.findall(name + r":\s+(\d+)", status)[0]) * 1024


def spec_of(size: tuple[int, int]) -> ModelSpec:
    width, layers = size
    return ModelSpec(
        family="llama", vocab_size=4096, hidden_size=width, num_layers=layers, num_heads=8, num_kv_heads=4, head_dim=64,
        intermediate_size=3 * width, max_positions=2048, tied_head=True,
    )  # fmt: skip


FILES = ModelFiles(path=Path("x"), spec=spec_of(LARGE), renderer=cast(Any, None), max_context_tokens=2048)


def plan(recipe: Recipe, step: int, tokens: int, *, rows: int = 1) -> BatchPlan:
    made = [demonstration(f"r{n}", ids([n + 1] * tokens), mask([0] + [1] * (tokens - 1))) for n in range(rows)]
    return make_plan(step, made, resolve(recipe.algorithm), recipe.engine.train)


class Alone:
    """One process's model and engine."""

    def __init__(self, recipe: Recipe, size: tuple[int, int]) -> None:
        self.recipe = recipe
        self.model = init_model(spec_of(size), seed=0, dtype=DTYPES[recipe.model.dtype])
        if (lora := lora_of(recipe)) is not None:
            add_adapters(self.model, lora, seed=0)
        self.weights = PublishedWeights(self.model)
        self.engine = LocalTrainEngine(
            self.weights, ComputeQueue(), train=recipe.engine.train, optimizer=recipe.optimizer,
            algorithm=resolve(recipe.algorithm), total_steps=3,
        )  # fmt: skip

    def step(self, number: int, tokens: int) -> None:
        asyncio.run(self.engine.step(plan(self.recipe, number, tokens)))


def begun(store: CheckpointStore) -> None:
    """A checkpoint taken, behind a disk that does not answer for as long as this process lives."""
    store._writer.submit(threading.Event().wait)
    store.begin(1, {})


def after_warming_up(recipe: Recipe) -> int:
    Alone(recipe, SMALL).step(1, FEW)
    return resident()


def step(recipe: Recipe) -> Found:
    """Training, and nothing beside it."""
    before, predicted = after_warming_up(recipe), predict(recipe, FILES)
    large = Alone(recipe, LARGE)
    large.step(1, FEW)
    large.step(2, TOKENS)
    return {"measured": [resident("VmHWM") - before], "predicted": [dataclasses.replace(predicted, saving={}).peak]}


def saving(recipe: Recipe) -> Found:
    """Training while a checkpoint waits for the disk."""
    before, predicted = after_warming_up(recipe), predict(recipe, FILES)
    large = Alone(recipe, LARGE)
    large.step(1, FEW)
    with tempfile.TemporaryDirectory() as folder:
        begun(CheckpointStore(Path(folder), large.weights, large.engine.optimizer, keep=1))
        large.step(2, FEW)
        large.step(3, TOKENS)
    return {"measured": [resident("VmHWM") - before], "predicted": [predicted.peak]}


def offload(recipe: Recipe) -> Found:
    """State apart from the weights, as it is where these are on another device; here both are in one memory."""
    before, predicted = after_warming_up(recipe), predict(recipe, FILES, device=torch.device("cuda"))
    assert predicted.host is not None
    packed = predict(recipe, FILES, device=torch.device("cpu")).kept[PACKED]
    large = Alone(recipe, LARGE)
    large.engine.optimizer = AdamW(large.model, recipe.optimizer, apart=True)
    large.step(1, FEW)
    large.step(2, TOKENS)
    host = dataclasses.replace(predicted.host, saving={}, export={})
    return {"measured": [resident("VmHWM") - before], "predicted": [predicted.peak + host.peak + packed]}


def export(recipe: Recipe) -> Found:
    """The end of a run with adapters; its steps were small."""
    before, predicted = after_warming_up(recipe), predict(recipe, FILES)
    large = Alone(recipe, LARGE)
    large.step(1, FEW)
    with tempfile.TemporaryDirectory() as folder:
        save_model(merged_copy(large.model), Path(folder) / "model", tokenizer_from=None)
    predicted = dataclasses.replace(predicted, train={}, saving={})
    return {"measured": [resident("VmHWM") - before], "predicted": [predicted.peak]}


def ranks(recipe: Recipe) -> Found:
    """Two ranks; where the recipe has checkpoints, while rank 0 waits for the disk with the state of both."""
    group = RankGroup(2, timeout_s=60)
    group.start()
    (other,) = group.processes

    def run(size: tuple[int, int], tokens: int) -> None:
        dtype = DTYPES[recipe.model.dtype]
        weights = PublishedWeights(init_model(spec_of(size), seed=0, dtype=dtype))
        setup = Setup(
            spec=spec_of(size), lora=None, dtype=dtype, numerics="exact", train=recipe.engine.train,
            optimizer=recipe.optimizer, algorithm=resolve(recipe.algorithm),
        )  # fmt: skip

        async def go() -> None:
            engine = await RankedTrainEngine.open(weights, ComputeQueue(), group, setup=setup, total_steps=2)
            await engine.step(plan(recipe, 1, FEW, rows=2))
            if recipe.trainer.checkpoint_every and tokens == TOKENS:
                begun(CheckpointStore(Path("nowhere"), weights, engine.optimizer, keep=1))
            await engine.step(plan(recipe, 2, tokens, rows=2))

        asyncio.run(go())

    run(SMALL, FEW)
    before = resident(), resident(process=other)
    run(LARGE, TOKENS)
    measured = [resident("VmHWM") - before[0], resident("VmHWM", other) - before[1]]
    first, rank = predict_first(recipe, FILES, 2), predict_rank(recipe, FILES, 2)
    group.close()
    return {"measured": measured, "predicted": [first.peak, rank.peak]}


CASES: dict[str, Callable[[Recipe], Found]] = {
    function.__name__: function for function in (step, saving, offload, export, ranks)
}


def main(*cases: str) -> None:
    torch.set_num_threads(1)
    for case in cases:
        child = os.fork()
        if child == 0:
            kind, *words = case.split()
            flags = ["--algorithm.name", "sft", "--data.path", "x", "--engine.train.micro-batch-tokens", str(TOKENS)]
            print(json.dumps(CASES[kind](load(flags=[*flags, *words])[0])), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            raise SystemExit(f"{case} failed")


if __name__ == "__main__":
    main(*sys.argv[1:])
