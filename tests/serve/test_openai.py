"""The server as the official client sees it, on loopback, over a scripted engine."""

from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serve_pieces import END, ScriptedEngine, renderer, say, served, serving

from tandem.core.types import GenerateRequest, Message, Role, ToolCall, ToolSpec
from tandem.core.wire import derive_seed
from tandem.serve.chat import ChatBody
from tandem.serve.completions import CompletionBody

USER = {"role": "user", "content": "hi"}
TOOL = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs code.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}
SPEC = ToolSpec(name="python", description="Runs code.", parameters=TOOL["function"]["parameters"])
CALL = "Look:\n```python\nprint(6 * 7)\n```"


def talk(script, body, *, step_s=0.0, at_once=1, **options):
    """Run ``body(client, engine)`` against a server; returns what it returns."""

    async def run():
        engine = ScriptedEngine(script, step_s=step_s, at_once=at_once)
        async with (
            serving(served(engine, **options)) as address,
            openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
        ):
            return await asyncio.wait_for(body(client, engine), 120)

    return asyncio.run(run())


def create(client, **fields):
    return client.chat.completions.create(**{"model": "small", "messages": [USER], **fields})


async def joined(stream):
    """The pieces of a streamed answer put together: words, calls, reason, usage."""
    words, calls, reason, usage = "", {}, None, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            words += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                name, arguments = calls.get(call.index, (None, ""))
                assert (call.id is not None) == (call.function.name is not None) == (name is None), "once"
                calls[call.index] = (name or call.function.name, arguments + call.function.arguments)
            reason = choice.finish_reason or reason
    return words, [calls[index] for index in sorted(calls)], reason, usage


def test_a_plain_answer_with_usage_and_ids():
    async def body(client, engine):
        reply = await create(client, logprobs=True, extra_body={"return_token_ids": True})
        return reply, engine.requests[0]

    reply, request = talk(lambda _: say("Hello you"), body)
    choice = reply.choices[0]
    assert choice.message.content == "Hello you" and choice.finish_reason == "stop"
    assert choice.token_ids == say("Hello you") and reply.prompt_token_ids == list(request.prompt_ids)
    assert [entry.logprob for entry in choice.logprobs.content] == [-0.25 * n for n in range(1, 11)]
    assert "".join(entry.token for entry in choice.logprobs.content) == f"Hello you{END}"
    assert reply.usage.completion_tokens == 10 and reply.usage.prompt_tokens == len(request.prompt_ids)
    assert reply.usage.prompt_tokens_details.cached_tokens == 5


def test_streaming_gives_the_same_and_usage_when_asked():
    async def body(client, engine):
        return await joined(await create(client, stream=True, stream_options={"include_usage": True}))

    words, calls, reason, usage = talk(lambda _: say("né€🙂 done"), body)
    assert (words, calls, reason) == ("né€🙂 done", [], "stop")
    assert usage.completion_tokens == len(say("né€🙂 done"))


def test_stop_strings_and_limits_agree_in_both_modes_for_every_limit():
    async def body(client, engine):
        for limit in range(1, 9):
            for stop in (None, "DE", "FGH"):
                fields = {"max_tokens": limit, **({"stop": stop} if stop else {})}
                whole = await create(client, **fields)
                words, _, reason, _ = await joined(await create(client, stream=True, **fields))
                assert (words, reason) == (whole.choices[0].message.content, whole.choices[0].finish_reason)
                if stop == "DE" and limit >= 3:
                    assert (words, reason) == ("ABC", "stop")
        return engine.running

    assert talk(lambda _: say("ABCDEFG"), body) == set()


