"""Rollout as the rest of the system sees it: tasks become groups of episodes and their trajectories.

Owns: the training lane, evaluations (the same road, no learning), the pool of reward processes.
Refuses: deciding what is trained. Invariant: after the ``async with`` block no task, box, request or process of
rollout is left.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping, Sequence

from tandem.config.sections.rollout import RolloutSection
from tandem.core.boxes import SandboxSpec
from tandem.core.events import WaitStalled
from tandem.core.protocols import EventSink, SandboxService, TokenEngine
from tandem.core.types import Episode, Group, Limits, Task, Trajectory, WeightVersion
from tandem.envs.environment import Environment
from tandem.envs.reward_pool import RewardPool
from tandem.rollout.assemble import assemble
from tandem.rollout.episode import Surroundings
from tandem.rollout.gateway import Gateway
from tandem.rollout.lane import Lane, LanePlan
from tandem.rollout.policy import Policy, Sampling
from tandem.rollout.scheduler import SchedulerRules
from tandem.text.render import Renderer


class RolloutDriver:
    """Makes groups. Use as ``async with RolloutDriver(...) as rollout``.

    ``max_context_tokens`` is the most that model and engine take; ``in_order`` hands groups on in the order of
    their tasks, whatever finishes first, so that a run depends on nothing but its seed. ``gateway`` serves agents that
    bring their own loop.
    """

    def __init__(
        self,
        *,
        environment: Environment,
        engine: TokenEngine,
        renderer: Renderer,
        sandboxes: SandboxService,
        sandbox_spec: SandboxSpec,
        sink: EventSink,
        section: RolloutSection,
        max_context_tokens: int,
        seed: int,
        in_order: bool = False,
        gateway: Gateway | None = None,
    ) -> None:
        self._gateway = gateway
        self._environment = environment
        self._engine = engine
        self._renderer = renderer
        self._sandboxes = sandboxes
        template = environment.template or sandbox_spec.template
        self._sandbox_spec = dataclasses.replace(sandbox_spec, template=template)
        self._sink = sink
        self._section = section
        self._seed = seed
        self._in_order = in_order
        self._limits = Limits(
            max_turns=section.max_turns,
            max_turn_tokens=section.max_turn_tokens,
            max_context_tokens=max_context_tokens,
            tool_time_s=section.tool_time_s,
            episode_time_s=section.episode_time_s,
            reward_time_s=section.reward_time_s,
        )
        functions = [reward.reference for reward in environment.rewards]
        self._rewards = RewardPool(size=section.reward_processes, preload=functions)
        self._training: Lane | None = None
        self._resumed: Mapping[str, object] | None = None
        self._lanes: list[Lane] = []

    async def __aenter__(self) -> RolloutDriver:
        self._rewards.warm()
        return self

    async def __aexit__(self, *exception: object) -> None:
        try:
            await asyncio.gather(*(lane.close() for lane in self._lanes))
        finally:
            await self._rewards.close()

    # ---- training
    def start(self, version: WeightVersion, *, last_step: int | None = None) -> None:
        """Begin making groups for training under ``version`` (``version.step``: optimizer steps done so far), as
        many as the steps to ``last_step`` need."""
        assert self._training is None
        section = self._section
        rules = SchedulerRules(
            group_size=section.group_size,
            groups_per_step=section.groups_per_step,
            staleness=section.staleness,
            max_concurrent=section.max_concurrent_episodes,
            retries=section.retries,
            in_order=self._in_order,
            max_dropped_in_row=max(16, 4 * section.groups_per_step),
            last_step=last_step,
        )
        plan = LanePlan(
            task_at=lambda position: self._environment.task(self._seed, position),
            prefix="g",
            purpose="train",
            seed_parts=(self._seed, "train"),
        )
        around = self._surroundings(section.temperature, section.priority)
        self._training = Lane(rules, plan, around, step=version.step, version=version.number)
        self._lanes.append(self._training)
        self._training.start(self._resumed)

    async def get(self) -> tuple[Group, tuple[Trajectory, ...]]:
        """The next group to train on, with the trajectories of each episode that has a reward, by index. Waits for
        as long as its episodes may take, which ``rollout.episode_time_s`` bounds; cancelling loses no group."""
        assert self._training is not None, "start() comes first"
        group = await self._training.get()
        return group, self.trajectories(group)

    def missing(self) -> list[str]:
        """Names of the groups and episodes that ``get`` waits for."""
        return self._training.missing() if self._training is not None else ["rollout has not started"]

    def advance(self, version: WeightVersion) -> None:
        """New weights are being served; more groups may start."""
        if self._training is not None:
            self._training.publish(step=version.step, version=version.number)

    def state(self) -> dict[str, object]:
        """The data position, for a checkpoint: groups got so far are the checkpoint's, all others come again."""
        if self._training is None:
            return dict(self._resumed or {})
        return self._training.state()

    def restore(self, state: Mapping[str, object]) -> None:
        """Go on from ``state``; before ``start``."""
        assert self._training is None
        self._resumed = state or None

    # ---- groups on demand
    async def make(
        self,
        tasks: Sequence[Task],
        *,
        name: str,
        version: WeightVersion,
        temperature: float,
        samples: int = 1,
        purpose: str = "",
        seed_parts: tuple[object, ...] = (),
        priority: int = 0,
    ) -> list[Group]:
        """``samples`` episodes of every task, failed ones included, as groups in the order of the tasks. ``name`` leads
        the ids of groups and must be new in the run; ``purpose`` (its default) labels their events; the draws hang on
        the run's seed, ``seed_parts`` and the task's place alone; a step of ``priority`` doubles a group's share of a
        busy engine."""
        if not tasks:
            return []
        rules = SchedulerRules(
            group_size=samples,
            groups_per_step=len(tasks),
            staleness=0,
            max_concurrent=self._section.max_concurrent_episodes,
            retries=self._section.retries,
            in_order=True,
            keep_failed=True,
        )
        plan = LanePlan(
            task_at=lambda position: tasks[position],
            prefix=f"{name.replace(' ', '-')}-",  # an id is one word, to be pasted
            purpose=purpose or name,
            seed_parts=(self._seed, *seed_parts),
        )
        lane = Lane(rules, plan, self._surroundings(temperature, priority), version=version.number)
        self._lanes.append(lane)
        try:
            lane.start()
            return [await self._next(lane, name) for _ in tasks]
        finally:
            await lane.close()
            self._lanes.remove(lane)

    def trajectories(self, group: Group, *, temperature: float | None = None) -> tuple[Trajectory, ...]:
        """Those of each episode that has a reward, by index, sampled at ``temperature`` (default: the recipe's)."""
        heat = self._section.temperature if temperature is None else temperature
        scored = [episode for episode in group.episodes if episode.reward is not None]
        return tuple(each for episode in scored for each in assemble(episode, temperature=heat))

    async def evaluate(
        self, tasks: Sequence[Task], *, name: str, version: WeightVersion, temperature: float, samples: int = 1
    ) -> list[Episode]:
        """Run every task ``samples`` times; returns all episodes, failed ones included, by task and index.

        ``name`` labels the events and must be new in the run; the draws depend on the run's seed and the task's
        place alone, so that evaluations of one run can be compared.
        """
        groups = await self.make(
            tasks,
            name=name,
            version=version,
            temperature=temperature,
            samples=samples,
            seed_parts=("eval",),
            priority=self._section.eval_priority,
        )
        return [episode for group in groups for episode in group.episodes]

    async def _next(self, lane: Lane, name: str) -> Group:
        """The next group of an evaluation; says what is missing whenever ``stall_warning_s`` went by."""
        start = time.perf_counter()
        waiting = asyncio.ensure_future(lane.get())
        try:
            while True:
                done, _ = await asyncio.wait({waiting}, timeout=self._section.stall_warning_s)
                if done:
                    return waiting.result()
                waited_s = time.perf_counter() - start
                self._sink.emit(WaitStalled(who=name, waited_s=waited_s, missing=lane.missing()))
        finally:
            waiting.cancel()

    def _surroundings(self, temperature: float, priority: int) -> Surroundings:
        section = self._section
        sampling = Sampling(
            temperature=temperature,
            top_p=section.top_p,
            top_k=section.top_k,
            priority=priority,
            resumes=section.at_abort == "resume",
        )
        return Surroundings(
            environment=self._environment,
            policy=Policy(self._engine, self._renderer, sampling),
            sandboxes=self._sandboxes,
            sandbox_spec=self._sandbox_spec,
            rewards=self._rewards,
            sink=self._sink,
            limits=self._limits,
            gateway=self._gateway,
        )
