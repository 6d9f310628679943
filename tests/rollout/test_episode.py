"""Whole episodes in real boxes: the stock tool loop, files, rewards, and no box left whatever happens."""

import asyncio
import dataclasses
import time
from pathlib import Path

import pytest
from rollout_pieces import MemorySink, PlaybackEngine, driver, renderer, say

from tandem.config.sections.environment import EnvironmentSection
from tandem.config.sections.rollout import RolloutSection
from tandem.config.sections.sandbox import SandboxSection
from tandem.core.errors import (
    ConfigError,
    EngineError,
    PromptTooLong,
    SandboxTimeout,
    SandboxUnavailable,
    WorkflowError,
)
from tandem.core.events import EpisodeFinished, RewardFinished, SandboxCreated, SandboxKilled, ToolFinished
from tandem.core.types import FailureKind, StopReason, ToolFailure, WeightVersion
from tandem.envs.environment import demonstration, load_environment
from tandem.envs.workflow import Workflow, tool_loop
from tandem.rollout.episode import failure_of
from tandem.sandbox.manager import SandboxManager

EXAMPLE = Path(__file__).parents[2] / "examples" / "word_count.py"
START = WeightVersion(number=0, step=0)


def example(**changes):
    return dataclasses.replace(load_environment(EnvironmentSection(name=f"{EXAMPLE}:word_count")), **changes)


def in_boxes(environment, engine, act, **changes):
    """Run ``act(rollout, manager)`` with real boxes; returns its result and the events."""
    chosen = {"groups_per_step": 1, "group_size": 2, "max_turns": 6, "max_turn_tokens": 300, "reward_processes": 1}

    async def run():
        sink = MemorySink()
        manager = SandboxManager(SandboxSection(), sink)
        try:
            made = driver(
                environment,
                engine,
                sink,
                sandboxes=manager,
                section=RolloutSection(**chosen | changes),
                max_context_tokens=8192,
            )
            async with made as rollout:
                result = await act(rollout, manager)
            assert not manager.live, "rollout left a box behind"
            return result, sink
        finally:
            await manager.close()

    result, sink = asyncio.run(run())
    assert len(sink.of(SandboxCreated)) == len(sink.of(SandboxKilled))
    return result, sink


async def first_group(rollout, manager):
    rollout.start(START)
    return await rollout.get()


def test_the_demonstration_played_back_solves_the_example():
    environment = example()

    def script(request):
        """What the demonstration says for this task, in the model's own ids."""
        position, turn = int(request.id[1:7]), int(request.id.rsplit("/")[-1])
        shown = demonstration(environment, environment.task(7, position))
        spoken = [message for message in shown if message.role == "assistant"]
        return renderer().completion(spoken[turn], [tool.spec for tool in environment.workflow.tools])

    (group, trajectories), sink = in_boxes(environment, PlaybackEngine(script), first_group)
    assert [episode.reward for episode in group.episodes] == [1.0, 1.0]
    episode = group.episodes[0]
    assert episode.stop_reason is StopReason.ANSWERED and len(episode.turns) == 2
    assert episode.turns[0].tool_results[0].content == str(group.task.private["answer"])
    assert [score.name for score in episode.scores] == ["is_right", "used_the_box"]
    assert episode.scores[1].value == 0.5 and episode.lease_s > 0 and episode.tools_s > 0
    assert len(trajectories) == 2 and len(sink.of(RewardFinished)) >= 4


