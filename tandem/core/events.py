"""Every event: the only list of what can happen.

Facts, never steering. Granularity is the turn, never the token; long bytes go to the blob store and an
event carries their digest. ``Envelope`` adds run, process, sequence, time, cause and the chain hash.
"""

from __future__ import annotations

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all events; the class name is the type on the wire."""


# ---- run and config
class RunStarted(Event, frozen=True, kw_only=True):
    run_id: str
    version: str
    command: str
    config_blob: str
    deterministic: bool


class RunResumed(Event, frozen=True, kw_only=True):
    """The run goes on from a checkpoint. Events after ``keep_sequence`` (up to this one) are superseded:
    their steps are made again, and no reader counts them."""

    step: int
    keep_sequence: int
    checkpoint: str


class RunFinished(Event, frozen=True, kw_only=True):
    step: int
    reason: str  # finished | interrupted | failed
    detail: str = ""


# ---- data
class DataLoaded(Event, frozen=True, kw_only=True):
    """Rows that were read, and the files of the chosen split that they stood in; every one that is not kept is counted
    under its reason."""

    path: str
    num_rows: int
    num_kept: int
    dropped: dict[str, int]
    files: list[str] = []


# ---- episodes
class GroupStarted(Event, frozen=True, kw_only=True):
    group_id: str
    task_id: str
    size: int
    version: int
    purpose: str = "train"  # train | eval name


class EpisodeStarted(Event, frozen=True, kw_only=True):
    episode_id: str
    group_id: str
    task_id: str
    index: int
    attempt: int
    seed: int


class TurnFinished(Event, frozen=True, kw_only=True):
    episode_id: str
    turn: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    finish_reason: str
    version_first: int
    version_last: int
    model_s: float


class ToolFinished(Event, frozen=True, kw_only=True):
    episode_id: str
    turn: int
    tool: str
    failure: str | None
    output_digest: str
    output_bytes: int
    duration_s: float


class EpisodeFinished(Event, frozen=True, kw_only=True):
    """Terminal for an attempt: ``failure`` None and a reward, or a failure kind and no reward."""

    episode_id: str
    group_id: str
    task_id: str
    index: int
    attempt: int
    reward: float | None
    stop_reason: str | None
    failure: str | None
    detail: str
    retried: bool
    num_turns: int
    num_tokens: int
    lease_s: float
    model_s: float
    tools_s: float
    reward_s: float
    total_s: float
    blob: str
    purpose: str = "train"


class RewardFinished(Event, frozen=True, kw_only=True):
    episode_id: str
    name: str
    value: float | None
    failure: str | None
    duration_s: float


class GroupFinished(Event, frozen=True, kw_only=True):
    group_id: str
    task_id: str
    num_scored: int
    num_failed: int
    mean_reward: float | None
    std_reward: float | None
    purpose: str = "train"


class GroupDropped(Event, frozen=True, kw_only=True):
    """A group that trains nothing. ``reason``: all_failed | stale | prompt_too_long | flat."""

    group_id: str
    task_id: str
    reason: str
    detail: str = ""


class TaskRejected(Event, frozen=True, kw_only=True):
    task_id: str
    reason: str


# ---- sandboxes
class SandboxCreated(Event, frozen=True, kw_only=True):
    sandbox_id: str
    backend: str
    template: str
    create_s: float


class SandboxKilled(Event, frozen=True, kw_only=True):
    sandbox_id: str
    lifetime_s: float


class SandboxFailed(Event, frozen=True, kw_only=True):
    sandbox_id: str
    error: str
    detail: str


class SandboxRefused(Event, frozen=True, kw_only=True):
    """Something in a box tried to reach ``target`` ('' : this only tells a number) and was refused, ``why``.
    ``suppressed`` attempts before it, refused or not, were not told one by one."""

    sandbox_id: str
    target: str
    why: str
    suppressed: int


class SandboxMoved(Event, frozen=True, kw_only=True):
    """A box came to rest again: ``state`` is ``running`` or ``paused``; ``verb`` is what was done to it."""

    sandbox_id: str
    verb: str
    state: str
    took_s: float


# ---- engine, training, weights
class StepFinished(Event, frozen=True, kw_only=True):
    """One optimizer step. ``loss`` and ``grad_norm`` are None when no group was admitted: nothing was trained."""

    step: int
    loss: float | None
    grad_norm: float | None
    learning_rate: float
    num_groups: int
    num_samples: int
    num_loss_tokens: int
    num_tokens: int
    mean_reward: float | None
    metrics: dict[str, float]
    rollout_s: float  # waiting for groups
    train_s: float
    total_s: float
    phase: str = "train"  # train | warmup


class WeightsPublished(Event, frozen=True, kw_only=True):
    version: int
    step: int
    digest: str
    place: str
    publish_s: float


class EngineReported(Event, frozen=True, kw_only=True):
    """Engine counters at the end of a step (differences since the step before)."""

    step: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    busy_s: float


class CheckpointBegun(Event, frozen=True, kw_only=True):
    """Everything up to this event is in the checkpoint of ``step``, once that is on the disk."""

    step: int


class CheckpointSaved(Event, frozen=True, kw_only=True):
    """It is on the disk. Training waited ``held_s`` for it, and went on for the rest of ``save_s``."""

    step: int
    path: str
    digest: str
    save_s: float
    held_s: float = 0.0


class EvaluationFinished(Event, frozen=True, kw_only=True):
    name: str
    step: int
    num_tasks: int
    num_failed: int
    mean_reward: float | None
    success: float | None
    by_family: dict[str, float]
    duration_s: float


class WaitStalled(Event, frozen=True, kw_only=True):
    """Something waits longer than it should; ``missing`` names what for."""

    who: str
    waited_s: float
    missing: list[str]


class WarningRaised(Event, frozen=True, kw_only=True):
    where: str
    message: str


AnyEvent = (
    RunStarted | RunResumed | RunFinished | DataLoaded
    | GroupStarted | EpisodeStarted | TurnFinished | ToolFinished | EpisodeFinished | RewardFinished
    | GroupFinished | GroupDropped | TaskRejected
    | SandboxCreated | SandboxKilled | SandboxFailed | SandboxRefused | SandboxMoved
    | StepFinished | WeightsPublished | EngineReported | CheckpointBegun | CheckpointSaved | EvaluationFinished
    | WaitStalled | WarningRaised
)  # fmt: skip


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the log. ``cause`` is the sequence of the event that led to this one (-1: none);
    ``previous`` is the hash of the line before, so that any change breaks the chain."""

    sequence: int
    time: float  # seconds since the epoch
    process: int
    cause: int
    previous: str
    event: AnyEvent
