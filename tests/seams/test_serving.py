"""The chat server over the real inference engine: what the two promise each other."""

import asyncio
import contextlib
import json
import random
import re

import httpx
import openai
import pytest
import torch

from tandem.config.sections.engine import EngineSection, InferSection
from tandem.engine.compute import ComputeQueue
from tandem.engine.infer.loop import InferEngine
from tandem.engine.weights import PublishedWeights
from tandem.models.builtin import resolve_model
from tandem.models.loader import load_model, read_spec
from tandem.serve.generation import Served
from tandem.serve.openai import make_app
from tandem.serve.server import serve_forever
from tandem.text.render import Renderer
from tandem.text.tokenizer import load_tokenizer

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object",
        "properties": {"where": {"type": "string"}}, "required": ["where"]}}}  # fmt: skip
USER = {"role": "user", "content": "Count to five."}


@contextlib.asynccontextmanager
async def tiny_server(tool_format="auto", context=512, keys=(), **infer):
    """The ``tiny`` model behind a server; yields its address and engine."""
    folder = resolve_model("tiny")
    model = load_model(folder, dtype=torch.float32, device="cpu", numerics="exact")
    compute = ComputeQueue()
    section = EngineSection(infer=InferSection(**{"kv_tokens": 4096, "max_num_seqs": 16, "block_size": 4} | infer))
    engine = InferEngine(model, PublishedWeights(model), section, compute, max_context_tokens=context,
                         eos_ids=read_spec(folder).eos_ids)  # fmt: skip
    served = Served(engine=engine, renderer=Renderer(load_tokenizer(folder), tool_format), names=("tiny",),
                    max_context_tokens=context, keys=keys)  # fmt: skip
    ready = asyncio.get_running_loop().create_future()
    server = asyncio.ensure_future(serve_forever(make_app(served), host="127.0.0.1", port=0, on_ready=ready.set_result))
    try:
        yield await asyncio.wait_for(ready, 30), engine
    finally:
        server.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait_for(server, 30)
        await engine.close()
        compute.close()


def test_streams_seeds_and_log_probabilities():
    async def body():
        async with tiny_server() as (address, engine):
            client = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
            fields = {"model": "tiny", "messages": [USER], "max_tokens": 24, "seed": 5, "logprobs": True,
                      "extra_body": {"return_token_ids": True}}  # fmt: skip
            alone = await client.chat.completions.create(**fields)
            others = [client.chat.completions.create(**fields | {"seed": seed, "n": 2}) for seed in range(6)]
            crowded, *_ = await asyncio.gather(client.chat.completions.create(**fields), *others)
            streamed = ""
            async for chunk in await client.chat.completions.create(**fields, stream=True):
                streamed += chunk.choices[0].delta.content or ""
            await client.close()
            return alone, crowded, streamed, engine.stats()

    alone, crowded, streamed, stats = asyncio.run(asyncio.wait_for(body(), 240))
    first, second = alone.choices[0], crowded.choices[0]
    assert first.token_ids == second.token_ids and first.message.content == second.message.content == streamed
    assert [each.logprob for each in first.logprobs.content] == [each.logprob for each in second.logprobs.content]
    assert crowded.usage.prompt_tokens_details.cached_tokens > 0
    assert stats.num_running == stats.num_waiting == stats.blocks_in_use == 0


def test_branches_are_forks_that_compute_their_own_tokens_only():
    async def body():
        async with tiny_server() as (address, engine), httpx.AsyncClient(timeout=30, base_url=address) as client:
            first = {"model": "tiny", "messages": [USER], "max_tokens": 40, "seed": 3}
            said = (await client.post("/sessions/s/v1/chat/completions", json=first)).json()
            history = [USER, said["choices"][0]["message"], {"role": "user", "content": "And then?"}]
            asked = {"model": "tiny", "messages": history, "max_tokens": 10, "seed": 5, "return_token_ids": True}
            before = engine.stats().computed_tokens
            forked = (await client.post("/sessions/s/v1/branches", json=asked | {"n": 4})).json()
            computed = engine.stats().computed_tokens - before
            session = (await client.get("/sessions/s/")).json()
            prompt = {"model": "tiny", "prompt": forked["prompt_token_ids"], "max_tokens": 10, "return_token_ids": True}
            # The first branch alone, on an engine that has everything: seeds are those of a request with n choices.
            again = (await client.post("/v1/completions", json=prompt | {"seed": 5, "n": 4})).json()
            return forked, again, session["turns"], computed

    forked, again, turns, computed = asyncio.run(asyncio.wait_for(body(), 240))
    length, trunk = forked["usage"]["prompt_tokens"], len(turns[0]["prompt_token_ids"]) + len(turns[0]["token_ids"])
    first, *others = forked["usage"]["prompt_tokens_details"]["branches_cached_tokens"]
    assert first == trunk - 1 and others == [length - 1] * 3  # the last token of an answer was never computed
    answers = [choice["token_ids"] for choice in forked["choices"]]
    assert computed == length - first + 3 + sum(len(answer) - 1 for answer in answers)
    assert answers == [choice["token_ids"] for choice in again["choices"]]
    assert [turn["parent"] for turn in turns] == [-1, 0, 0, 0, 0]


