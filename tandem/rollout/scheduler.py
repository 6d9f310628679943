"""Which episode runs when, and which group is handed on when: a state machine, and nothing else.

Owns: groups and their episodes, admission, retries, delivery order. Refuses: clocks, randomness, I/O, tasks and
tokens (it knows positions and outcomes). The same inbox gives the same commands.

Admission bounds staleness: with g groups a step and s versions of staleness, at most (step + s + 1) * g groups
are ever admitted that were not dropped. Delivery keeps the bound when groups overtake each other: a group
admitted at step u must be trained at step u + s or before, so a younger group is handed on only if every older
one still gets a place in time.
Invariants: an attempt is started once and ends once; a group is delivered or dropped, once; a dropped group
gives its place back; never more than ``max_concurrent`` episodes run.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from tandem.core.types import FailureKind
from tandem.rollout.commands import (
    CancelEpisode,
    Command,
    DeliverGroup,
    DropGroup,
    EpisodeEnded,
    FetchTask,
    FinishGroup,
    GiveUp,
    GroupUnwanted,
    GroupWanted,
    Inbox,
    StartEpisode,
    StartGroup,
    StepPublished,
    Stopped,
    TaskReady,
    TaskRefused,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerRules:
    """``in_order`` delivers by position; ``keep_failed`` delivers groups without any reward too (evaluations);
    ``max_dropped_in_row`` groups dropped without one finished end the run; no group is admitted that only a step
    after ``last_step`` could train on."""

    group_size: int
    groups_per_step: int
    staleness: int
    max_concurrent: int
    retries: int
    in_order: bool = False
    keep_failed: bool = False
    max_dropped_in_row: int = 32
    last_step: int | None = None


class EpisodeState(enum.StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    SCORED = "scored"
    FAILED = "failed"


@dataclass(slots=True)
class _Episode:
    index: int
    state: EpisodeState = EpisodeState.QUEUED
    attempt: int = 0
    failure: FailureKind | None = None


@dataclass(slots=True)
class _Group:
    position: int
    step: int  # at admission
    task_id: str | None = None  # None: the task is being made
    begun: bool = False
    finished: bool = False
    episodes: list[_Episode] = field(default_factory=list[_Episode])


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A group that is not handed on yet, and its open attempts as (index, attempt). Neither running nor queued:
    it is finished and waits for a consumer or for an older group; no task id: the task is being made."""

    position: int
    task_id: str | None
    running: tuple[tuple[int, int], ...]
    queued: tuple[tuple[int, int], ...]


