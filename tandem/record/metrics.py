"""Events folded into numbers.

Owns: what is counted, and under which name. Refuses: reading files (``replay``) and showing anything (``summary``,
``sinks``). Invariants: an episode that failed is in no mean; every failure has its own name; what a resumed run made
again is counted once (``replay.read`` leaves the superseded events out).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tandem.core.events import (
    AnyEvent,
    CheckpointSaved,
    EngineReported,
    Envelope,
    EpisodeFinished,
    EpisodeStarted,
    EvaluationFinished,
    GroupDropped,
    GroupFinished,
    GroupStarted,
    RewardFinished,
    RunFinished,
    RunResumed,
    RunStarted,
    SandboxCreated,
    SandboxFailed,
    SandboxKilled,
    StepFinished,
    TaskRejected,
    ToolFinished,
    TurnFinished,
    WaitStalled,
    WarningRaised,
)

TRAIN, WARMUP = "train", "warmup"


@dataclass(slots=True)
class EpisodeSums:
    """Totals over finished attempts, to be read as means over ``num_scored`` or shares of ``total_s``."""

    num_scored: int = 0
    num_failed: int = 0
    reward: float = 0.0
    turns: int = 0
    tokens: int = 0
    lease_s: float = 0.0
    model_s: float = 0.0
    tools_s: float = 0.0
    reward_s: float = 0.0
    total_s: float = 0.0

    def add(self, event: EpisodeFinished) -> None:
        self.lease_s += event.lease_s
        self.model_s += event.model_s
        self.tools_s += event.tools_s
        self.reward_s += event.reward_s
        self.total_s += event.total_s
        if event.reward is None:
            self.num_failed += 1
            return
        self.num_scored += 1
        self.reward += event.reward
        self.turns += event.num_turns
        self.tokens += event.num_tokens

    def mean(self, total: float) -> float | None:
        return total / self.num_scored if self.num_scored else None

    def shares(self) -> dict[str, float]:
        """Parts of the episodes' time: model, sandbox (leases and tools), reward, idle (waiting for their turn)."""
        if not self.total_s:
            return {}
        sandbox_s = self.lease_s + self.tools_s
        idle_s = max(0.0, self.total_s - self.model_s - sandbox_s - self.reward_s)
        spent = {"model": self.model_s, "sandbox": sandbox_s, "reward": self.reward_s, "idle": idle_s}
        return {name: value / self.total_s for name, value in spent.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """One optimizer step, with the training episodes that ended since the step before."""

    step: int
    phase: str
    reward: float | None
    loss: float | None
    grad_norm: float | None
    learning_rate: float
    num_groups: int
    num_samples: int
    num_tokens: int
    num_loss_tokens: int
    num_episodes: int
    num_failed: int
    mean_turns: float | None
    mean_tokens: float | None
    tool_calls: int
    tool_failures: int
    sampled_tokens: int
    rollout_s: float
    train_s: float
    total_s: float
    metrics: dict[str, float]

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens sampled for each second of the step; None where none were."""
        return self.sampled_tokens / self.total_s if self.sampled_tokens and self.total_s else None


@dataclass(slots=True)
class RunMetrics:
    """The numbers of a run so far. Feed it every event in order."""

    run_id: str = ""
    started: float | None = None
    last: float | None = None
    finished: RunFinished | None = None
    resumes: int = 0
    steps: list[StepPoint] = field(default_factory=list)
    evaluations: list[EvaluationFinished] = field(default_factory=list)
    checkpoints: list[CheckpointSaved] = field(default_factory=list)
    episodes: dict[str, EpisodeSums] = field(default_factory=dict)  # by purpose
    episode_failures: Counter[str] = field(default_factory=Counter)  # attempts, by kind
    retried: int = 0
    stop_reasons: Counter[str] = field(default_factory=Counter)
    tool_calls: Counter[str] = field(default_factory=Counter)  # by tool
    tool_failures: Counter[str] = field(default_factory=Counter)  # by "tool: failure"
    reward_failures: Counter[str] = field(default_factory=Counter)  # by "reward: failure"
    dropped_groups: Counter[str] = field(default_factory=Counter)  # by reason
    rejected_tasks: Counter[str] = field(default_factory=Counter)
    sandbox_failures: Counter[str] = field(default_factory=Counter)
    sandboxes_created: int = 0
    sandboxes_killed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    engine_busy_s: float = 0.0
    rollout_s: float = 0.0
    train_s: float = 0.0
    steps_s: float = 0.0
    stalls: int = 0
    warnings: list[WarningRaised] = field(default_factory=list)
    purpose: str = ""  # of the group that started last
    in_flight: dict[str, str] = field(default_factory=dict)  # purpose of each running attempt
    _purposes: dict[str, str] = field(default_factory=dict)  # of groups not finished
    _step: _StepSums = field(default_factory=lambda: _StepSums())

    def add(self, envelope: Envelope) -> None:
        """Count one event."""
        self.last = envelope.time
        event = envelope.event
        if not (self._add_run(event, envelope.time) or self._add_step_event(event) or self._add_rollout(event)):
            self._add_sandbox(event)

    def _add_run(self, event: AnyEvent, time: float) -> bool:
        match event:
            case RunStarted():
                self.run_id, self.started = event.run_id, time
            case RunResumed():
                self.resumes += 1
                self.finished, self._step, self.purpose = None, _StepSums(), ""
                self.in_flight.clear()
                self._purposes.clear()
            case RunFinished():
                self.finished = event
            case CheckpointSaved():
                self.checkpoints.append(event)
            case WaitStalled():
                self.stalls += 1
            case WarningRaised():
                self.warnings.append(event)
            case _:
                return False
        return True

    def _add_step_event(self, event: AnyEvent) -> bool:
        match event:
            case StepFinished():
                self._add_step(event)
            case EngineReported():
                self._add_engine(event)
            case EvaluationFinished():
                self.evaluations.append(event)
            case _:
                return False
        return True

    def _add_rollout(self, event: AnyEvent) -> bool:
        match event:
            case GroupStarted():
                self.purpose = self._purposes[event.group_id] = event.purpose
            case EpisodeStarted():
                self.in_flight[event.episode_id] = self._purposes.get(event.group_id, TRAIN)
            case TurnFinished():
                if self.in_flight.get(event.episode_id, TRAIN) == TRAIN:
                    self._step.sampled_tokens += event.num_completion_tokens
            case EpisodeFinished():
                self._add_episode(event)
            case ToolFinished():
                self._add_tool(event)
            case RewardFinished() if event.failure is not None:
                self.reward_failures[f"{event.name}: {event.failure}"] += 1
            case GroupFinished():
                self._purposes.pop(event.group_id, None)
            case GroupDropped():
                self.dropped_groups[event.reason] += 1
            case TaskRejected():
                self.rejected_tasks[event.reason] += 1
            case _:
                return False
        return True

    def _add_sandbox(self, event: AnyEvent) -> None:
        match event:
            case SandboxCreated():
                self.sandboxes_created += 1
            case SandboxKilled():
                self.sandboxes_killed += 1
            case SandboxFailed():
                self.sandbox_failures[event.error] += 1

    def _add_tool(self, event: ToolFinished) -> None:
        self.tool_calls[event.tool] += 1
        if event.failure is not None:
            self.tool_failures[f"{event.tool}: {event.failure}"] += 1
        if self.in_flight.get(event.episode_id, TRAIN) == TRAIN:  # an evaluation's calls are no step's
            self._step.tool_calls += 1
            self._step.tool_failures += event.failure is not None

    def _add_episode(self, event: EpisodeFinished) -> None:
        self.in_flight.pop(event.episode_id, None)
        self.episodes.setdefault(event.purpose, EpisodeSums()).add(event)
        if event.purpose == TRAIN:
            self._step.episodes.add(event)
        if event.failure is not None:
            self.episode_failures[event.failure] += 1
        self.retried += event.retried
        if event.stop_reason is not None:
            self.stop_reasons[event.stop_reason] += 1

    def _add_engine(self, event: EngineReported) -> None:
        self.prompt_tokens += event.prompt_tokens
        self.cached_tokens += event.cached_tokens
        self.generated_tokens += event.generated_tokens
        self.engine_busy_s += event.busy_s

    def _add_step(self, event: StepFinished) -> None:
        sums, self._step = self._step, _StepSums()
        episodes = sums.episodes
        self.steps.append(
            StepPoint(
                step=event.step,
                phase=event.phase,
                reward=event.mean_reward,
                loss=event.loss,
                grad_norm=event.grad_norm,
                learning_rate=event.learning_rate,
                num_groups=event.num_groups,
                num_samples=event.num_samples,
                num_tokens=event.num_tokens,
                num_loss_tokens=event.num_loss_tokens,
                num_episodes=episodes.num_scored + episodes.num_failed,
                num_failed=episodes.num_failed,
                mean_turns=episodes.mean(episodes.turns),
                mean_tokens=episodes.mean(episodes.tokens),
                tool_calls=sums.tool_calls,
                tool_failures=sums.tool_failures,
                sampled_tokens=sums.sampled_tokens,
                rollout_s=event.rollout_s,
                train_s=event.train_s,
                total_s=event.total_s,
                metrics=event.metrics,
            )
        )
        if event.phase == TRAIN:
            self.rollout_s += event.rollout_s
            self.train_s += event.train_s
            self.steps_s += event.total_s

    # ---- questions
    def phase_steps(self, phase: str = TRAIN) -> list[StepPoint]:
        """The steps of one phase, in order."""
        return [point for point in self.steps if point.phase == phase]

    @property
    def since_step(self) -> EpisodeSums:
        """Training attempts that ended since the last step: how far the present rollout has come."""
        return self._step.episodes

    @property
    def elapsed_s(self) -> float | None:
        """From the run's first event to its last; pauses between resumes included."""
        return None if self.started is None or self.last is None else self.last - self.started

    def shares(self) -> dict[str, float]:
        """Parts of the training steps' wall time: waiting for rollout, training, other."""
        if not self.steps_s:
            return {}
        rollout, train = self.rollout_s / self.steps_s, self.train_s / self.steps_s
        return {"rollout": rollout, "train": train, "other": max(0.0, 1 - rollout - train)}


@dataclass(slots=True)
class _StepSums:
    """What happened since the last step."""

    episodes: EpisodeSums = field(default_factory=EpisodeSums)
    tool_calls: int = 0
    tool_failures: int = 0
    sampled_tokens: int = 0


def fold(envelopes: Iterable[Envelope]) -> RunMetrics:
    """The numbers of a whole run, from the events that count (``replay.read``)."""
    metrics = RunMetrics()
    for envelope in envelopes:
        metrics.add(envelope)
    return metrics