def test_an_answer_that_is_given_up_for_new_weights_goes_on_under_them():
    async def body():
        async with tiny_server(at_publish="abort") as (address, engine):
            client = openai.AsyncOpenAI(base_url=f"{address}/sessions/s/v1", api_key="none", max_retries=0)
            weights, words, published = engine._weights, "", False
            guided = {"guided_regex": "[a-z ]{200}"}
            asked = {"model": "tiny", "messages": [USER], "max_tokens": 60, "seed": 3, "extra_body": guided}
            async for chunk in await client.chat.completions.create(**asked, stream=True):
                words += chunk.choices[0].delta.content or ""
                if words and not published:
                    published = await engine._compute.run("train", lambda: weights.bump(1)) is not None
            async with httpx.AsyncClient(base_url=address) as plain:
                (turn,) = (await plain.get("/sessions/s/")).json()["turns"]
            await client.close()
            return words, turn

    words, turn = asyncio.run(asyncio.wait_for(body(), 240))
    assert set(turn["weight_versions"]) == {0, 1} and turn["weight_versions"] == sorted(turn["weight_versions"])
    assert len(turn["token_ids"]) == len(turn["logprobs"]) == len(turn["weight_versions"]) == 60
    assert words == turn["content"] and re.fullmatch("[a-z ]+", words)


def test_a_key_with_many_requests_leaves_another_its_share():
    async def body():
        async with tiny_server(keys=("many", "one"), max_num_seqs=2) as (address, engine):
            ended = []
            plain = httpx.AsyncClient(timeout=30)
            clients = {
                key: openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, http_client=plain)
                for key in ("many", "one")
            }

            async def ask(key, name, **fields):
                await clients[key].completions.create(model="tiny", prompt=[5, 6, 7], **fields)
                ended.append(name)

            crowd = [asyncio.ensure_future(ask("many", "many", max_tokens=100, seed=n)) for n in range(16)]
            while engine.stats().num_running + engine.stats().num_waiting < 12:
                await asyncio.sleep(0.001)
            await ask("one", "one", max_tokens=2)
            before = len(ended)
            await asyncio.gather(*crowd)
            with pytest.raises(openai.BadRequestError) as group:
                await ask("one", "x", extra_body={"group": "mine"})
            with pytest.raises(openai.BadRequestError) as priority:
                await ask("one", "x", extra_body={"priority": 3})
            await plain.aclose()
            return before, group.value.param, priority.value.param

    before, *fields = asyncio.run(asyncio.wait_for(body(), 240))
    assert before <= 12 and fields == ["group", "priority"]  # in one line it would have been behind all sixteen


def test_later_requests_of_higher_priority_overtake_those_that_wait_and_groups_of_one_priority_share():
    async def body():
        async with tiny_server(max_num_seqs=1) as (address, engine):
            client = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
            ended = []

            async def ask(group, priority, num_tokens=4):
                own = {"group": group, "priority": priority}
                fields = {"prompt": [5, 6, 7], "max_tokens": num_tokens, "extra_body": own}
                await client.completions.create(model="tiny", **fields)
                ended.append((group, priority))

            async def waiting(count):
                while engine.stats().num_waiting < count:
                    await asyncio.sleep(0.001)

            asked = [asyncio.ensure_future(ask("first", 0, 300))]
            while not engine.stats().num_running:
                await asyncio.sleep(0.001)
            asked += [asyncio.ensure_future(ask(group, 0)) for group in "aaaaaaaabbbbbbbb"]
            await waiting(16)
            asked += [asyncio.ensure_future(ask("a", 6)) for _ in range(4)]
            await waiting(20)
            await asyncio.gather(*asked)
            await client.close()
            return ended

    ended = asyncio.run(asyncio.wait_for(body(), 240))
    assert ended.pop(0) == ("first", 0) and len(ended) == 20
    late = [place for place, (_, priority) in enumerate(ended) if priority]
    assert late[-1] <= 6 and late[-1] - late[0] == 3  # once it is their turn they go on, all before most that wait
    plain = [group for group, priority in ended if not priority]
    assert all(abs(plain[:count].count("a") - plain[:count].count("b")) <= 1 for count in range(17))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_blocks(stream):
    async def body():
        async with tiny_server() as (address, engine), httpx.AsyncClient(timeout=30) as client:
            fields = {"model": "tiny", "messages": [USER], "max_tokens": 400, "n": 4, "stream": stream}
            going = asyncio.ensure_future(client.post(f"{address}/v1/chat/completions", json=fields))
            while not engine.stats().num_running:
                await asyncio.sleep(0.01)
            going.cancel()
            await asyncio.wait([going])
            async with asyncio.timeout(30):
                while engine.stats().num_running or engine.stats().blocks_in_use:
                    await asyncio.sleep(0.01)
            return engine.stats().generated_tokens

    assert asyncio.run(asyncio.wait_for(body(), 240)) < 1600


SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}


def test_a_random_model_follows_a_schema_and_scores_what_it_said():
    async def body():
        async with tiny_server() as (address, _):
            client = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
            wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
            fields = {"model": "tiny", "messages": [USER], "max_tokens": 120, "seed": 3}
            guided = [await client.chat.completions.create(**fields | {"seed": seed}, response_format=wanted)
                      for seed in range(3)]  # fmt: skip
            worded = await client.chat.completions.create(**fields, extra_body={"guided_regex": "(yes|no)!"})
            with pytest.raises(openai.BadRequestError) as broken:
                await client.chat.completions.create(**fields, extra_body={"guided_regex": "("})
            plain = {"model": "tiny", "prompt": "one two three", "max_tokens": 6, "seed": 1, "logprobs": 2}
            said = (await client.completions.create(**plain, extra_body={"return_token_ids": True})).choices[0]
            again = await client.completions.create(
                model="tiny", prompt=[*said.prompt_token_ids, *said.token_ids], echo=True, max_tokens=0, logprobs=1
            )
            await client.close()
            return guided, worded, broken.value, said, again

    guided, worded, broken, said, again = asyncio.run(asyncio.wait_for(body(), 240))
    for reply in guided:
        found = json.loads(reply.choices[0].message.content)
        assert found["colour"] in ("red", "green") and 0 <= found["count"] <= 99
        assert reply.choices[0].finish_reason == "stop"
    assert worded.choices[0].message.content in ("yes!", "no!")
    assert broken.param == "guided_regex"
    scored = again.choices[0].logprobs
    count = len(said.token_ids)
    # The score of a text equals, to the bit, what was reported when it was sampled.
    assert scored.token_logprobs[0] is None and scored.token_logprobs[-count:] == said.logprobs.token_logprobs
    assert again.usage.completion_tokens == 0 and len(scored.tokens) == again.usage.prompt_tokens
    assert scored.top_logprobs[0] is None and all(len(top) == 1 for top in scored.top_logprobs[1:])
    assert all(1 <= len(top) <= 2 for top in said.logprobs.top_logprobs)


def mixed(number: int) -> tuple[str, dict]:
    """Path and body of one of many requests that differ in everything a request can differ in."""
    draw = random.Random(number)
    words = " ".join(draw.choices(["count", "red", "why", "7", "box", "and"], k=draw.randint(1, 60)))
    fields = {"model": "tiny", "seed": number, "max_tokens": draw.randint(1, 16), "n": draw.choice([1, 1, 1, 1, 2, 3]),
              "temperature": draw.choice([0, 0.6, 1, 1, 1.4]), "stream": bool(number % 2),
              "return_token_ids": True}  # fmt: skip
    fields |= draw.choice([{}, {}, {"top_p": 0.7}, {"top_k": 9}, {"min_p": 0.05}, {"frequency_penalty": 0.5},
                           {"repetition_penalty": 1.2}, {"logit_bias": {"11": 4}}])  # fmt: skip
    if draw.random() < 0.25:
        fields["stop"] = draw.choice([["a"], ["e ", "th"], ["\n"]])
    if fields["stream"]:
        fields["stream_options"] = {"include_usage": True}
    if draw.random() < 0.3:
        return "/v1/completions", fields | {"prompt": words} | draw.choice([{}, {"logprobs": 2}])
    if draw.random() < 0.2:
        fields["tools"] = [TOOL]
    elif draw.random() < 0.1:
        fields["guided_regex"] = "(yes|no)!"
    system = [{"role": "system", "content": "Say little."}] if draw.random() < 0.5 else []
    chat = {"messages": [*system, {"role": "user", "content": words}]}
    return "/v1/chat/completions", fields | chat | draw.choice([{}, {"logprobs": True, "top_logprobs": 3}])


def joined(chunks: list[dict]) -> dict:
    """What the chunks of a stream say together, whatever their borders."""
    choices: dict[int, dict] = {}
    usage = None
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for part in chunk["choices"]:
            said = choices.setdefault(part["index"], {"text": "", "rest": []})
            delta = part.get("delta") or {}
            said["text"] += part.get("text") or delta.get("content") or ""
            said["rest"] += [
                (key, value)
                for key, value in sorted({**part, **delta}.items())
                if value is not None and key not in ("index", "delta", "text", "content", "role")
            ]
    return {"choices": [choices[index] for index in sorted(choices)], "usage": usage}


