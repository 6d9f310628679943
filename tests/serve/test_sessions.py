"""Recorded sessions: an unmodified client is recorded token for token, branches and all."""

from __future__ import annotations

import httpx
import openai
import pytest
from serve_pieces import END, renderer, say
from test_openai import CALL, TOOL, USER, talk

from tandem.core.types import Message, Role, SamplingParams, ids
from tandem.serve.requests import BadRequest
from tandem.serve.sessions import Sessions, Terms


def unusual(text):
    """The ids of ``text`` byte by byte: same text, other ids than the tokenizer would choose; END at the end."""
    tokenizer = renderer().tokenizer
    symbols = (piece.replace(" ", "Ġ").replace("\n", "Ċ") for piece in text)
    return [*(tokenizer.token_id(symbol) for symbol in symbols), tokenizer.special_tokens[END]]


def recorded(client, name):
    address = str(client.base_url).removesuffix("/v1/")
    return openai.AsyncOpenAI(base_url=f"{address}/sessions/{name}/v1", api_key="none", max_retries=0)


async def ask(client, messages, **fields):
    reply = await client.chat.completions.create(model="small", messages=messages, **fields)
    return reply.choices[0].message.model_dump(exclude_none=True)


async def shown(client, name, method="GET"):
    async with httpx.AsyncClient() as plain:
        return await plain.request(method, str(client.base_url).removesuffix("v1/") + f"sessions/{name}/")


def test_a_conversation_goes_on_from_the_very_ids_that_were_sampled():
    async def body(client, engine):
        async with recorded(client, "a") as agent:
            first = await ask(agent, [USER], tools=[TOOL])
            result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "42"}
            await ask(agent, [USER, first, result], tools=[TOOL])
        return (await shown(client, "a")).json(), engine.requests

    said = iter([unusual(CALL), say("It is 42")])
    session, requests = talk(lambda _: next(said), body)
    first, second = session["turns"]
    assert (first["parent"], second["parent"]) == (-1, 0)
    assert first["token_ids"] == unusual(CALL)  # not what the tokenizer makes of the text
    kept = first["prompt_token_ids"] + unusual(CALL)
    assert second["prompt_token_ids"][: len(kept)] == kept == list(requests[1].prompt_ids)[: len(kept)]
    answer = Message(role=Role.TOOL, content="42", tool_call_id="c", name="python")
    assert second["prompt_token_ids"][len(kept) :] == list(renderer().continuation(ids(unusual(CALL)), [answer]))
    assert second["logprobs"] == [-0.25 * (place + 1) for place in range(len(second["token_ids"]))]
    assert set(second["weight_versions"]) == {3} and first["tool_calls"][0]["name"] == "python"


def test_a_call_that_was_cut_comes_back_and_goes_on_from_its_ids():
    said = say('<tool_call>\n{"name": "python", "arguments": {"code": "print(1')

    async def body(client, engine):
        async with recorded(client, "cut") as agent:
            first = await ask(agent, [USER], tools=[TOOL], max_tokens=len(said) - 1)
            result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "not JSON"}
            await ask(agent, [USER, first, result], tools=[TOOL], max_tokens=5)
            # The same in a conversation that nobody sampled: its words are written as they were told.
            await ask(client, [USER, first, result], tools=[TOOL], max_tokens=5)
        return first, (await shown(client, "cut")).json()["turns"], engine.requests[-1]

    first, turns, plain = talk(lambda _: said, body, tool_format="hermes")
    (call,) = first["tool_calls"]
    assert call["function"] == {"name": "python", "arguments": '{"code": "print(1'}
    assert turns[0]["finish_reason"] == "length" and turns[0]["tool_calls"][0]["arguments"] == '{"code": "print(1'
    assert [turn["parent"] for turn in turns] == [-1, 0]
    kept = turns[0]["prompt_token_ids"] + said[:-1]
    assert turns[1]["prompt_token_ids"][: len(kept)] == kept
    assert '"arguments": {"code": "print(1}' in renderer().tokenizer.decode(plain.prompt_ids)