def test_a_tool_call_comes_out_parsed_in_both_modes_and_goes_back_in():
    async def body(client, engine):
        whole = await create(client, tools=[TOOL])
        streamed = await joined(await create(client, tools=[TOOL], stream=True))
        message = whole.choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "42"}
        await create(client, tools=[TOOL], messages=[USER, message.model_dump(exclude_none=True), result])
        return whole, streamed, engine.requests[-1]

    whole, streamed, request = talk(lambda _: say(CALL), body)
    choice = whole.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Look:"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"code": "print(6 * 7)"}
    assert streamed[:3] == ("Look:", [("python", '{"code": "print(6 * 7)"}')], "tool_calls")
    # The history takes the road of training: prompt, the assistant's own tokens, what follows them.
    said = Message(role=Role.ASSISTANT, content="Look:",
                   tool_calls=(ToolCall(id="c", name="python", arguments={"code": "print(6 * 7)"}),))  # fmt: skip
    first = renderer().prompt([Message(role=Role.USER, content="hi")], [SPEC])
    made = renderer().completion(said, [SPEC])
    answer = Message(role=Role.TOOL, content="42", tool_call_id="c", name="python")
    assert request.prompt_ids == first + made + renderer().continuation(made, [answer])


TEXTS = {
    "fence": "Look:\n```python\nprint(6 * 7)\n```",
    "hermes": 'Look:\n<tool_call>\n{"name": "python", "arguments": {"code":"print(\\"é\\")"}}\n</tool_call>',
    "llama": 'Look:\n<|python_tag|>{"name": "python", "parameters": {"code": "}"}}',
    "json": 'Look:\n[{"name": "python", "arguments": {"code": "]"}}]',
    "pythonic": "Look:\n[python(code='''a\n''')]",
    "gemma": "Look:\n```tool_code\nprint(python(code='1'))\n```",
}


@pytest.mark.parametrize("form", TEXTS)
def test_a_call_is_streamed_piece_by_piece_and_both_modes_agree_for_every_limit(form):
    length = len(say(TEXTS[form])) - 1

    async def body(client, engine):
        pairs, chunks = [], []
        for limit in range(1, length + 2):
            whole = await create(client, tools=[TOOL], max_tokens=limit)
            streamed = await joined(await create(client, tools=[TOOL], max_tokens=limit, stream=True))
            pairs.append((whole.choices[0], streamed))
        async for chunk in await create(client, tools=[TOOL], stream=True):
            chunks += [call for choice in chunk.choices for call in choice.delta.tool_calls or []]
        return pairs, chunks

    pairs, chunks = talk(lambda _: say(TEXTS[form]), body, tool_format=form)
    for limit, (choice, (words, calls, reason, _)) in enumerate(pairs, 1):
        told = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
        assert (words, calls, reason) == (choice.message.content or "", told, choice.finish_reason)
        assert not calls or words == "Look:"
        early = {"json": (1,), "gemma": (3, 4)}.get(form, ())  # what closes the list or the block may be missing
        closed = limit >= length or length - limit in early
        assert reason == ("tool_calls" if closed else "length"), limit
    last = pairs[-1][0].message.tool_calls[0]
    assert isinstance(json.loads(last.function.arguments)["code"], str)
    first, *others = chunks
    assert (first.function.name, first.function.arguments) == ("python", "") and first.id.startswith("call_")
    assert len(others) >= (1 if form in ("pythonic", "gemma") else 3) and not any(other.id for other in others)


FORTY = "Look:\n```python\nprint(6 * 7 + 12345)\n```"


@pytest.mark.parametrize("ends", [True, False])
def test_the_true_finish_reason_of_a_call_of_forty_tokens_under_every_limit(ends):
    """Case 12, also where the model is cut right behind the call and never says its end token."""
    assert len(say(FORTY)) == 40 + 1

    async def body(client, engine):
        told = []
        for limit in range(1, 46):
            whole = await create(client, tools=[TOOL], max_tokens=limit)
            asked = {"stream": True, "stream_options": {"include_usage": True}}
            told.append((whole, await joined(await create(client, tools=[TOOL], max_tokens=limit, **asked))))
        return told

    for limit, (whole, (words, calls, reason, usage)) in enumerate(talk(lambda _: say(FORTY, end=ends), body), 1):
        (choice,) = whole.choices
        assert choice.finish_reason == reason == ("length" if limit < 40 else "tool_calls"), limit
        assert (choice.message.content or "") == words
        assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []] == calls
        assert whole.usage.model_dump() == usage.model_dump()
        assert usage.completion_tokens == min(limit, 41 if ends else 40)
        if limit >= 40:
            assert (words, calls) == ("Look:", [("python", '{"code": "print(6 * 7 + 12345)"}')])


