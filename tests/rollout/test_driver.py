"""Groups from tasks: the failure taxonomy, cases 7 to 9, cancellation, evaluation, exact resume."""

import asyncio
from dataclasses import replace

import pytest
from rollout_pieces import MemorySink, NoSandboxes, PlaybackEngine, driver, renderer, say
from rollout_rewards import number

from tandem.config.sections.rollout import RolloutSection
from tandem.core import wire
from tandem.core.errors import EngineError, EpisodeError, SandboxGone
from tandem.core.events import (
    EpisodeFinished,
    EpisodeStarted,
    GroupDropped,
    GroupFinished,
    GroupStarted,
    RewardFinished,
    TaskRejected,
    ToolFinished,
    TurnFinished,
    WaitStalled,
)
from tandem.core.types import (
    Episode,
    FailureKind,
    FinishReason,
    Limits,
    Message,
    Role,
    StopReason,
    Task,
    ToolFailure,
    WeightVersion,
    ids,
)
from tandem.envs.environment import Environment
from tandem.envs.reward import Reward
from tandem.envs.taskset import generated, task
from tandem.envs.workflow import Workflow, tool_loop


async def echo(text: str) -> str:
    """Gives the text back."""
    return text


async def never(text: str) -> str:
    """Never returns."""
    await asyncio.Event().wait()
    return ""


async def flood(text: str) -> str:
    """Gives the text back, often."""
    return text * 5000


async def broken(text: str) -> str:
    """Raises."""
    raise KeyError(text)


def environment(*, tasks=None, workflow=None, rewards=None, **more):
    made = {
        "name": "test",
        "tasks": tasks or generated(lambda seed, index: task(f"hello {index}", id=f"t{index}", rewards=[1.0] * 8)),
        "workflow": workflow or tool_loop([echo]),
        "rewards": rewards or [Reward(number)],
        "template": None,
    }
    return Environment(**made | more)


def section(**changes):
    chosen = {"groups_per_step": 1, "group_size": 2, "max_concurrent_episodes": 4, "reward_processes": 1}
    return RolloutSection(**chosen | changes)


def answers(text="hello"):
    return PlaybackEngine(lambda request: say(text))


def groups_of(env, engine, *, count=1, **changes):
    """The first groups, and all events."""

    async def run():
        sink = MemorySink()
        async with driver(env, engine, sink, section=section(**changes), max_context_tokens=8192) as rollout:
            rollout.start(WeightVersion(number=0, step=0))
            made = []
            for step in range(count):
                made.append(await rollout.get())
                rollout.advance(WeightVersion(number=step + 1, step=step + 1))
        assert not engine.running
        return made, sink

    return asyncio.run(run())


def test_events_tell_the_whole_story_with_causes():
    script = lambda request: say("```echo\nhi\n```" if request.id.endswith("/0") else "done")  # noqa: E731
    [(group, trajectories)], sink = groups_of(environment(), PlaybackEngine(script))
    assert [episode.id for episode in group.episodes] == ["g000000-0.0", "g000000-1.0"]
    assert len(trajectories) == 2
    [started] = [event for event in sink.of(GroupStarted) if event.group_id == group.id]
    assert (started.size, started.purpose, started.task_id) == (2, "train", "t0")
    kinds = [EpisodeStarted, TurnFinished, ToolFinished, TurnFinished, RewardFinished, EpisodeFinished]
    of_first = [event for event in sink.events if getattr(event, "episode_id", "") == "g000000-0.0"]
    assert [type(event) for event in of_first] == kinds
    finished = of_first[-1]
    assert (finished.reward, finished.failure, finished.num_turns, finished.stop_reason) == (1.0, None, 2, "answered")
    assert wire.decode(sink.blobs[finished.blob], Episode) == group.episodes[0]
    assert sink.blobs[of_first[2].output_digest] == b"hi"
    place = {id(event): sequence for sequence, event in enumerate(sink.events)}
    causes = [sink.causes[place[id(event)]] for event in of_first]
    assert causes[:4] == [place[id(started)], *(place[id(event)] for event in of_first[:3])]
    assert all(cause == place[id(of_first[0])] for cause in causes[4:])