class Scheduler:
    """Hears one inbox record at a time and answers with commands, in order."""

    def __init__(self, rules: SchedulerRules, *, step: int = 0) -> None:
        self.rules = rules
        self._step = step
        self._next_position = 0
        self._redo: deque[int] = deque()  # positions of a resumed run that were begun but not handed on
        self._kept = step * rules.groups_per_step  # admitted and not dropped, since the run began
        self._delivered = self._kept
        self._dropped_in_row = 0
        self._wanted = 0
        self._stopped = False
        self._running = 0
        self._groups: dict[int, _Group] = {}  # admitted, not yet delivered or dropped; in order of admission
        self._queue: deque[tuple[int, int]] = deque()  # (position, index) of episodes that wait for a place

    # ---- the inbox
    def handle(self, heard: Inbox) -> list[Command]:
        """Take one fact in; returns what is to be done now."""
        out: list[Command] = []
        match heard:
            case TaskReady():
                self._task_ready(heard)
            case TaskRefused():
                self._drop(self._groups[heard.position], "task_refused", out)
            case EpisodeEnded():
                self._episode_ended(heard, out)
            case StepPublished():
                if heard.step < self._step:
                    raise ValueError(f"step {heard.step} published after step {self._step}")
                self._step = heard.step
            case GroupWanted():
                self._wanted += 1
            case GroupUnwanted():
                self._wanted -= 1
            case Stopped():
                self._stop(out)
        self._deliver(out)
        self._fill(out)
        return out

    def start(self) -> list[Command]:
        """The first commands."""
        out: list[Command] = []
        self._fill(out)
        return out

    # ---- what others may ask
    def missing(self) -> list[Missing]:
        """What the groups that are not handed on wait for, oldest first."""
        return [
            Missing(
                position=group.position,
                task_id=group.task_id,
                running=tuple((e.index, e.attempt) for e in group.episodes if e.state is EpisodeState.RUNNING),
                queued=tuple((e.index, e.attempt) for e in group.episodes if e.state is EpisodeState.QUEUED),
            )
            for group in self._groups.values()
        ]

    def state(self, *, returned: Sequence[int] = ()) -> dict[str, object]:
        """What exact resuming needs. Groups that were begun and not delivered are begun again, from the same
        positions; delivered ones belong to the consumer, except those at the ``returned`` positions."""
        return {
            "next_position": self._next_position,
            "redo": sorted([*self._groups, *self._redo, *returned]),
            "delivered": self._delivered - len(returned),
        }

    def restore(self, state: Mapping[str, object]) -> None:
        """Take a state back into a scheduler that has not started."""
        assert not self._groups and not self._running
        self._next_position = cast(int, state["next_position"])
        self._redo = deque(cast(list[int], state["redo"]))
        self._kept = self._delivered = cast(int, state["delivered"])

    @property
    def num_running(self) -> int:
        return self._running

    # ---- moves
    def _task_ready(self, heard: TaskReady) -> None:
        if self._stopped:
            return
        group = self._groups[heard.position]
        group.task_id = heard.task_id
        group.episodes = [_Episode(index) for index in range(self.rules.group_size)]
        self._queue.extend((heard.position, index) for index in range(self.rules.group_size))

    def _episode_ended(self, heard: EpisodeEnded, out: list[Command]) -> None:
        group = self._groups[heard.position]
        episode = group.episodes[heard.index]
        if episode.state is not EpisodeState.RUNNING or episode.attempt != heard.attempt:
            raise ValueError(f"an attempt that is not running ended: {heard}")
        self._running -= 1
        if heard.failure is None:
            episode.state = EpisodeState.SCORED
        elif self.will_retry(heard):
            episode.state, episode.attempt = EpisodeState.QUEUED, episode.attempt + 1
            self._queue.appendleft((group.position, episode.index))  # a group is not held up by a late retry
        else:
            episode.state, episode.failure = EpisodeState.FAILED, heard.failure
            if heard.failure is FailureKind.PROMPT_TOO_LONG:
                self._skip_queued(group, heard.failure)  # all siblings have the same prompt
        waits = any(each.state in (EpisodeState.QUEUED, EpisodeState.RUNNING) for each in group.episodes)
        if not waits and not self._stopped:
            self._finish(group, out)

    def will_retry(self, heard: EpisodeEnded) -> bool:
        """Whether an end leads to a fresh attempt."""
        again = heard.retryable and heard.attempt < self.rules.retries
        return heard.failure is not None and again and not self._stopped

    def _skip_queued(self, group: _Group, failure: FailureKind) -> None:
        for episode in group.episodes:
            if episode.state is EpisodeState.QUEUED:
                self._queue.remove((group.position, episode.index))
                episode.state, episode.failure = EpisodeState.FAILED, failure

    def _finish(self, group: _Group, out: list[Command]) -> None:
        if self.rules.keep_failed or any(each.state is EpisodeState.SCORED for each in group.episodes):
            group.finished = True
            self._dropped_in_row = 0
            out.append(FinishGroup(group.position))
            return
        too_long = any(each.failure is FailureKind.PROMPT_TOO_LONG for each in group.episodes)
        self._drop(group, "prompt_too_long" if too_long else "all_failed", out)

    def _drop(self, group: _Group, reason: str, out: list[Command]) -> None:
        del self._groups[group.position]
        self._kept -= 1
        self._dropped_in_row += 1
        out.append(DropGroup(group.position, reason))
        if self._dropped_in_row >= self.rules.max_dropped_in_row:
            out.append(GiveUp(self._dropped_in_row, reason))
            self._stop(out)

    def _stop(self, out: list[Command]) -> None:
        if self._stopped:
            return
        self._stopped = True
        self._queue.clear()
        for group in self._groups.values():
            for episode in group.episodes:
                if episode.state is EpisodeState.RUNNING:
                    out.append(CancelEpisode(group.position, episode.index, episode.attempt))
                elif episode.state is EpisodeState.QUEUED:
                    episode.state, episode.failure = EpisodeState.FAILED, FailureKind.CANCELLED

    # ---- delivery
    def _deliver(self, out: list[Command]) -> None:
        while self._wanted:
            group = self._deliverable()
            if group is None:
                return
            del self._groups[group.position]
            self._delivered += 1
            self._wanted -= 1
            out.append(DeliverGroup(group.position))

    def _deliverable(self) -> _Group | None:
        if self.rules.in_order:
            oldest = min(self._groups.values(), key=lambda each: each.position, default=None)
            return oldest if oldest is not None and oldest.finished else None
        finished = [each for each in self._groups.values() if each.finished]
        # Earliest deadline first among the finished; then only the unfinished can be overtaken.
        group = min(finished, key=lambda each: each.step, default=None)
        return group if group is not None and self._others_keep_their_place(group) else None

    def _others_keep_their_place(self, group: _Group) -> bool:
        """Whether each older group can still be trained in time once ``group`` has taken the next place."""
        older = sorted(each.step for each in self._groups.values() if each.step < group.step)
        for count, step in enumerate(older, start=1):
            places = (step + self.rules.staleness + 1) * self.rules.groups_per_step - (self._delivered + 1)
            if count > places:
                return False
        return True

    # ---- admission
    def _fill(self, out: list[Command]) -> None:
        if self._stopped:
            return
        while self._queue and self._running < self.rules.max_concurrent:
            position, index = self._queue.popleft()
            group = self._groups[position]
            if not group.begun:
                group.begun = True
                out.append(StartGroup(position, group.step))
            group.episodes[index].state = EpisodeState.RUNNING
            self._running += 1
            out.append(StartEpisode(position, index, group.episodes[index].attempt))
        steps = self._step + self.rules.staleness + 1
        if self.rules.last_step is not None:
            steps = min(steps, self.rules.last_step)
        limit = steps * self.rules.groups_per_step
        being_made = sum(each.task_id is None for each in self._groups.values())
        free = self.rules.max_concurrent - self._running - len(self._queue) - being_made * self.rules.group_size
        while self._kept < limit and free > 0:
            position = self._redo.popleft() if self._redo else self._take_position()
            self._groups[position] = _Group(position, self._step)
            self._kept += 1
            free -= self.rules.group_size
            out.append(FetchTask(position))

    def _take_position(self) -> int:
        self._next_position += 1
        return self._next_position - 1
