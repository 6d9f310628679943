"""Groups to a plan: what is trained, and what is dropped and why.

Owns: admission (all failed, stale, flat), the rows of a plan under the token budget, and the one normaliser of
the step. Refuses: tensors; waiting.
Invariants: order is group, then episode, then branch, as they came in; samples that cannot change a weight are
left out of the rows but count in the normaliser; nothing is dropped without an event.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tandem.algorithms.credit import has_gradient, num_loss_tokens, stamp
from tandem.algorithms.spec import AlgorithmSpec, Data
from tandem.config.sections.engine import TrainSection
from tandem.core.events import GroupDropped
from tandem.core.protocols import EventSink
from tandem.core.types import BatchPlan, FailureKind, Group, Ids, Sample, Trajectory
from tandem.text.prefixes import longest_shared

GroupRecord = tuple[Group, tuple[Trajectory, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """What came through: samples in order, and numbers about them and about what did not."""

    samples: tuple[Sample, ...]
    num_groups: int
    mean_reward: float | None  # of every scored episode that was looked at
    metrics: dict[str, float]


class Batcher:
    """Admits groups for one algorithm. ``staleness`` is the most steps between sampling and training."""

    def __init__(self, algorithm: AlgorithmSpec, train: TrainSection, *, staleness: int, sink: EventSink) -> None:
        self.algorithm = algorithm
        self._train = train
        self._staleness = staleness * algorithm.updates_per_step  # each update of a step is a version
        self._sink = sink

    def admit(self, records: Sequence[GroupRecord], *, version: int) -> Admitted:
        """Turn the groups of one step into samples; ``version`` is that of the weights about to be trained."""
        samples: list[Sample] = []
        rewards: list[float] = []
        ages: list[int] = []
        num_groups, num_flat, dropped = 0, 0, {"all_failed": 0, "prompt_too_long": 0, "stale": 0, "flat": 0}
        for group, trajectories in records:
            rewards += [episode.reward for episode in group.episodes if episode.reward is not None]
            reason, detail = self._refusal(group, trajectories, version)
            stamped = [] if reason else stamp(self.algorithm, group, _in_order(group, trajectories))
            flat = bool(stamped) and not any(any(sample.advantages) for sample in stamped)
            if flat and self.algorithm.drop_flat:
                reason, detail = "flat", "every advantage is 0"
            if reason:
                dropped[reason] += 1
                self._sink.emit(GroupDropped(group_id=group.id, task_id=group.task.id, reason=reason, detail=detail))
                continue
            num_groups += 1
            num_flat += flat
            samples += stamped
            ages += [version - oldest for t in trajectories if (oldest := _oldest_version(t)) is not None]
        metrics = {f"dropped_{reason}": float(count) for reason, count in dropped.items()}
        metrics["flat_groups"] = float(num_flat)
        if ages:
            metrics |= {"staleness_mean": float(np.mean(ages)), "staleness_max": float(max(ages))}
        return Admitted(
            samples=tuple(samples),
            num_groups=num_groups,
            mean_reward=float(np.mean(rewards)) if rewards else None,
            metrics=metrics | length_metrics(samples),
        )

    def plan(self, step: int, samples: Sequence[Sample]) -> BatchPlan:
        """Close the plan of a step with one update."""
        return make_plan(step, samples, self.algorithm, self._train)

    def plans(self, step: int, samples: Sequence[Sample]) -> Iterator[BatchPlan]:
        """The plans of all updates of a step: in each pass the same minibatches, of whole groups as far as there are
        enough, in order. Each minibatch is its own normaliser."""
        parts = minibatches(samples, self.algorithm.minibatches)
        for _ in range(self.algorithm.passes):
            for part in parts:
                yield self.plan(step, part)

    def _refusal(self, group: Group, trajectories: Sequence[Trajectory], version: int) -> tuple[str, str]:
        """Why a group cannot be trained on, as reason and detail; two empty strings when it can."""
        if all(episode.reward is None for episode in group.episodes):
            kinds = [episode.failure.kind for episode in group.episodes if episode.failure is not None]
            too_long = bool(kinds) and all(kind is FailureKind.PROMPT_TOO_LONG for kind in kinds)
            detail = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
            return ("prompt_too_long" if too_long else "all_failed"), detail
        oldest = [number for t in trajectories if (number := _oldest_version(t)) is not None]
        if oldest and version - min(oldest) > self._staleness:
            return "stale", f"sampled under version {min(oldest)}, weights are {version}, limit {self._staleness}"
        return "", ""


def minibatches(samples: Sequence[Sample], count: int) -> list[list[Sample]]:
    """Cut samples, in order, into ``count`` parts of about equally many groups; fewer where there are fewer groups."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.trajectory.group_id, []).append(sample)
    whole = list(groups.values())
    count = min(count, len(whole))
    edges = [len(whole) * index // count for index in range(count + 1)] if count else [0]
    return [list(itertools.chain.from_iterable(whole[a:b])) for a, b in itertools.pairwise(edges)]


def _units(samples: Sequence[Sample], algorithm: AlgorithmSpec) -> Iterator[tuple[Sample, ...]]:
    """What must not be torn apart: pairs of preferences, else single samples."""
    if algorithm.data is not Data.PREFERENCES:
        yield from ((sample,) for sample in samples)
        return
    if len(samples) % 2:
        raise ValueError(f"{len(samples)} samples are no pairs")
    yield from zip(samples[::2], samples[1::2], strict=True)


def make_plan(step: int, samples: Sequence[Sample], algorithm: AlgorithmSpec, train: TrainSection) -> BatchPlan:
    """Pack samples into rows, in order, each row within the budget of distinct tokens (a sample that alone is
    over it gets a row of its own; the two of a preference pair stay together)."""
    counts = [num_loss_tokens(sample) for sample in samples]
    rows: list[list[Sample]] = []
    streams: list[Ids] = []
    room = 0
    for unit in _units(samples, algorithm):
        if not any(has_gradient(algorithm, sample) for sample in unit):
            continue
        own = _distinct(unit, streams, train)
        if not rows or own > room:
            rows.append([])
            streams, room = [], train.micro_batch_tokens
            own = _distinct(unit, streams, train)
        rows[-1] += unit
        streams += [sample.trajectory.token_ids for sample in unit]
        room -= own
    return BatchPlan(
        step=step,
        rows=tuple(tuple(row) for row in rows),
        num_loss_tokens=sum(counts),
        num_sequences=sum(count > 0 for count in counts),
    )


def _distinct(unit: Sequence[Sample], streams: Sequence[Ids], train: TrainSection) -> int:
    """Tokens that ``unit`` adds to a row that holds ``streams``."""
    total, before = 0, list(streams)
    for sample in unit:
        stream = sample.trajectory.token_ids
        total += len(stream) - (longest_shared(stream, before).length if train.share_prefixes else 0)
        before.append(stream)
    return total


def length_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Mean and longest trajectory, and the policy's part of it, in tokens."""
    if not samples:
        return {}
    totals = [len(sample.trajectory.token_ids) for sample in samples]
    own = [sum(sample.trajectory.loss_mask) for sample in samples]
    return {
        "trajectory_tokens_mean": float(np.mean(totals)),
        "trajectory_tokens_max": float(max(totals)),
        "policy_tokens_mean": float(np.mean(own)),
        "policy_tokens_max": float(max(own)),
    }


def _in_order(group: Group, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    place = {episode.id: index for index, episode in enumerate(group.episodes)}
    return sorted(trajectories, key=lambda trajectory: place.get(trajectory.episode_id, len(place)))


def _oldest_version(trajectory: Trajectory) -> int | None:
    versions = np.frombuffer(trajectory.versions, dtype=np.int32)
    sampled = versions[np.frombuffer(trajectory.loss_mask, dtype=np.int8) != 0]
    return int(sampled.min()) if sampled.size else None
