"""Weights and optimizer move between numbers of ranks; ranks without samples take part (W3 on four)."""

from __future__ import annotations

import asyncio

from bare_methods import GRPO

from tandem.trainer.batcher import make_plan
from tests.engine.train.test_ranked import SECTION, STILL, Process, apart, build, started
from tests.engine.train.tiny import gradients, sample


def test_a_checkpoint_goes_from_two_ranks_to_one_to_four(tmp_path) -> None:
    for ranks in started(2):
        two = Process(ranks, folder=tmp_path)
        two.train(1, 2)
        two.store.save(2, {})
    one = Process(None, folder=tmp_path, seed=5)
    one.store.restore(2)
    assert one.weights.digest() == two.weights.digest()
    one.train(3, 3)
    one.store.save(3, {})
    whole = Process(None)
    whole.train(1, 4)
    for ranks in started(4):
        four = Process(ranks, folder=tmp_path, seed=6)
        four.store.restore(3)
        assert four.weights.digest() == one.weights.digest() and four.weights.version == 3
        four.train(4, 4)
        ours, theirs = (dict(process.weights.model.named_parameters()) for process in (whole, four))
        assert apart(ours, theirs) < 1e-5
        # W3: two samples, so two of the four ranks have none.
        samples = [sample([1, 2, 3], [0, 1, 1]), sample([4, *range(5, 11)], [0] + [1] * 6, advantage=-1.0)]
        process = Process(ranks, "mixture", optimizer=STILL)
        asyncio.run(process.step(make_plan(1, samples, GRPO, SECTION)))
        assert apart(gradients(build("mixture"), GRPO, samples, SECTION), process.gradient()) < 1e-6
