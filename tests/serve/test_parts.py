"""Log-probabilities in streams: each chunk brings those of the tokens whose text it completes, and all chunks together
what the unstreamed answer has, in both schemas."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serve_pieces import ScriptedEngine, say, served, serving

from tandem.core.types import Sampled, floats, ids
from tandem.serve.parts import Telling

USER = {"role": "user", "content": "hi"}
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
TOOL = {"type": "function", "function": {"name": "python", "parameters": {
    "type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}}}  # fmt: skip


async def both(address, path, body):
    """The unstreamed choices and the chunks of each choice."""
    async with httpx.AsyncClient(base_url=address, timeout=20) as client:
        whole = await client.post(path, json=body)
        assert whole.status_code == 200, whole.text
        chunks = []
        async with client.stream("POST", path, json=body | {"stream": True}) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    chunks.append(json.loads(line.removeprefix("data: ")))
    choices = {choice["index"]: [] for choice in whole.json()["choices"]}
    for chunk in chunks:
        for choice in chunk["choices"]:
            choices[choice["index"]].append(choice)
    return whole.json(), chunks, choices


def compare(path, body, text, *, at_once=1, **options):
    """Ask both ways; returns the unstreamed reply and the chunks of each choice, after comparing them."""

    async def run():
        engine = ScriptedEngine(lambda request: say(text(request)), at_once=at_once)
        async with serving(served(engine, **options)) as address:
            return await asyncio.wait_for(both(address, path, {"model": "small", "seed": 1, **body}), 30)

    whole, chunks, choices = asyncio.run(run())
    for choice in whole["choices"]:
        told = choices[choice["index"]]
        if path == "/v1/completions":
            assert "".join(each["text"] for each in told) == choice["text"]
            joined = {name: None for name in LISTS}
            for each in told:
                for name, values in each["logprobs"].items():
                    joined[name] = values if joined[name] is None or values is None else joined[name] + values
            assert joined == choice["logprobs"]
        else:
            content = [each["delta"].get("content") or "" for each in told]
            assert "".join(content) == (choice["message"]["content"] or "")
            entries = [entry for each in told for entry in each["logprobs"]["content"]]
            assert entries == choice["logprobs"]["content"]
        assert [token for each in told for token in each["token_ids"]] == choice["token_ids"]
        assert [each["finish_reason"] for each in told if each["finish_reason"]] == [choice["finish_reason"]]
    return whole, chunks, choices


PATHS = {
    "/v1/chat/completions": {"messages": [USER], "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
    "/v1/completions": {"prompt": "hé ABC", "logprobs": 2, "return_token_ids": True},
}
WORDS = ["A", "AB", "ABCD", "DE", "é", "€", "🙂", " ", "\n", "x", "<|im_end|>"]


@pytest.mark.parametrize("path", PATHS)
def test_the_parts_of_a_stream_are_the_whole_whatever_cuts_it(path):
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.lists(st.sampled_from(WORDS), max_size=8).map("".join),
        st.lists(st.sampled_from(["DE", "BC", "€x", "🙂", "A\n", "é"]), max_size=2),
        st.integers(1, 14),
        st.integers(1, 3),
        st.sampled_from([1, 1, 2, 3]),
        st.booleans(),
    )
    def check(text, stop, limit, count, at_once, echo):
        body = PATHS[path] | {"max_tokens": limit, "n": count} | ({"stop": stop} if stop else {})
        if path == "/v1/completions":
            body |= {"echo": echo}
        compare(path, body, lambda request: f"{text}{request.seed % 3}", at_once=at_once)

    check()


@pytest.mark.parametrize("stop", [None, "DE", "FGH", "€!"])
@pytest.mark.parametrize("limit", [1, 2, 3, 5, 9, 20])
def test_a_chunk_has_exactly_the_tokens_whose_text_it_completes(stop, limit):
    body = PATHS["/v1/completions"] | {"max_tokens": limit} | ({"stop": stop} if stop else {})
    whole, _, choices = compare("/v1/completions", body, lambda _: "ABCDé€🙂 xEFGH")
    begins = [*whole["choices"][0]["logprobs"]["text_offset"], 10**6]
    ends = [next(other for other in begins[place:] if other > begin) for place, begin in enumerate(begins[:-1])]
    text = told = 0
    for chunk in choices[0][:-1]:
        text, told = text + len(chunk["text"]), told + len(chunk["token_ids"])
        assert told == sum(end <= text for end in ends) or text == len(whole["choices"][0]["text"])
        assert told >= sum(end <= text for end in ends)
    assert choices[0][-1]["finish_reason"]


def test_offsets_count_characters_also_where_tokens_split_one_and_bytes_are_the_tokens_own():
    whole, *_ = compare("/v1/completions", PATHS["/v1/completions"] | {"max_tokens": 20, "echo": True}, lambda _: "é€A")
    (choice,) = whole["choices"]
    start = len("hé ABC")
    assert choice["text"] == "hé ABCé€A"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 3, 5, *(start + place for place in (0, 0, 1, 1, 1, 2, 3))]
    assert choice["logprobs"]["token_logprobs"][:3] == [None, -0.125, -0.25]
    chat, *_ = compare("/v1/chat/completions", PATHS["/v1/chat/completions"] | {"max_tokens": 20}, lambda _: "é€A")
    entries = chat["choices"][0]["logprobs"]["content"]
    spelled = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert spelled == "é€A<|im_end|>".encode() and [len(entry["bytes"]) for entry in entries[:5]] == [1] * 5


def test_an_echo_comes_first_with_the_scores_of_its_tokens_and_ids_of_the_prompt_come_once():
    body = PATHS["/v1/completions"] | {"prompt": ["AB", "x"], "max_tokens": 2, "n": 2, "echo": True}
    whole, _, choices = compare("/v1/completions", body, lambda _: "yes")
    for index, prompt in ((0, "AB"), (1, "AB"), (2, "x"), (3, "x")):
        first, *others = choices[index]
        assert first["text"] == prompt and first["logprobs"]["token_logprobs"][0] is None
        assert first["prompt_token_ids"] == whole["choices"][index]["prompt_token_ids"] == say(prompt, end=False)
        assert not any("prompt_token_ids" in other for other in others) and first["token_ids"] == []
    _, chunks, _ = compare("/v1/chat/completions", PATHS["/v1/chat/completions"] | {"n": 2}, lambda _: "yes")
    assert ["prompt_token_ids" in chunk for chunk in chunks] == [True] + [False] * (len(chunks) - 1)


def test_an_echo_that_makes_nothing_is_scored_in_a_stream_too():
    body = PATHS["/v1/completions"] | {"max_tokens": 0, "echo": True}
    whole, _, choices = compare("/v1/completions", body, lambda _: "nobody's")
    assert whole["choices"][0]["text"] == "hé ABC" and len(choices[0]) == 2
    assert whole["choices"][0]["token_ids"] == [] and whole["usage"]["completion_tokens"] == 0


def test_thoughts_and_calls_have_their_tokens_as_words_do():
    text = "<think>\nhm é\n</think>\n\nSee:\n```python\n1+1\n```"
    body = PATHS["/v1/chat/completions"] | {"tools": [TOOL]}
    _, chunks, choices = compare("/v1/chat/completions", body, lambda _: text, reasoning="<think> </think>")
    thoughts = [each for each in choices[0] if each["delta"].get("reasoning_content")]
    spelled = b"".join(bytes(entry["bytes"]) for each in thoughts for entry in each["logprobs"]["content"])
    assert spelled.decode() == "<think>\nhm é"
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"


def test_nothing_is_told_twice_nor_before_it_was_heard():
    telling = Telling()
    places = list(range(9))
    telling.hear(Sampled(token_ids=ids([4, 5]), logprobs=floats([-1, -2])))
    assert telling.part(1, places).token_ids.tolist() == [4]
    assert telling.part(0, places).token_ids.tolist() == telling.part(1, places).token_ids.tolist() == []
    telling.hear(Sampled(token_ids=ids([6]), logprobs=floats([-3])))
    rest = telling.part(3, places)
    assert (rest.token_ids.tolist(), list(rest.logprobs), list(rest.places)) == ([5, 6], [-2, -3], [1, 2])