def test_plain_text_whose_end_is_the_last_allowed_token_is_a_stop_under_every_limit():
    text = "forty tokens of plain text, not a call.."
    assert len(say(text)) == 40 + 1

    async def body(client, engine):
        told = []
        for limit in range(1, 46):
            for tools in ({}, {"tools": [TOOL]}):
                whole = (await create(client, max_tokens=limit, **tools)).choices[0]
                words, _, reason, _ = await joined(await create(client, max_tokens=limit, stream=True, **tools))
                told.append((limit, whole.message.content, whole.finish_reason, words, reason))
        return told

    for limit, content, reason, words, streamed in talk(lambda _: say(text), body):
        assert content == words == text[:limit].rstrip() or content == words == text[:limit]
        assert reason == streamed == ("stop" if limit >= 41 else "length"), limit


@pytest.mark.parametrize("at_once", [1, 3])
def test_every_choice_is_cut_at_its_own_stop_string_and_counted_to_the_token(at_once):
    """Case 11 with n > 1: choices end at other places, in both modes, and the usage is the sum of what each has."""
    texts = ("ABCDEFG", "xABCDE", "ABCD", "DEDE", "no stop in it", "ABCDFGH")
    cases = {"DE": ("ABC", "xABC", "ABCD", "", "no stop in it", "ABCDFGH"),
             "FGH": ("ABCDEFG", "xABCDE", "ABCD", "DEDE", "no stop in it", "ABCD")}  # fmt: skip
    seeds = {derive_seed("serve", 3, index): texts[index] for index in range(len(texts))}

    async def body(client, engine):
        told = []
        for stop in (*cases, list(cases)):
            fields = {"n": len(texts), "seed": 3, "stop": stop, "extra_body": {"return_token_ids": True}}
            whole = await create(client, **fields)
            pieces, ids, reasons, usage = {}, {}, {}, None
            async for chunk in await create(client, stream=True, stream_options={"include_usage": True}, **fields):
                usage = chunk.usage or usage
                for part in chunk.choices:
                    pieces[part.index] = pieces.get(part.index, "") + (part.delta.content or "")
                    ids[part.index] = [*ids.get(part.index, []), *(getattr(part, "token_ids", None) or [])]
                    reasons[part.index] = part.finish_reason or reasons.get(part.index)
            told.append((stop, whole, pieces, ids, reasons, usage))
        return told, engine.running

    told, running = talk(lambda request: say(seeds[request.seed]), body, at_once=at_once)
    assert not running
    for stop, whole, pieces, ids, reasons, usage in told:
        assert len(whole.choices) == len(texts)
        for choice, text in zip(whole.choices, texts, strict=True):
            number = choice.index
            assert choice.message.content == pieces[number] and choice.finish_reason == reasons[number] == "stop"
            assert choice.token_ids == ids[number] == say(text)[: len(ids[number])]
            wanted = [cases[each][number] for each in ([stop] if isinstance(stop, str) else stop)]
            assert pieces[number] == min(wanted, key=len)
        assert whole.usage.completion_tokens == usage.completion_tokens == sum(map(len, ids.values()))


def test_choices_have_seeds_of_their_own_and_a_seed_repeats():
    async def body(client, engine):
        reply = await create(client, n=3, seed=11, temperature=0.5, top_p=0.9, extra_body={"top_k": 7})
        await joined(await create(client, n=3, seed=11, stream=True))
        return reply, engine.requests

    reply, requests = talk(lambda request: say(f"seed {request.seed % 97}"), body)
    seeds = [derive_seed("serve", 11, index) for index in range(3)]
    assert [request.seed for request in requests] == seeds * 2
    assert [choice.message.content for choice in reply.choices] == [f"seed {seed % 97}" for seed in seeds]
    params = requests[0].params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 7)


