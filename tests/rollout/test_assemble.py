"""Episodes to token streams: tokens are born once, and only the policy's are trained (cases 1 and 2)."""

import asyncio

import pytest
from rollout_pieces import END, MemorySink, PlaybackEngine, driver, renderer, say
from rollout_rewards import says_42

from tandem.core.errors import EpisodeError
from tandem.core.types import Episode, FinishReason, Message, Role, Turn, WeightVersion, floats, ids
from tandem.envs.environment import Environment
from tandem.envs.reward import Reward
from tandem.envs.taskset import generated, task
from tandem.envs.workflow import tool_loop
from tandem.rollout.assemble import assemble, demonstrate


async def lookup(query: str) -> str:
    """Looks something up."""
    return f"the answer to {query} is 42"


TOOLS = tool_loop([lookup])
ENVIRONMENT = Environment(
    name="lookup",
    tasks=generated(lambda seed, index: task(f"hello {index}", id=f"t{index}")),
    workflow=TOOLS,
    rewards=[Reward(says_42)],
    template=None,
)


def unusual(text):
    """The ids of ``text`` byte by byte: same text, other ids than the tokenizer would choose."""
    tokenizer = renderer().tokenizer
    return [tokenizer.token_id(piece.replace(" ", "Ġ").replace("\n", "Ċ")) for piece in text]


def run_group(script, environment=ENVIRONMENT):
    async def run():
        sink, engine = MemorySink(), PlaybackEngine(script)
        async with driver(environment, engine, sink) as rollout:
            rollout.start(WeightVersion(number=3, step=0))
            return await rollout.get(), engine, sink

    return asyncio.run(run())


def test_case_1_tokens_are_born_once():
    end = renderer().tokenizer.special_tokens[END]
    scripted = [
        [*unusual("hello"), *say("\n```lookup\nworld\n```")],
        [*unusual("the answer"), *say("\n```lookup\nhello\n```", end=False)],  # cut: no end token
        [*say("The answer is 42", end=False), *unusual(" hello"), end],
    ]
    assert unusual("hello") != list(renderer().tokenizer.encode("hello"))
    (group, trajectories), engine, _ = run_group(lambda request: scripted[int(request.id.rsplit("/")[-1])])
    for episode, trajectory in zip(group.episodes, trajectories, strict=True):
        assert [list(turn.completion_ids) for turn in episode.turns] == scripted
        for before, after in zip(episode.turns, episode.turns[1:], strict=False):
            seen = before.prompt_ids + before.completion_ids
            assert after.prompt_ids[: len(seen)] == seen
        made = [token for token, own in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if own]
        assert made == sum(scripted, []) and sum(trajectory.loss_mask) == len(made)
        for own, logprob, version in zip(
            trajectory.loss_mask, trajectory.logprobs, trajectory.versions, strict=True
        ):
            assert (logprob < 0, version) == ((True, 0) if own else (False, -1))
        assert episode.reward == 1.0


def test_case_2_only_the_policys_tokens_are_trained():
    first, tool_text, last = ids([1, 2, 3, 4, 5]), ids(range(20, 27)), ids([6, 7, 8, 9])
    message = Message(role=Role.ASSISTANT, content="I do not know")
    prompt = ids([9, 9])

    def turn(prompt_ids, made):
        return Turn(
            prompt_ids=prompt_ids,
            completion_ids=made,
            logprobs=floats([-1.0] * len(made)),
            versions=ids([4] * len(made)),
            message=message,
            finish_reason=FinishReason.STOP,
        )

    turns = (turn(prompt, first), turn(prompt + first + tool_text, last))
    episode = Episode(id="e", task_id="t", group_id="g", index=0, attempt=0, seed=0, turns=turns, reward=0.0)
    (trajectory,) = assemble(episode, temperature=0.7)
    assert list(trajectory.loss_mask) == [0] * 2 + [1] * 5 + [0] * 7 + [1] * 4
    assert sum(trajectory.loss_mask) == 9 and trajectory.num_prompt_tokens == 2 and trajectory.temperature == 0.7
    broken = Episode(
        id="e", task_id="t", group_id="g", index=0, attempt=0, seed=0, turns=(turns[0], turn(prompt + last, last))
    )
    with pytest.raises(EpisodeError, match="turn 1's prompt does not begin with the 7 ids before it"):
        assemble(broken, temperature=1.0)
    with pytest.raises(EpisodeError, match="no turn"):
        assemble(Episode(id="e", task_id="t", group_id="g", index=0, attempt=0, seed=0, turns=()), temperature=1.0)


def test_case_2_the_leaked_answer_alone_earns_nothing():
    scripted = [say("```lookup\nworld\n```"), say("I do not know")]
    (group, trajectories), _, _ = run_group(lambda request: scripted[int(request.id.rsplit("/")[-1])])
    assert [episode.reward for episode in group.episodes] == [0.0, 0.0]
    assert "42" in group.episodes[0].turns[0].tool_results[0].content
    assert sum(trajectories[0].loss_mask) == sum(map(len, scripted))


def test_a_demonstration_takes_the_same_road():
    messages = [
        Message(role=Role.USER, content="hello"),
        Message(role=Role.ASSISTANT, content="world"),
        Message(role=Role.USER, content="hello"),
        Message(role=Role.ASSISTANT, content="answer"),
    ]
    trajectory = demonstrate(messages, [tool.spec for tool in TOOLS.tools], renderer(), name="d")
    made = [token for token, own in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if own]
    assert made == say("world") + say("answer")
    assert set(trajectory.versions) == {-1} and trajectory.loss_mask[trajectory.num_prompt_tokens] == 1