def test_case_7_a_missing_reward_is_no_zero():
    tasks = generated(lambda seed, index: task("hello", id=f"t{index}", rewards=[1, None, 0, 1]))
    [(group, trajectories)], sink = groups_of(environment(tasks=tasks), answers(), group_size=4)
    assert [episode.reward for episode in group.episodes] == [1.0, None, 0.0, 1.0]
    assert group.episodes[1].failure.kind is FailureKind.REWARD_MISSING
    assert [trajectory.episode_id[-3] for trajectory in trajectories] == ["0", "2", "3"]
    [finished] = [event for event in sink.of(GroupFinished) if event.group_id == group.id]
    assert (finished.num_scored, finished.num_failed) == (3, 1)
    assert finished.mean_reward == pytest.approx(2 / 3)


def test_case_8_a_crash_is_retried_and_then_left_out():
    attempts = []

    async def crashes_for_the_third(session):
        turn = await session.ask()
        if session.task.id == "t0" and turn.prompt_ids and len(attempts) < 3 and on_third(session):
            attempts.append(session.task.id)
            raise RuntimeError("environment crash")
        return StopReason.ANSWERED

    def on_third(session):
        return asyncio.current_task().get_name().split(".")[0].endswith("-2")

    tasks = generated(lambda seed, index: task("hello", id=f"t{index}", rewards=[1, 0, 1]))
    env = environment(tasks=tasks, workflow=Workflow(run=crashes_for_the_third))
    [(group, trajectories)], sink = groups_of(env, answers(), group_size=3, retries=2)
    assert [episode.reward for episode in group.episodes] == [1.0, 0.0, None]
    failure = group.episodes[2].failure
    assert failure.kind is FailureKind.ENVIRONMENT and group.episodes[2].attempt == 2
    assert "RuntimeError: environment crash (test_driver.py:" in failure.detail
    assert len(trajectories) == 2
    retried = [event.retried for event in sink.of(EpisodeFinished) if event.index == 2 and event.task_id == "t0"]
    assert retried == [True, True, False]


def test_case_8_a_crash_that_a_retry_mends():
    crashed = []

    async def crashes_once(session):
        await session.ask()
        if not crashed:
            crashed.append(True)
            raise RuntimeError("once")
        return StopReason.ANSWERED

    [(group, _)], _ = groups_of(environment(workflow=Workflow(run=crashes_once)), answers())
    assert [episode.reward for episode in group.episodes] == [1.0, 1.0]
    assert sorted(episode.attempt for episode in group.episodes) == [0, 1]


@pytest.mark.parametrize("staleness", [0, 2])
def test_case_9_a_prompt_that_is_too_long_is_reported_and_replaced(staleness):
    tasks = generated(
        lambda seed, index: task("hello " * (400 if index == 3 else 1), id=f"t{index}", rewards=[1, 1]), size=8
    )

    async def run():
        sink, engine = MemorySink(), answers()
        settings = section(groups_per_step=2, max_concurrent_episodes=2, staleness=staleness)
        env = environment(tasks=tasks)
        async with driver(env, engine, sink, section=settings, max_context_tokens=400) as rollout:
            rollout.start(WeightVersion(number=0, step=0))
            seen = []
            for step in range(1, 5):
                seen += [(await asyncio.wait_for(rollout.get(), 30))[0].task.id for _ in range(2)]
                rollout.advance(WeightVersion(number=step, step=step))
            return seen, sink

    seen, sink = asyncio.run(run())
    assert sorted(seen) == sorted(["t0", "t1", "t2", "t4", "t5", "t6", "t7", "t0"])
    [dropped] = [event for event in sink.of(GroupDropped) if event.task_id == "t3"][:1]
    assert dropped.reason == "prompt_too_long"
    [failed] = [event for event in sink.of(EpisodeFinished) if event.task_id == "t3"][:1]
    assert failed.failure == "prompt_too_long" and "the context 400" in failed.detail and not failed.retried


def test_a_wait_names_the_missing():
    async def run():
        sink, engine = MemorySink(), PlaybackEngine(lambda request: say("hello"), delay_s=0.6)
        settings = section(stall_warning_s=0.2)
        async with driver(environment(), engine, sink, section=settings) as rollout:
            rollout.start(WeightVersion(number=0, step=0))
            await asyncio.sleep(0.05)
            missing = rollout.missing()
            await rollout.evaluate(
                environment().tasks.first(1, seed=0),
                name="eval-0",
                version=WeightVersion(number=0, step=0),
                temperature=0.0,
            )
            await rollout.get()
            return missing, rollout.missing(), sink

    missing, after, sink = asyncio.run(run())
    assert missing == ["group g000000 (task t0): running g000000-0.0, g000000-1.0"]
    assert "new weights" in after[0]
    assert sink.of(WaitStalled)[0].who == "eval-0"
    assert sink.of(WaitStalled)[0].missing == ["group eval-0-000000 (task t0): running eval-0-000000-0.0"]