def test_bad_calls_are_outcomes_and_the_episode_goes_on():
    said = [
        "```shell\nsleep 100\n```",
        "```shell\nyes\n```",
        "```python\nimport os\nwhile True: os.fork()\n```",
        "```python\nraise SystemExit(3)\n```",
        "```shell\ncat notes.txt | wc -w",  # never closed
        "0",
    ]
    engine = PlaybackEngine(lambda request: say(said[int(request.id.rsplit("/")[-1])]))
    start = time.monotonic()
    (group, _), sink = in_boxes(example(), engine, first_group, group_size=1, tool_time_s=1.0)
    assert time.monotonic() - start < 60
    [episode] = group.episodes
    assert episode.stop_reason is StopReason.ANSWERED and episode.reward is not None
    failures = [turn.tool_results[0].failure for turn in episode.turns[:5]]
    assert failures[0] is ToolFailure.TIMEOUT
    assert failures[1] in (ToolFailure.OUTPUT_LIMIT, ToolFailure.TIMEOUT)
    assert failures[2] is not None
    assert failures[3:] == [ToolFailure.NONZERO_EXIT, ToolFailure.UNPARSEABLE]
    reported = [event.failure for event in sink.of(ToolFinished) if event.episode_id == episode.id]
    assert reported == [failure.value for failure in failures]


def test_a_retry_gets_a_fresh_box():
    seen = []

    async def leaves_a_trace(session):
        seen.append(sorted(await session.box.files.list(".")))
        await session.box.files.write("trace.txt", "x")
        await session.ask()
        if len(seen) == 1:
            raise RuntimeError("after the trace")
        return StopReason.ANSWERED

    environment = example(workflow=Workflow(run=leaves_a_trace))
    engine = PlaybackEngine(lambda request: say("0"))
    (group, _), _ = in_boxes(environment, engine, first_group, group_size=1)
    assert group.episodes[0].attempt == 1
    assert len(seen) >= 2 and "notes.txt" in seen[0] and all("trace.txt" not in names for names in seen)


def test_cancellation_in_a_tool_leaves_no_box():
    engine = PlaybackEngine(lambda request: say("```shell\nsleep 100\n```"))

    async def leave_early(rollout, manager):
        rollout.start(START)
        while len(manager.live) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        return time.monotonic()

    left, sink = in_boxes(example(), engine, leave_early)
    assert time.monotonic() - left < 60
    assert {event.failure for event in sink.of(EpisodeFinished)} == {"cancelled"}


def test_an_episode_timeout_leaves_no_box():
    engine = PlaybackEngine(lambda request: say("```shell\nsleep 100\n```"))

    async def one(rollout, manager):
        return await rollout.evaluate(example().held_out(1), name="eval", version=START, temperature=0.0)

    [episode], _ = in_boxes(example(), engine, one, episode_time_s=0.5)
    assert episode.failure.kind is FailureKind.EPISODE_TIMEOUT and len(episode.turns) == 1


def test_a_box_that_dies_under_a_tool_is_a_sandbox_failure():
    boxes = []

    async def kills(session):
        boxes.append(session.box.id)
        turn = await session.ask()
        await session.box.kill()
        await session.call_tools(turn)
        return StopReason.ANSWERED

    environment = example(workflow=Workflow(run=kills, tools=tool_loop(["shell"]).tools))
    engine = PlaybackEngine(lambda request: say("```shell\nls\n```"))

    async def one(rollout, manager):
        return await rollout.evaluate(environment.held_out(1), name="eval", version=START, temperature=0.0)

    [episode], _ = in_boxes(environment, engine, one, retries=1)
    assert episode.failure.kind is FailureKind.SANDBOX and episode.attempt == 1
    assert len(set(boxes)) == 2


@pytest.mark.parametrize(
    ("error", "kind", "retryable"),
    [
        (PromptTooLong("p"), FailureKind.PROMPT_TOO_LONG, False),
        (EngineError("e"), FailureKind.POLICY, False),
        (SandboxTimeout("s"), FailureKind.SANDBOX, True),
        (SandboxUnavailable("s"), FailureKind.SANDBOX, False),
        (WorkflowError("w"), FailureKind.ENVIRONMENT, True),
        (ConfigError("c"), FailureKind.ENVIRONMENT, False),
        (KeyError("k"), FailureKind.ENVIRONMENT, True),
        (TimeoutError(), FailureKind.ENVIRONMENT, True),
    ],
)
def test_the_taxonomy(error, kind, retryable):
    failure = failure_of(error)
    assert (failure.kind, failure.retryable) == (kind, retryable)
