"""What the scheduler hears and what it answers: its whole conversation with the world."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.types import FailureKind


@dataclass(frozen=True, slots=True)
class TaskReady:
    """The task at a position was made."""

    position: int
    task_id: str


@dataclass(frozen=True, slots=True)
class TaskRefused:
    """The task at a position could not be made; it is reported and replaced."""

    position: int
    reason: str


@dataclass(frozen=True, slots=True)
class EpisodeEnded:
    """An attempt is terminal. ``failure`` None: it has a reward."""

    position: int
    index: int
    attempt: int
    failure: FailureKind | None = None
    retryable: bool = False


@dataclass(frozen=True, slots=True)
class StepPublished:
    """The weights after optimizer step ``step`` are being served."""

    step: int


@dataclass(frozen=True, slots=True)
class GroupWanted:
    """The consumer waits for one more group."""


@dataclass(frozen=True, slots=True)
class GroupUnwanted:
    """A consumer that waited has gone."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """Start nothing any more."""


Inbox = TaskReady | TaskRefused | EpisodeEnded | StepPublished | GroupWanted | GroupUnwanted | Stopped


@dataclass(frozen=True, slots=True)
class FetchTask:
    position: int


@dataclass(frozen=True, slots=True)
class StartGroup:
    """The group's first episode is about to start, under the weights of ``step``."""

    position: int
    step: int


@dataclass(frozen=True, slots=True)
class StartEpisode:
    position: int
    index: int
    attempt: int


@dataclass(frozen=True, slots=True)
class FinishGroup:
    """All siblings are terminal and at least one has a reward (or the rules keep failed groups)."""

    position: int


@dataclass(frozen=True, slots=True)
class DropGroup:
    """All siblings failed: the group is reported, and the next task takes its place."""

    position: int
    reason: str  # all_failed | prompt_too_long


@dataclass(frozen=True, slots=True)
class DeliverGroup:
    """Give the finished group to the consumer that has waited longest."""

    position: int


@dataclass(frozen=True, slots=True)
class CancelEpisode:
    position: int
    index: int
    attempt: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """So many groups failed in a row that more of the same would not help."""

    num_dropped: int
    last_reason: str


Command = (
    FetchTask | StartGroup | StartEpisode | FinishGroup | DropGroup | DeliverGroup | CancelEpisode | GiveUp
)  # fmt: skip