def test_another_history_branches_or_begins_anew():
    async def body(client, engine):
        async with recorded(client, "b") as agent:
            first = await ask(agent, [USER])
            await ask(agent, [USER, first, {"role": "user", "content": "left"}])
            await ask(agent, [USER, first, {"role": "user", "content": "right"}])
            await ask(agent, [{"role": "user", "content": "another agent"}])
            changed = {"role": "assistant", "content": "words it never said"}
            await ask(agent, [USER, changed, {"role": "user", "content": "right"}])
        return (await shown(client, "b")).json()["turns"]

    turns = talk(lambda request: say(f"{len(request.prompt_ids)}"), body)
    assert [turn["parent"] for turn in turns] == [-1, 0, 0, -1, -1]


def test_branches_fork_a_conversation_at_a_message():
    async def body(client, engine):
        address = str(client.base_url).removesuffix("/v1/")
        async with recorded(client, "c") as agent, httpx.AsyncClient() as plain:
            first = await ask(agent, [USER])
            more = {"role": "user", "content": "and?"}
            second = await ask(agent, [USER, first, more])
            url = f"{address}/sessions/c/v1/branches"
            fields = {"model": "small", "messages": [USER, first, more, second], "at": 3, "n": 3, "seed": 7}
            forked = (await plain.post(url, json=fields)).json()
            chosen = forked["choices"][2]["message"]
            await ask(agent, [USER, first, more, chosen, more])
            lost = await plain.post(url, json=fields | {"messages": [USER, {**first, "content": "no"}, more], "at": 3})
            wrong = await plain.post(url, json=fields | {"at": 9})
        return (await shown(client, "c")).json()["turns"], lost, wrong, engine.forks

    # All answers are of one length, so that they end in the order of their numbers.
    turns, lost, wrong, forks = talk(lambda request: say(f"{request.seed % 1000:03}"), body)
    assert [turn["parent"] for turn in turns] == [-1, 0, 0, 0, 0, 4]
    assert len(forks) == 2
    assert lost.status_code == 400 and lost.json()["error"]["param"] == "messages"
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "at"


def test_a_stop_string_ends_the_record_where_it_ends_the_answer():
    async def body(client, engine):
        async with recorded(client, "d") as agent:
            first = await ask(agent, [USER], stop="DE")
            await ask(agent, [USER, first, USER])
        return (await shown(client, "d")).json()["turns"]

    first, second = talk(lambda _: say("ABCDEFG"), body)
    assert first["content"] == "ABC" and first["token_ids"] == say("ABCDEF", end=False)
    kept = first["prompt_token_ids"] + first["token_ids"]
    assert second["parent"] == 0 and second["prompt_token_ids"][: len(kept)] == kept


def test_streamed_turns_are_recorded_and_a_closed_session_is_gone():
    async def body(client, engine):
        async with recorded(client, "e") as agent:
            async for _ in await agent.chat.completions.create(model="small", messages=[USER], stream=True):
                pass
        closed = await shown(client, "e", "DELETE")
        return closed.json(), (await shown(client, "e")).status_code

    closed, status = talk(lambda _: say("done"), body)
    assert [turn["content"] for turn in closed["turns"]] == ["done"] and status == 404


def test_terms_fix_sampling_seed_and_the_number_of_turns():
    sessions = Sessions(renderer(), openable=False)
    with pytest.raises(BadRequest) as unknown:
        sessions.enter("x")
    assert unknown.value.status == 404
    terms = Terms(params=SamplingParams(temperature=0.5, max_tokens=7), seed=11, max_turns=2)
    sessions.open("x", terms)
    with pytest.raises(BadRequest) as twice:
        sessions.open("x")
    assert twice.value.status == 409

    async def body(client, engine):
        async with recorded(client, "x") as agent:
            for temperature in (2.0, None):
                await ask(agent, [USER], temperature=temperature, max_tokens=100, seed=5)
            with pytest.raises(openai.BadRequestError) as caught:
                await ask(agent, [USER])
        return caught.value.code, engine.requests

    code, requests = talk(lambda _: say("a long answer of many tokens"), body, sessions=sessions)
    assert code == "max_turns" and sessions.close("x").over == "max_turns"
    assert {(request.params.temperature, request.params.max_tokens) for request in requests} == {(0.5, 7)}
    assert len({request.seed for request in requests}) == 2  # the session's own, one a turn
