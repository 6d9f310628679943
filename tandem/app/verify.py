"""What must not change a result, changed; and what must, turned: on the user's recipe with a reduced model.

Owns: ``tandem verify``; the episodes are sampled by the recipe's engine. Refuses: judging how well a recipe learns.
Invariant: every line of the table is measured here and now; nothing is assumed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import torch

from tandem.algorithms.spec import AlgorithmSpec, Data, resolve
from tandem.app.bench import CLOSE, PROMPT, STILL, Bench, Check, difference
from tandem.app.build import DTYPES, prepare_process
from tandem.app.knobs import knob_checks
from tandem.config.sections.engine import TrainSection
from tandem.config.tree import Recipe
from tandem.core.types import (
    Sample,
)
from tandem.engine.compute import ComputeQueue
from tandem.engine.train.ranks import RankGroup
from tandem.engine.train.step import LocalTrainEngine
from tandem.engine.weights import PublishedWeights
from tandem.record.summary import table


def verify(recipe: Recipe) -> int:
    """Check a recipe and print the table; 0 if every invariant holds and every knob binds, else 1."""
    checks = asyncio.run(examine(recipe))
    rows = [["check", "wanted", "found", ""]]
    rows += [[check.name, check.wanted, check.found, "ok" if check.holds else "BROKEN"] for check in checks]
    print(table(rows))
    broken = sum(not check.holds for check in checks)
    print(f"\n{len(checks)} checks, {broken} broken")
    return 1 if broken else 0


async def examine(recipe: Recipe, *, algorithm: AlgorithmSpec | None = None, num_ranks: int = 2) -> list[Check]:
    """Run all checks; ``algorithm`` stands in for the recipe's. The gradient of one process is compared with that of
    ``num_ranks`` (1: not compared)."""
    prepare_process(recipe)
    method = algorithm or resolve(recipe.algorithm)
    compute = ComputeQueue()
    try:
        bench = Bench(recipe, method, compute)
        checks = await _engine_checks(bench)
        checks += await _gradient_checks(bench)
        if num_ranks > 1 and not bench.scores:  # reward models train on one device
            checks.append(await _rank_check(bench, num_ranks))
        return checks + await knob_checks(bench)
    finally:
        compute.close()


async def _engine_checks(bench: Bench) -> list[Check]:
    model = bench.model(DTYPES[bench.recipe.model.dtype])
    together = await bench.sample(model)
    alone = [(await bench.sample(model, [number]))[0] for number in range(len(together))]
    apart = sum(a.token_ids != b.token_ids or a.logprobs != b.logprobs for a, b in zip(together, alone, strict=True))
    engine = LocalTrainEngine(
        PublishedWeights(model), bench.compute, train=bench.recipe.engine.train, optimizer=STILL,
        algorithm=bench.method, total_steps=1,
    )  # fmt: skip
    scored = await engine.score(bench.trajectories(together))
    gap = max(
        float(np.abs(np.array(stream[PROMPT:]) - np.array(completion.logprobs)).max())
        for stream, completion in zip(scored, together, strict=True)
    )
    exact = bench.recipe.engine.numerics == "exact"
    loose = 1e-4 if bench.recipe.model.dtype == "float32" else 0.1
    checks = [
        Check(
            name="sampler against trainer, log-probabilities", wanted="equal bits" if exact else f"within {loose}",
            found=f"{gap:.2g} apart", holds=gap == 0 if exact else gap <= loose,
        )
    ]  # fmt: skip
    if exact:
        checks.append(
            Check(
                name="a request alone and among others", wanted="equal tokens and bits",
                found=f"{apart} of {len(together)} differ", holds=apart == 0,
            )
        )  # fmt: skip
    return checks


async def _gradient_checks(bench: Bench) -> list[Check]:
    trajectories = bench.trajectories(await bench.sample(bench.model(torch.float32)))
    samples, section = bench.samples(trajectories, bench.method, drift=0.3), bench.whole
    whole = await bench.gradient(bench.method, samples, section)
    size = max(float(value.abs().max()) for value in whole.values())
    checks = [Check(name="there is a gradient", wanted="not 0", found=f"largest {size:.2g}", holds=size > 0)]
    unit = 2 if bench.method.data is Data.PREFERENCES else 1
    backwards = [sample for begin in range(len(samples) - unit, -1, -unit) for sample in samples[begin : begin + unit]]
    cases: dict[str, tuple[Sequence[Sample], TrainSection]] = {
        "micro-batches of one sample": (samples, section.model_copy(update={"micro_batch_tokens": 16})),
        "micro-batches of 60 tokens": (samples, section.model_copy(update={"micro_batch_tokens": 60})),
        "samples in the opposite order": (backwards, section),
        "common beginnings computed once": (samples, section.model_copy(update={"share_prefixes": True})),
        "activations computed again": (samples, section.model_copy(update={"checkpoint_activations": True})),
        "as the recipe has it": (samples, bench.recipe.engine.train),
    }
    for name, (given, cut) in cases.items():
        apart = difference(whole, await bench.gradient(bench.method, given, cut))
        checks.append(
            Check(
                name=f"gradient: {name}", wanted=f"within {CLOSE:.0e}", found=f"{apart:.1e} apart", holds=apart <= CLOSE
            )
        )
    return checks


async def _rank_check(bench: Bench, num_ranks: int) -> Check:
    """One process's gradient against that of several, on the CPU whatever the recipe trains on."""
    samples = bench.samples(bench.trajectories(await bench.sample(bench.model(torch.float32))), bench.method, drift=0.3)
    whole = await bench.gradient(bench.method, samples, bench.whole)
    ranks = RankGroup(num_ranks, threads=bench.recipe.engine.threads or 1)
    try:
        await asyncio.to_thread(ranks.start)
        apart = difference(whole, await bench.ranked_gradient(samples, ranks))
    finally:
        ranks.close()
    return Check(
        name=f"gradient: {num_ranks} processes", wanted=f"within {CLOSE:.0e}", found=f"{apart:.1e} apart",
        holds=apart <= CLOSE,
    )  # fmt: skip