async def raises(session):
    raise ZeroDivisionError("in the workflow")


async def hangs(session):
    await asyncio.Event().wait()


async def gives_no_reason(session):
    await session.ask()


class LostBoxes(NoSandboxes):
    async def create(self, spec):
        raise SandboxGone("box b1 is gone")


def failing(what):
    """What differs from a good run where every episode fails with ``what``."""
    return {
        "environment": {"env": environment(workflow=Workflow(run=raises))},
        "environment: no reason": {"env": environment(workflow=Workflow(run=gives_no_reason))},
        "episode_timeout": {"env": environment(workflow=Workflow(run=hangs)), "changes": {"episode_time_s": 0.2}},
        "policy": {"engine": PlaybackEngine(lambda request: EngineError("the engine is down"))},
        "policy: foreign": {"engine": PlaybackEngine(lambda request: MemoryError("of the engine"))},
        "sandbox": {"env": environment(template=""), "sandboxes": LostBoxes()},
    }[what]


@pytest.mark.parametrize(
    ("what", "detail", "attempts"),
    [
        ("environment", "ZeroDivisionError: in the workflow (test_driver.py:", 2),
        ("environment: no reason", "the workflow returned None, not a StopReason", 2),
        ("episode_timeout", "not finished within 0.2 s, after 0 turns", 1),
        ("policy", "the engine is down", 1),
        ("policy: foreign", "MemoryError: of the engine", 1),
        ("sandbox", "box b1 is gone", 2),
    ],
)
def test_failures_are_typed(what, detail, attempts):
    parts = {"env": environment(), "engine": answers(), "sandboxes": NoSandboxes(), "changes": {}} | failing(what)

    async def run():
        sink = MemorySink()
        settings = section(group_size=1, retries=1, **parts["changes"])
        made = driver(parts["env"], parts["engine"], sink, section=settings, sandboxes=parts["sandboxes"])
        async with made as rollout:
            [episode] = await rollout.evaluate(
                parts["env"].tasks.first(1, seed=0),
                name="eval",
                version=WeightVersion(number=0, step=0),
                temperature=0.0,
            )
        return episode, sink

    episode, sink = asyncio.run(run())
    assert episode.reward is None and episode.failure.kind == what.split(":")[0]
    assert detail in episode.failure.detail
    assert len(sink.of(EpisodeFinished)) == attempts
    assert {event.failure for event in sink.of(EpisodeFinished)} == {what.split(":")[0]}


def test_when_every_group_fails_the_run_ends_with_one_sentence():
    engine = failing("policy")["engine"]
    with pytest.raises(EpisodeError, match="16 groups in a row failed, the last one for all_failed"):
        groups_of(environment(), engine)


def test_tools_end_in_typed_ways_and_the_episode_goes_on():
    said = [
        "```never\nx\n```",
        "```broken\nx\n```",
        "```flood\nx\n```",
        "fine",
    ]
    engine = PlaybackEngine(lambda request: say(said[int(request.id.rsplit("/")[-1])]))
    env = environment(workflow=tool_loop([flood, never, broken]))
    [(group, _)], sink = groups_of(env, engine, group_size=1, tool_time_s=0.2, max_turns=5)
    results = [turn.tool_results[0] for turn in group.episodes[0].turns[:3]]
    assert [result.failure for result in results] == [ToolFailure.TIMEOUT, ToolFailure.RAISED, None]
    assert results[0].content == "[timed out after 0.2 s]"
    assert results[1].content.startswith("tool broken failed: KeyError: 'x' (test_driver.py:")
    assert "[3001 characters left out]" in results[2].content and len(results[2].content) < 2100
    assert group.episodes[0].stop_reason is StopReason.ANSWERED
    assert [event.failure for event in sink.of(ToolFinished)][:3] == ["timeout", "raised", None]


def test_limits_end_an_episode_without_failing_it():
    calls = "```echo\nhi\n```"
    [(group, _)], _ = groups_of(environment(), answers(calls), max_turns=3)
    assert {(len(episode.turns), episode.stop_reason) for episode in group.episodes} == {(3, StopReason.MAX_TURNS)}
    [(group, _)], _ = groups_of(environment(workflow=tool_loop([echo], max_turns=2)), answers(calls), max_turns=3)
    assert {len(episode.turns) for episode in group.episodes} == {2}
    [(group, _)], _ = groups_of(environment(), answers("hello " * 50), max_turn_tokens=10)
    assert group.episodes[0].stop_reason is StopReason.MAX_TOKENS
    assert len(group.episodes[0].turns[0].completion_ids) == 10