def test_thoughts_are_told_apart_in_both_modes_and_may_come_back_or_not():
    text = "<think>\nSix times seven.\n</think>\n\nIt is 42"

    async def body(client, engine):
        whole = await create(client)
        thoughts = words = ""
        async for chunk in await create(client, stream=True, stream_options={"include_usage": True}):
            usage = chunk.usage
            for choice in chunk.choices:
                thoughts += getattr(choice.delta, "reasoning_content", "") or ""
                words += choice.delta.content or ""
        session = openai.AsyncOpenAI(base_url=client.base_url.join("/sessions/s/v1"), api_key="none")
        first = (await create(session)).choices[0].message.model_dump(exclude_none=True)
        bare = {key: value for key, value in first.items() if key != "reasoning_content"}
        for answer in (first, bare):
            await create(session, messages=[USER, answer, USER])
        await session.close()
        return whole, (words, thoughts), usage, engine.requests[-2:]

    whole, streamed, usage, again = talk(lambda _: say(text), body, reasoning="<think> </think>")
    message = whole.choices[0].message
    assert (message.content, message.reasoning_content) == streamed == ("It is 42", "Six times seven.")
    count = len(say("<think>\nSix times seven.\n</think>", end=False))
    for told in (whole.usage, usage):
        assert told.completion_tokens_details.reasoning_tokens == count
        assert told.completion_tokens == len(say(text))
    made = say(text)
    for request in again:  # either way it goes on from the very ids
        prompt = request.prompt_ids.tolist()
        assert any(prompt[at : at + len(made)] == made for at in range(len(prompt)))
    assert again[0].prompt_ids == again[1].prompt_ids


def test_requests_stand_in_the_line_of_their_group_their_session_or_their_key():
    async def body(client, engine):
        await create(client)
        await create(client, extra_body={"group": "g", "priority": -2})
        async with openai.AsyncOpenAI(base_url=client.base_url.join("/sessions/s/v1"), api_key="none") as agent:
            await create(agent)
            await create(agent, extra_body={"group": "h"})
        with pytest.raises(openai.BadRequestError) as caught:
            await create(client, extra_body={"priority": 17})
        return [(request.group, request.priority) for request in engine.requests], caught.value.param

    assert talk(lambda _: say("x"), body) == ([("", 0), ("g", -2), ("s", 0), ("h", 0)], "priority")


def test_models_health_and_unknown_paths():
    async def body(client, engine):
        listed = [model.id async for model in client.models.list()]
        one = await client.models.retrieve("run-7")
        with pytest.raises(openai.NotFoundError, match="served: small, run-7"):
            await create(client, model="gpt-9")
        async with httpx.AsyncClient(base_url=str(client.base_url)) as plain:
            health = (await plain.get("../health")).json()
            lost = await plain.get("nowhere")
            wrong = await plain.get("chat/completions")
        return listed, one.id, health, lost, wrong

    listed, one, health, lost, wrong = talk(lambda _: say("x"), body)
    assert listed == ["small", "run-7"] and one == "run-7"
    assert health == {"status": "ok", "running": 0, "waiting": 0, "weight_version": 3}
    assert lost.status_code == 404 and wrong.status_code == 405 and "error" in wrong.json()


def test_mistakes_are_400_and_name_the_field_in_both_modes():
    async def body(client, engine):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                await create(client, temperature=-1, stream=stream)
            assert caught.value.param == "temperature"
            with pytest.raises(openai.BadRequestError) as caught:
                await create(client, messages=[{"role": "user", "content": "x" * 3000}], stream=stream)
            assert caught.value.code == "context_length_exceeded"
            with pytest.raises(openai.BadRequestError) as caught:
                await create(client, max_tokens=100_000, stream=stream)
            assert "100000" in str(caught.value)
            two = {**TOOL, "function": {"name": "two", "parameters": {"type": "object", "properties": {}}}}
            with pytest.raises(openai.BadRequestError, match="tool format"):
                await create(client, tools=[two], stream=stream)
        return len(engine.requests)

    assert talk(lambda _: say("x"), body) == 0


