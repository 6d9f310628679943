"""Admission, rows, and the step's one normaliser."""

from __future__ import annotations

import dataclasses

import pytest
from bare_methods import GRPO

from tandem.algorithms.catalog.grpo import DAPO
from tandem.config.sections.engine import TrainSection
from tandem.core.events import GroupDropped
from tandem.core.types import FailureKind
from tandem.trainer.batcher import Batcher
from tests.trainer.pieces import MemorySink, record


def batcher(sink: MemorySink, *, spec=GRPO, staleness: int = 0, tokens: int = 2048, share: bool = True) -> Batcher:
    return Batcher(spec, TrainSection(micro_batch_tokens=tokens, share_prefixes=share), staleness=staleness, sink=sink)


def test_order_is_group_then_episode_whatever_order_trajectories_come_in() -> None:
    sink = MemorySink()
    first, second = record("a", [1.0, 0.0]), record("b", [0.0, 0.0, 1.0])
    shuffled = [(first[0], first[1][::-1]), (second[0], (second[1][2], second[1][0], second[1][1]))]
    admitted = batcher(sink).admit(shuffled, version=0)
    assert [s.trajectory.episode_id for s in admitted.samples] == ["a.0", "a.1", "b.0", "b.1", "b.2"]
    assert admitted.num_groups == 2 and admitted.mean_reward == pytest.approx(0.4)


def test_failed_groups_are_dropped_under_their_own_name_and_the_rest_goes_on() -> None:
    sink = MemorySink()
    records = [
        record("crashed", [None, None]),
        record("long", [None, None], kind=FailureKind.PROMPT_TOO_LONG),
        record("good", [1.0, 0.0, None]),
    ]
    admitted = batcher(sink).admit(records, version=0)
    assert [(e.group_id, e.reason) for e in sink.of(GroupDropped)] == [
        ("crashed", "all_failed"),
        ("long", "prompt_too_long"),
    ]
    assert sink.of(GroupDropped)[0].detail == "2 sandbox"
    assert len(admitted.samples) == 2 and admitted.num_groups == 1
    assert admitted.metrics["dropped_all_failed"] == 1 and admitted.metrics["dropped_prompt_too_long"] == 1


def test_staleness_is_a_hard_limit() -> None:
    sink = MemorySink()
    records = [record("old", [1.0, 0.0], version=2), record("new", [1.0, 0.0], version=4)]
    admitted = batcher(sink, staleness=2).admit(records, version=5)
    assert [e.group_id for e in sink.of(GroupDropped)] == ["old"]
    assert admitted.metrics["staleness_max"] == 1 and admitted.num_groups == 1
    assert not batcher(sink, staleness=0).admit(records, version=5).samples


def test_flat_groups_count_or_are_dropped_as_the_method_says() -> None:
    flat = record("flat", [1.0, 1.0])
    sink = MemorySink()
    kept = batcher(sink).admit([flat], version=0)
    plan = batcher(sink).plan(1, kept.samples)
    assert kept.metrics["flat_groups"] == 1 and not sink.events
    assert plan.rows == () and plan.num_sequences == 2 and plan.num_loss_tokens == 3
    assert not batcher(sink, spec=DAPO).admit([flat], version=0).samples
    assert [e.reason for e in sink.of(GroupDropped)] == ["flat"]
    pulled = dataclasses.replace(GRPO, kl_weight=0.1)
    assert len(batcher(sink, spec=pulled).plan(1, kept.samples).rows[0]) == 2


def test_rows_count_shared_prompts_once() -> None:
    sink = MemorySink()
    samples = batcher(sink).admit([record("a", [1.0, 0.0, 0.0], prompt=range(20))], version=0).samples
    assert [len(s.trajectory.token_ids) for s in samples] == [21, 22, 23]
    assert [len(row) for row in batcher(sink, tokens=26).plan(1, samples).rows] == [3]
    assert [len(row) for row in batcher(sink, tokens=25).plan(1, samples).rows] == [2, 1]
    assert [len(row) for row in batcher(sink, tokens=26, share=False).plan(1, samples).rows] == [1, 1, 1]


def test_the_normaliser_does_not_depend_on_the_rows() -> None:
    sink = MemorySink()
    samples = batcher(sink).admit([record("a", [1.0, 0.0, 0.0]), record("b", [0.0, 1.0])], version=0).samples
    plans = [batcher(sink, tokens=tokens).plan(1, samples) for tokens in (16, 64, 2048)]
    assert {(p.num_loss_tokens, p.num_sequences) for p in plans} == {(1 + 2 + 3 + 1 + 2, 5)}
    assert all([s for row in p.rows for s in row] == list(samples) for p in plans)