def test_a_full_context_ends_the_episode():
    def tasks(seed, index):
        return Task(
            id=f"t{index}",
            messages=(Message(role=Role.USER, content="hello"),),
            private={"rewards": [1, 1]},
            limits=Limits(max_context_tokens=150, max_turns=9),
        )

    [(group, _)], _ = groups_of(environment(tasks=generated(tasks)), answers("```echo\n" + "hi " * 20 + "\n```"))
    episode = group.episodes[0]
    assert episode.stop_reason is StopReason.CONTEXT_FULL and len(episode.turns) >= 1
    assert len(episode.turns[-1].prompt_ids) + len(episode.turns[-1].completion_ids) <= 150


def test_a_task_that_cannot_be_made_is_reported_and_replaced():
    def tasks(seed, index):
        if index == 0:
            raise LookupError("row 0 is broken")
        return task("hello", id=f"t{index}", rewards=[1, 1])

    [(group, _)], sink = groups_of(environment(tasks=generated(tasks)), answers())
    assert group.task.id == "t1"
    assert "LookupError: row 0 is broken (test_driver.py:" in sink.of(TaskRejected)[0].reason


def test_leaving_cancels_everything_and_says_so():
    async def run():
        sink, engine = MemorySink(), PlaybackEngine(lambda request: say("hello"), delay_s=60)
        async with driver(environment(), engine, sink, section=section()) as rollout:
            rollout.start(WeightVersion(number=0, step=0))
            waiting = asyncio.create_task(rollout.get())
            await asyncio.sleep(0.05)
            assert len(engine.running) == 2
        assert not engine.running
        with pytest.raises(RuntimeError, match="closed"):
            await waiting
        return sink, [each for each in asyncio.all_tasks() if each is not asyncio.current_task()]

    sink, left = asyncio.run(run())
    assert not left
    assert [event.failure for event in sink.of(EpisodeFinished)] == ["cancelled", "cancelled"]


def test_a_cancelled_get_loses_no_group():
    async def run():
        sink, engine = MemorySink(), PlaybackEngine(lambda request: say("hello"), delay_s=0.02)
        async with driver(environment(), engine, sink, section=section()) as rollout:
            rollout.start(WeightVersion(number=0, step=0))
            seen = []
            for step in range(1, 20):
                while True:
                    waiting = asyncio.ensure_future(rollout.get())
                    await asyncio.sleep(0.003 * (step % 7))
                    waiting.cancel()
                    try:
                        seen.append((await waiting)[0].id)
                        break
                    except asyncio.CancelledError:
                        continue
                rollout.advance(WeightVersion(number=step, step=step))
            return seen

    assert asyncio.run(run()) == [f"g{position:06d}" for position in range(19)]


def test_in_order_whatever_finishes_first_and_resume_goes_on_exactly():
    def slow_first(request):
        return say("hello")

    class Uneven(PlaybackEngine):
        async def generate(self, request, *, on_tokens=None, guide=None):
            position = int(request.id[1:7])
            self.delay_s = 0.05 if position % 2 == 0 else 0.0
            return await super().generate(request)

    async def run(steps, state=None, step=0):
        sink, engine = MemorySink(), Uneven(slow_first)
        settings = section(groups_per_step=2)
        async with driver(environment(), engine, sink, section=settings, in_order=True) as rollout:
            if state is not None:
                rollout.restore(state)
            rollout.start(WeightVersion(number=step, step=step))
            seen = []
            for now in range(step + 1, steps + 1):
                for _ in range(2):
                    group, _ = await rollout.get()
                    seen.append((group.id, [episode.seed for episode in group.episodes]))
                saved = rollout.state()
                rollout.advance(WeightVersion(number=now, step=now))
            in_flight = rollout.state()
            return seen, saved, in_flight

    whole, _, _ = asyncio.run(run(4))
    assert [name for name, _ in whole] == [f"g{position:06d}" for position in range(8)]
    first, saved, in_flight = asyncio.run(run(2))
    assert in_flight["redo"] == [4, 5] and saved["redo"] == []
    for state in (saved, in_flight):
        rest, _, _ = asyncio.run(run(4, state, 2))
        assert first + rest == whole


