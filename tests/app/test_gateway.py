"""Agents with a loop of their own, on the official client, in real groups: recorded and ready to train."""

from __future__ import annotations

import asyncio
import sys

import openai
import pytest
from rollout_pieces import MemorySink, PlaybackEngine, driver, renderer, say
from rollout_rewards import says_42

from tandem.app.gateway import AgentGateway
from tandem.config.sections.rollout import RolloutSection
from tandem.core.errors import EpisodeError
from tandem.core.events import EpisodeFinished, TurnFinished
from tandem.core.types import FailureKind, StopReason, WeightVersion
from tandem.envs.agent import openai_agent
from tandem.envs.environment import Environment
from tandem.envs.reward import Reward
from tandem.envs.taskset import generated, task


async def ask(client, endpoint, messages, **fields):
    reply = await client.chat.completions.create(model=endpoint.model, messages=messages, **fields)
    return reply.choices[0].message.model_dump(exclude_none=True)


def client_of(endpoint):
    return openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)


async def chatty(task, endpoint):
    """Asks, follows its answer in two ways, and starts one conversation of its own."""
    first = [{"role": "user", "content": task.messages[0].content}]
    async with client_of(endpoint) as client:
        answer = await ask(client, endpoint, first, temperature=0.1, max_tokens=1000)
        for way in ("left", "right"):
            await ask(client, endpoint, [*first, answer, {"role": "user", "content": way}])
        await ask(client, endpoint, [{"role": "user", "content": "someone else"}])


def environment(agent, **options):
    return Environment(
        name="agent",
        tasks=generated(lambda seed, index: task(f"hello {index}", id=f"t{index}")),
        workflow=openai_agent(agent, **options),
        rewards=[Reward(says_42)],
        template=None,
    )


def one_group(agent, script=lambda _: say("42"), *, max_context_tokens=2048, section=None, sink=None, **options):
    sink = sink or MemorySink()

    async def run():
        engine = PlaybackEngine(script)
        gateway = AgentGateway(engine, renderer(), max_context_tokens=max_context_tokens)
        try:
            around = driver(environment(agent, **options), engine, sink, gateway=gateway, section=section,
                            max_context_tokens=max_context_tokens)  # fmt: skip
            async with around as rollout:
                rollout.start(WeightVersion(number=3, step=0))
                return (*await asyncio.wait_for(rollout.get(), 240), engine, sink)
        finally:
            await gateway.close()

    return asyncio.run(run())


def failures(agent, section, said="its own bug"):
    """The kinds of failure of an agent that always fails, and whether their details say ``said``."""
    sink = MemorySink()
    with pytest.raises(EpisodeError, match="all_failed"):
        one_group(agent, section=section, sink=sink)
    ended = [event for event in sink.events if isinstance(event, EpisodeFinished) and event.failure != "cancelled"]
    assert ended and all(event.reward is None for event in ended)
    return {(event.failure, said in event.detail) for event in ended}


def test_every_sampled_token_is_trained_once_and_branches_are_trajectories():
    group, trajectories, engine, sink = one_group(chatty)
    episode = group.episodes[0]
    assert episode.reward == 1.0 and [turn.parent for turn in episode.turns] == [-1, 0, 0, -1]
    mine = [each for each in trajectories if each.episode_id == episode.id]
    assert len(mine) == 3
    assert sum(sum(each.loss_mask) for each in mine) == 4 * len(say("42"))
    shared, again, alone = mine
    each_answer = len(say("42"))
    assert [sum(branch.loss_mask) for branch in mine] == [2 * each_answer, each_answer, each_answer]
    opening = len(episode.turns[0].prompt_ids) + len(episode.turns[0].completion_ids)
    assert shared.token_ids[:opening] == again.token_ids[:opening] != alone.token_ids[:opening]
    # Sampling is the recipe's, not the client's.
    assert {request.params.temperature for request in engine.requests} == {1.0}
    assert len({request.seed for request in engine.requests}) == len(engine.requests)
    assert sum(isinstance(event, TurnFinished) for event in sink.events) >= 8


def test_an_agents_requests_have_the_priority_of_the_recipe_whatever_they_ask_for():
    async def pushy(task, endpoint):
        async with client_of(endpoint) as client:
            await ask(client, endpoint, [{"role": "user", "content": "hi"}], extra_body={"priority": 16, "group": "me"})

    chosen = RolloutSection(groups_per_step=1, group_size=2, max_concurrent_episodes=2, priority=2)
    group, _, engine, _ = one_group(pushy, section=chosen)
    assert {(request.group, request.priority) for request in engine.requests if request.group == group.id}
    assert {request.priority for request in engine.requests} == {2} and "me" not in {r.group for r in engine.requests}


def test_an_agent_that_is_refused_at_the_last_turn_ends_there_and_is_scored():
    group, trajectories, _, _ = one_group(chatty, max_turns=2)
    episode = group.episodes[0]
    assert episode.failure is None and episode.stop_reason is StopReason.MAX_TURNS and episode.reward == 1.0
    assert len(episode.turns) == 2 and len(trajectories) == len(group.episodes)


def test_an_agent_that_fills_the_context_ends_there():
    async def long_winded(task, endpoint):
        messages = [{"role": "user", "content": task.messages[0].content}]
        async with client_of(endpoint) as client:
            while True:
                messages += [await ask(client, endpoint, messages), {"role": "user", "content": "more " * 20}]

    section = RolloutSection(groups_per_step=2, group_size=2, max_concurrent_episodes=4, max_turns=50,
                             max_turn_tokens=8)  # fmt: skip
    group, _, _, _ = one_group(long_winded, max_context_tokens=300, section=section)
    assert all(episode.stop_reason is StopReason.CONTEXT_FULL for episode in group.episodes)


def test_an_agent_that_fails_is_a_failure_of_the_environment():
    async def broken(task, endpoint):
        async with client_of(endpoint) as client:
            await ask(client, endpoint, [{"role": "user", "content": "x"}])
        raise KeyError("its own bug")

    section = RolloutSection(groups_per_step=2, group_size=2, max_concurrent_episodes=4, retries=0)
    assert failures(broken, section) == {(FailureKind.ENVIRONMENT, True)}


COMMAND = """
import json, os, sys, openai
task = json.load(sys.stdin)
client = openai.OpenAI(max_retries=0)
said = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=task["messages"])
sys.exit(int(sys.argv[1]) if said.choices[0].message.content == "42" else 9)
"""


# The same without the client, whose import takes a second: an agent that always fails is started 32 times.
PLAIN = """
import json, os, sys, urllib.request
body = {"model": os.environ["OPENAI_MODEL"], "messages": json.load(sys.stdin)["messages"]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
    said = json.load(answer)["choices"][0]["message"]["content"]
sys.exit(int(sys.argv[1]) if said == "42" else 9)
"""


CASES = [(COMMAND, 0), (PLAIN, 0), (PLAIN, 3)]


@pytest.mark.parametrize(("command", "code"), CASES, ids=["client", "plain", "failing"])
def test_a_command_finds_its_task_and_its_endpoint_and_its_end_counts(command, code):
    section = RolloutSection(groups_per_step=2, group_size=2, max_concurrent_episodes=2, retries=0)
    agent = [sys.executable, "-c", command, str(code)]
    if code:
        assert failures(agent, section, "ended with code 3") == {(FailureKind.ENVIRONMENT, True)}
        return
    group, _, _, _ = one_group(agent, section=section)
    assert [(len(episode.turns), episode.reward) for episode in group.episodes] == [(1, 1.0)] * 2
