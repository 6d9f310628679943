"""A scheduler with hands: runs its commands as asyncio tasks and tells it what came of them.

Owns: the tasks of running attempts, the groups in the making, the consumers that wait. Every fact is emitted with
the event that led to it. Invariants: the scheduler's inbox is fed from here alone; an exception that is no
episode's fault reaches the consumer; after ``close`` no task runs and no box of this lane lives.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tandem.core import wire
from tandem.core.errors import EpisodeError, TandemError
from tandem.core.events import (
    EpisodeFinished,
    EpisodeStarted,
    GroupDropped,
    GroupFinished,
    GroupStarted,
    TaskRejected,
)
from tandem.core.types import Episode, Group, Task
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
from tandem.rollout.episode import Attempt, Surroundings, cancelled, run_attempt
from tandem.rollout.scheduler import Scheduler, SchedulerRules


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePlan:
    """What a lane makes: ``task_at`` gives the task of a position; ``prefix`` leads every group id; ``purpose``
    labels the events (``train``, or the name of an evaluation); ``seed_parts`` are the roots of every draw."""

    task_at: Callable[[int], Task]
    prefix: str
    purpose: str
    seed_parts: tuple[object, ...]


@dataclass(slots=True)
class _Making:
    """A group that is not delivered or dropped yet."""

    group_id: str
    task: Task
    cause: int = -1
    episodes: dict[int, Episode] = field(default_factory=dict[int, Episode])  # by index; the last attempt


class Lane:
    """Groups of episodes for one purpose."""

    def __init__(
        self, rules: SchedulerRules, plan: LanePlan, around: Surroundings, *, step: int = 0, version: int = 0
    ) -> None:
        self.version = version
        self._scheduler = Scheduler(rules, step=step)
        self._plan = plan
        self._around = around
        self._making: dict[int, _Making] = {}
        self._tasks: dict[tuple[int, int, int], asyncio.Task[None]] = {}
        self._inbox: deque[Inbox] = deque()
        self._handling = False
        self._consumers: deque[asyncio.Future[tuple[int, Group]]] = deque()
        self._returned: deque[tuple[int, Group]] = deque()  # given to a consumer that was cancelled just then
        self._error: BaseException | None = None
        self._closed = False

    # ---- for the owner
    def start(self, state: Mapping[str, object] | None = None) -> None:
        """Begin, where ``state`` left off if it is given."""
        if state is not None:
            self._scheduler.restore(state)
        self._execute(self._scheduler.start())
        self._drain()

    def publish(self, *, step: int, version: int) -> None:
        """The weights of ``step`` are being served."""
        self.version = version
        self._hear(StepPublished(step))

    def state(self) -> dict[str, object]:
        """Where to go on: groups that ``get`` returned are done, all others come again."""
        return self._scheduler.state(returned=[position for position, _ in self._returned])

    async def get(self) -> Group:
        """The next group. A cancelled ``get`` loses none.

        Raises:
            EpisodeError: too many groups in a row failed. RuntimeError: the lane is closed.
        """
        if self._error is not None:
            raise self._error
        if self._closed:
            raise RuntimeError(f"lane {self._plan.purpose} is closed")
        if self._returned:
            return self._returned.popleft()[1]
        consumer: asyncio.Future[tuple[int, Group]] = asyncio.get_running_loop().create_future()
        self._consumers.append(consumer)
        self._hear(GroupWanted())
        try:
            return (await consumer)[1]
        except asyncio.CancelledError:
            if consumer in self._consumers:
                self._consumers.remove(consumer)
                self._hear(GroupUnwanted())
            elif not consumer.cancelled() and consumer.exception() is None:
                self._returned.append(consumer.result())
            raise

    def missing(self) -> list[str]:
        """What the next groups wait for: one line a group, with the ids of its open episodes."""
        lines = []
        for each in self._scheduler.missing():
            group_id = self._group_id(each.position)
            if each.task_id is None:
                lines.append(f"group {group_id}: its task is being made")
                continue
            parts = [f"{word} {', '.join(self._episode_id(each.position, *ids) for ids in listed)}"
                     for word, listed in (("running", each.running), ("queued", each.queued)) if listed]  # fmt: skip
            lines.append(f"group {group_id} (task {each.task_id}): {'; '.join(parts) or 'finished'}")
        return lines or ["new weights: no further group may start before they are published"]

    async def close(self) -> None:
        """Cancel what runs, and wait until every attempt has cleaned up."""
        if not self._closed:
            self._closed = True
            self._hear(Stopped())
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()))  # cancelled once only: a second would cut their clean-up
        self._fail(RuntimeError(f"lane {self._plan.purpose} is closed"))

    # ---- inbox and commands
    def _hear(self, heard: Inbox) -> None:
        self._inbox.append(heard)
        self._drain()

    def _drain(self) -> None:
        if self._handling:
            return  # the outer call goes on with what was appended
        self._handling = True
        try:
            while self._inbox:
                self._execute(self._scheduler.handle(self._inbox.popleft()))
        finally:
            self._handling = False

    def _execute(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case FetchTask():
                    self._fetch(command.position)
                case StartGroup():
                    self._start_group(command.position)
                case StartEpisode():
                    self._start_episode(command)
                case FinishGroup():
                    self._finish_group(command.position)
                case DropGroup():
                    self._drop_group(command)
                case DeliverGroup():
                    self._deliver(command.position)
                case CancelEpisode():
                    self._tasks[command.position, command.index, command.attempt].cancel()
                case GiveUp():
                    self._fail(
                        EpisodeError(
                            f"{command.num_dropped} groups in a row failed, the last one for {command.last_reason}",
                            hint="the EpisodeFinished events name each failure",
                        )
                    )

    def _fetch(self, position: int) -> None:
        try:
            task = self._plan.task_at(position)
        except TandemError as error:
            self._around.sink.emit(TaskRejected(task_id=f"position {position}", reason=error.message))
            self._inbox.append(TaskRefused(position, error.message))
            return
        self._making[position] = _Making(self._group_id(position), task)
        self._inbox.append(TaskReady(position, task.id))

    def _start_group(self, position: int) -> None:
        making = self._making[position]
        making.cause = self._around.sink.emit(
            GroupStarted(
                group_id=making.group_id,
                task_id=making.task.id,
                size=self._scheduler.rules.group_size,
                version=self.version,
                purpose=self._plan.purpose,
            )
        )

    def _start_episode(self, command: StartEpisode) -> None:
        making = self._making[command.position]
        episode_id = self._episode_id(command.position, command.index, command.attempt)
        parts = (*self._plan.seed_parts, command.position, making.task.id, command.index, command.attempt)
        seed = wire.derive_seed(*parts)
        started = EpisodeStarted(
            episode_id=episode_id,
            group_id=making.group_id,
            task_id=making.task.id,
            index=command.index,
            attempt=command.attempt,
            seed=seed,
        )
        attempt = Attempt(
            episode_id=episode_id,
            group_id=making.group_id,
            task=making.task,
            index=command.index,
            attempt=command.attempt,
            seed=seed,
            cause=self._around.sink.emit(started, cause=making.cause),
        )
        key = (command.position, command.index, command.attempt)
        task = asyncio.create_task(self._run(command.position, attempt), name=episode_id)
        self._tasks[key] = task
        task.add_done_callback(lambda done: self._ended(key, attempt, done))

    async def _run(self, position: int, attempt: Attempt) -> None:
        episode = await run_attempt(attempt, self._around)
        if self._closed:
            self._record(cancelled(attempt), attempt, retried=False)
            return
        failure = episode.failure
        ended = EpisodeEnded(
            position,
            attempt.index,
            attempt.attempt,
            failure.kind if failure else None,
            retryable=failure.retryable if failure else False,
        )
        self._making[position].episodes[attempt.index] = episode
        cause = self._record(episode, attempt, retried=self._scheduler.will_retry(ended))
        self._making[position].cause = cause
        self._hear(ended)

    def _ended(self, key: tuple[int, int, int], attempt: Attempt, task: asyncio.Task[None]) -> None:
        del self._tasks[key]
        if task.cancelled():
            self._record(cancelled(attempt), attempt, retried=False)
        elif (error := task.exception()) is not None:
            self._fail(error)  # ours, not the episode's: the run must not go on as if nothing was

    def _record(self, episode: Episode, attempt: Attempt, *, retried: bool) -> int:
        last = episode.turns[-1] if episode.turns else None
        failure = episode.failure
        return self._around.sink.emit(
            EpisodeFinished(
                episode_id=episode.id,
                group_id=episode.group_id,
                task_id=episode.task_id,
                index=episode.index,
                attempt=episode.attempt,
                reward=episode.reward,
                stop_reason=episode.stop_reason.value if episode.stop_reason else None,
                failure=failure.kind.value if failure else None,
                detail=failure.detail if failure else "",
                retried=retried,
                num_turns=len(episode.turns),
                num_tokens=len(last.prompt_ids) + len(last.completion_ids) if last else 0,
                lease_s=episode.lease_s,
                model_s=episode.model_s,
                tools_s=episode.tools_s,
                reward_s=episode.reward_s,
                total_s=episode.total_s,
                blob=self._around.sink.put_blob(wire.encode(episode)),
                purpose=self._plan.purpose,
            ),
            cause=attempt.cause,
        )

    def _finish_group(self, position: int) -> None:
        making = self._making[position]
        rewards = [each.reward for each in making.episodes.values() if each.reward is not None]
        self._around.sink.emit(
            GroupFinished(
                group_id=making.group_id,
                task_id=making.task.id,
                num_scored=len(rewards),
                num_failed=self._scheduler.rules.group_size - len(rewards),
                mean_reward=statistics.fmean(rewards) if rewards else None,
                std_reward=statistics.pstdev(rewards) if rewards else None,
                purpose=self._plan.purpose,
            ),
            cause=making.cause,
        )

    def _drop_group(self, command: DropGroup) -> None:
        making = self._making.pop(command.position, None)
        if making is None:
            return  # its task was refused, which is reported already
        kinds = [each.failure.kind for each in making.episodes.values() if each.failure is not None]
        detail = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        self._around.sink.emit(
            GroupDropped(group_id=making.group_id, task_id=making.task.id, reason=command.reason, detail=detail),
            cause=making.cause,
        )

    def _deliver(self, position: int) -> None:
        making = self._making.pop(position)
        episodes = tuple(making.episodes[index] for index in sorted(making.episodes))
        group = Group(id=making.group_id, task=making.task, episodes=episodes)
        consumer = self._consumers.popleft()
        if consumer.done():  # cancelled, and its ``get`` has not run since
            self._returned.append((position, group))
        else:
            consumer.set_result((position, group))

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        while self._consumers:
            consumer = self._consumers.popleft()
            if not consumer.done():
                consumer.set_exception(error)

    def _group_id(self, position: int) -> str:
        return f"{self._plan.prefix}{position:06d}"

    def _episode_id(self, position: int, index: int, attempt: int) -> str:
        return f"{self._group_id(position)}-{index}.{attempt}"