def test_requests_of_training_and_of_an_evaluation_have_the_priorities_of_the_recipe():
    async def run():
        engine = PlaybackEngine(lambda _: say("hello"))
        chosen = section(priority=-1, eval_priority=3)
        async with driver(environment(), engine, MemorySink(), section=chosen) as rollout:
            tasks, version = environment().tasks.first(2, seed=0), WeightVersion(number=0, step=0)
            await rollout.evaluate(tasks, name="held-out", version=version, temperature=0.0)
            evaluation = engine.requests[:]
            rollout.start(version)
            await rollout.get()
            return evaluation, engine.requests[len(evaluation) :]

    evaluation, training = asyncio.run(run())
    assert len(evaluation) == 2 and {request.priority for request in evaluation} == {3}
    assert len(training) >= 2 and {request.priority for request in training} == {-1}
    assert len({request.group for request in evaluation}) == 2  # each group has a line of its own


def test_evaluation_keeps_failed_episodes_and_draws_alike_each_time():
    requests = []

    def script(request):
        requests.append((request.id.split("-", 2)[-1], request.seed, request.params.temperature))
        return EngineError("no") if "000001-" in request.id else say("hello")

    async def run():
        sink = MemorySink()
        async with driver(environment(), PlaybackEngine(script), sink, section=section()) as rollout:
            tasks = environment().tasks.first(3, seed=0)
            version = WeightVersion(number=0, step=0)
            first = await rollout.evaluate(tasks, name="eval-0", version=version, temperature=0.0)
            second = await rollout.evaluate(tasks, name="eval-1", version=version, temperature=0.0)
            return first, second, sink

    first, second, sink = asyncio.run(run())
    assert [episode.task_id for episode in first] == ["t0", "t1", "t2"]
    assert [episode.reward for episode in first] == [1.0, None, 1.0]
    assert [episode.seed for episode in first] == [episode.seed for episode in second]
    assert sorted(requests[:3]) == sorted(requests[3:]) and {request[2] for request in requests} == {0.0}
    assert {event.purpose for event in sink.of(EpisodeFinished)} == {"eval-0", "eval-1"}


def test_a_prompt_is_rendered_once_with_its_tools():
    _, sink = groups_of(environment(), engine := answers())
    text = renderer().tokenizer.decode(engine.requests[0].prompt_ids)
    assert text.count("Gives the text back.") == 1 and text.endswith("assistant\n")
    assert engine.requests[0].params.stop_token_ids == renderer().stop_token_ids
    assert len({request.seed for request in engine.requests}) == len(engine.requests)
    assert sink.of(TurnFinished)[0].num_prompt_tokens == len(engine.requests[0].prompt_ids)


class GivesUp(PlaybackEngine):
    """Gives the first answer of every episode up after three tokens, for weights that came meanwhile."""

    async def generate(self, request, *, on_tokens=None, guide=None):
        whole = await super().generate(request)
        episode = request.id.split(".")[0]
        if episode in self.given_up:
            if request.so_far is None:
                return whole
            begun = request.so_far
            return replace(whole, logprobs=begun.logprobs + whole.logprobs[len(begun.logprobs) :],
                           versions=begun.versions + whole.versions[len(begun.versions) :])  # fmt: skip
        self.given_up.add(episode)
        self.version += 1
        return replace(whole, token_ids=whole.token_ids[:3], logprobs=whole.logprobs[:3], versions=whole.versions[:3],
                       finish_reason=FinishReason.ABORT)  # fmt: skip

    given_up: set[str]


@pytest.mark.parametrize("at_abort", ["resume", "retry"])
def test_a_turn_that_is_given_up_for_new_weights_goes_on_or_is_tried_again(at_abort):
    engine = GivesUp(lambda request: say("hello you"))
    engine.given_up = set()
    [(group, _)], sink = groups_of(environment(), engine, group_size=1, at_abort=at_abort)
    [episode] = group.episodes
    finished = [event for event in sink.of(EpisodeFinished) if event.group_id == group.id]
    (turn,) = episode.turns
    assert turn.completion_ids == ids(say("hello you"))
    if at_abort == "resume":
        assert episode.attempt == 0 and turn.versions.tolist() == [0] * 3 + [1] * (len(turn.versions) - 3)
    else:
        assert [event.failure for event in finished] == ["policy", None] and finished[0].retried
        assert "given up after 3 tokens" in finished[0].detail and len(set(turn.versions)) == 1


def test_samples_of_a_group_stand_in_one_line():
    engine = answers()
    made, _ = groups_of(environment(), engine, count=2)
    lines = {}
    for request in engine.requests:
        lines.setdefault(request.group, []).append(request.id)
    assert {group.id for group, _ in made} <= lines.keys()
    assert all(len(names) == 2 and all(name.startswith(group) for name in names) for group, names in lines.items())