def test_an_engine_that_finds_the_prompt_too_long_is_a_400_in_both_modes():
    async def body(client, engine):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError):
                await create(client, messages=[{"role": "user", "content": "x" * 5000}], stream=stream)

    talk(lambda _: say("x"), body, max_context_tokens=8000)


def test_an_error_of_the_engine_is_503_before_and_an_error_event_in_the_middle_of_a_stream():
    from tandem.core.errors import EngineError

    def broken(request: GenerateRequest):
        yield from say("A", end=False)
        raise EngineError("the engine failed")

    async def body(client, engine):
        with pytest.raises(openai.InternalServerError, match="the engine failed") as caught:
            await create(client)
        assert caught.value.status_code == 503
        with pytest.raises(openai.APIError, match="the engine failed"):
            await joined(await create(client, stream=True))

    talk(broken, body)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_requests(stream):
    async def body(client, engine):
        async with httpx.AsyncClient(base_url=str(client.base_url), timeout=20) as plain:
            fields = {"model": "small", "messages": [USER], "n": 2, "stream": stream}
            going = asyncio.ensure_future(plain.post("chat/completions", json=fields))
            while len(engine.running) < 2:
                await asyncio.sleep(0.01)
            going.cancel()
            await asyncio.wait([going])
            async with asyncio.timeout(30):
                while engine.running:
                    await asyncio.sleep(0.01)
        return engine.cancelled

    assert len(talk(lambda _: say("A" * 1500), body, step_s=0.02)) == 2


def test_keys_let_in_and_a_full_queue_says_come_again():
    async def body(client, engine):
        with pytest.raises(openai.AuthenticationError):
            await create(client)
        with pytest.raises(openai.AuthenticationError):
            [model async for model in client.models.list()]
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="key two", max_retries=0) as known:
            reply = await create(known)
            async with httpx.AsyncClient(base_url=str(client.base_url)) as plain:
                open_to_all = [(await plain.get(path)).status_code for path in ("../health", "../metrics")]
            engine.num_waiting = 4
            with pytest.raises(openai.RateLimitError) as full:
                await create(known)
        return reply.choices[0].message.content, open_to_all, full.value.response.headers["retry-after"]

    assert talk(lambda _: say("in"), body, keys=("key one", "key two"), max_waiting=4) == ("in", [200, 200], "1")


def test_metrics_are_the_engines_counters():
    async def body(client, engine):
        async with httpx.AsyncClient(base_url=str(client.base_url)) as plain:
            return (await plain.get("../metrics")).text

    assert "tandem_engine_version 3" in talk(lambda _: say("x"), body).splitlines()


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(monkeypatch):
    async def body(client, engine):
        monkeypatch.setattr(renderer().tokenizer, "encode", None)
        monkeypatch.setattr(renderer(), "prompt", None)
        with pytest.raises(openai.BadRequestError, match="characters") as chat:
            await create(client, messages=[{"role": "user", "content": "x" * 1_000_000}])
        with pytest.raises(openai.BadRequestError, match="characters"):
            await client.completions.create(model="small", prompt="x" * 1_000_000)
        return chat.value.code

    assert talk(lambda _: say("x"), body) == "context_length_exceeded"


def test_a_client_that_leaves_in_its_body_is_no_error_of_the_server(caplog):
    async def body(client, engine):
        url = client.base_url
        for _ in range(5):
            _, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n{half")
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        await asyncio.sleep(0.2)
        return (await create(client)).choices[0].message.content

    assert talk(lambda _: say("still here"), body) == "still here"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", {"messages": [USER], "tools": [{"type": "function", "function": {"name": "add"}}]},
         "tools"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "?!" * 3000}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 100_000}]}, "messages"),
        ("/v1/completions", {"prompt": "?!" * 3000}, "prompt"),
        ("/v1/completions", {"prompt": "word " * 100_000}, "prompt"),
    ],
)  # fmt: skip
def test_what_the_model_cannot_read_is_refused_by_the_name_of_its_field(path, body, field):
    async def run():
        async with serving(served(ScriptedEngine(lambda _: say("x")))) as address, httpx.AsyncClient() as client:
            reply = await client.post(f"{address}{path}", json={"model": "small", **body})
            return reply.status_code, reply.json()["error"]

    status, error = asyncio.run(run())
    assert (status, error["param"]) == (400, field) and error["message"].startswith(f"{field}: ")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted({*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__, "unknown"})