async def answer_of(client: httpx.AsyncClient, path: str, body: dict) -> dict:
    """The reply without what may differ between two equal ones: its name, its time, what was cached."""
    if body["stream"]:
        chunks = []
        async with client.stream("POST", path, json=body) as reply:
            assert reply.status_code == 200, await reply.aread()
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    chunks.append(json.loads(line.removeprefix("data: ")))
        found = joined(chunks)
    else:
        reply = await client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        found = {"choices": reply.json()["choices"], "usage": reply.json()["usage"]}
    assert found["usage"].pop("prompt_tokens_details")["cached_tokens"] >= 0
    for place in _dicts(found["choices"]):  # a tool call gets a name of its own
        if place.get("type") == "function" and "id" in place:
            place["id"] = ""
    return found


def _dicts(value):
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _dicts(each)


def test_mixed_requests_at_once_get_their_serial_answers():
    """150 requests at once, every fifth of which goes away, three times: nothing of that shows in an answer."""

    async def body():
        requests = [mixed(number) for number in range(150)]
        going = set(range(3, 150, 5))
        async with tiny_server() as (address, engine):
            limits = httpx.Limits(max_connections=200, max_keepalive_connections=200)
            async with httpx.AsyncClient(base_url=address, timeout=300, limits=limits) as client:
                alone = [
                    None if number in going else await answer_of(client, path, body)
                    for number, (path, body) in enumerate(requests)
                ]
                for turn in range(3):
                    tasks = []
                    for number, (path, body) in enumerate(requests):
                        asked = body | {"max_tokens": 300} if number in going else body
                        tasks.append(asyncio.ensure_future(answer_of(client, path, asked)))
                    draw = random.Random(turn)
                    for number in going:
                        asyncio.get_running_loop().call_later(draw.uniform(0, 0.5), tasks[number].cancel)
                    together = await asyncio.gather(*tasks, return_exceptions=True)
                    for number, (one, other) in enumerate(zip(alone, together, strict=True)):
                        if number not in going:
                            assert one == other, (number, requests[number])
                        else:
                            assert isinstance(other, (dict, asyncio.CancelledError)), other
                    async with asyncio.timeout(30):
                        while (stats := engine.stats()).num_running or stats.num_waiting or stats.blocks_in_use:
                            await asyncio.sleep(0.01)
            return stats

    stats = asyncio.run(asyncio.wait_for(body(), 240))
    assert stats.blocks_in_use == 0 and stats.cached_tokens > 0


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
@pytest.mark.parametrize("tool_format", ["hermes", "llama", "gemma", "pythonic"])
def test_a_random_model_calls_the_tool_that_it_must_call_streamed_or_not(choice, tool_format):
    def tool(name, properties):
        parameters = {"type": "object", "properties": properties, "required": list(properties),
                      "additionalProperties": False}  # fmt: skip
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    tools = [tool("look", {"where": {"enum": ["here", "there"]}}), tool("add", {"a": {"enum": [1, 2]}})]

    async def body():
        async with tiny_server(tool_format, context=1024) as (address, _):
            client = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
            fields = {"model": "tiny", "messages": [USER], "max_tokens": 100, "tools": tools, "tool_choice": choice,
                      "parallel_tool_calls": False}  # fmt: skip
            whole = [await client.chat.completions.create(**fields, seed=seed) for seed in range(4)]
            streamed = []
            async for chunk in await client.chat.completions.create(**fields, seed=0, stream=True):
                assert not chunk.choices[0].delta.content
                streamed += chunk.choices[0].delta.tool_calls or []
            await client.close()
            return whole, streamed

    whole, streamed = asyncio.run(asyncio.wait_for(body(), 240))
    for made in whole:
        (call,) = made.choices[0].message.tool_calls
        assert made.choices[0].finish_reason == "tool_calls" and not made.choices[0].message.content
        arguments = json.loads(call.function.arguments)
        wanted = {"look": ("where", ["here", "there"]), "add": ("a", [1, 2])}[call.function.name]
        assert arguments[wanted[0]] in wanted[1] and (choice == "required" or call.function.name == "add")
    first = whole[0].choices[0].message.tool_calls[0].function
    assert [call.function.name for call in streamed] == [first.name] + [None] * (len(streamed) - 1)
    assert "".join(call.function.arguments for call in streamed) == first.arguments
    # a Python-like call becomes JSON where an argument ends, and this one has one argument
    assert len(streamed) >= (2 if tool_format in ("gemma", "pythonic") else 3)