PATHS = ("/v1/chat/completions", "/v1/completions", "/sessions/s/v1/branches")


def mutated(draw) -> tuple[str, bytes]:
    """A good body with some fields made anything at all, or bytes that are no body."""
    path = draw(st.sampled_from(PATHS))
    body: dict[str, object] = {"model": "small", "max_tokens": 2}
    body |= {"prompt": "hi"} if path == "/v1/completions" else {"messages": [USER]}
    if draw(st.booleans()):
        body |= {"tools": [TOOL]}
    for field in draw(st.lists(st.sampled_from(FIELDS), max_size=3)):
        body[field] = draw(VALUES)
    if draw(st.booleans()) and "messages" in body:
        body["messages"] = [{"role": draw(st.sampled_from(["user", "tool", "assistant", "x"])), "content": draw(VALUES),
                             "tool_calls": draw(st.none() | VALUES)}]  # fmt: skip
    data = json.dumps(body).encode()
    match draw(st.sampled_from(["whole", "whole", "whole", "cut", "bytes", "repeated"])):
        case "cut":
            data = data[: draw(st.integers(0, len(data) - 1))]
        case "bytes":
            place = draw(st.integers(0, len(data)))
            data = data[:place] + draw(st.binary(min_size=1, max_size=4)) + data[place:]
        case "repeated":
            data = b"[" * draw(st.integers(1, 5000)) + data
    return path, data


def test_no_body_whatever_it_holds_is_an_error_of_the_server():
    async def run(cases):
        engine = ScriptedEngine(lambda request: say("fine"))
        async with serving(served(engine)) as address, httpx.AsyncClient(timeout=20) as client:
            for path, data in cases:
                reply = await client.post(f"{address}{path}", content=data)
                assert reply.status_code == 200 or 400 <= reply.status_code < 500, (path, data, reply.text)
                if reply.status_code >= 400:
                    error = reply.json()["error"]
                    assert error["message"] and (error["param"] or "") in error["message"], reply.text

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data):
        asyncio.run(asyncio.wait_for(run([mutated(data.draw) for _ in range(5)]), 240))

    check()


@pytest.mark.parametrize(
    ("data", "status", "said"),
    [
        (b'{"model": "small", "messages": [{"role": "user", "content": "\xff\xfe"}]}', 400, "not JSON"),
        (b'{"model": "small", "messages": [{"role": "user", "content": "' + b"a" * (10 << 20) + b'"}]}', 400, "tokens"),
        (b"", 400, "not JSON"),
        (b'{"model": "small", "messages": []}', 400, "messages"),
        (b'{"model": "small", "messages": [{"role": "user", "content": "a"}], "max_tokens": -1}', 400, "max_tokens"),
        (b'{"model": "gpt", "messages": [{"role": "user", "content": "a"}]}', 404, "model"),
        (b'{"model": "small", "messages": [{"role": "user", "content": "a"}], "guided_json": {"type": "wrong"}}', 400,
         "guided_json"),
        (b'{"model": "small", "messages": [{"role": "user", "content": "a"}], "response_format": {"type": '
         b'"json_schema", "json_schema": {"name": "a", "schema": {"type": 7}}}}', 400, "response_format"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_a_4xx_that_names_it(data, status, said, stream):
    async def body(client, engine):
        given = data.replace(b'{"model"', b'{"stream": true, "model"', 1) if stream else data
        async with httpx.AsyncClient(timeout=20) as plain:
            return await plain.post(f"{client.base_url}chat/completions", content=given)

    reply = talk(lambda request: say("fine"), body)
    assert reply.status_code == status and said in reply.json()["error"]["message"], reply.text
