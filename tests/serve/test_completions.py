"""Text completions as the official client sees them."""

from __future__ import annotations

import json

import openai
import pytest
from serve_pieces import renderer, say
from test_openai import talk

from tandem.serve.completions import read_completion
from tandem.serve.requests import BadRequest


def complete(client, **fields):
    return client.completions.create(**{"model": "small", "prompt": "hi", **fields})


def request(**fields):
    return read_completion(json.dumps({"model": "m", "prompt": "hi", **fields}).encode(), vocabulary=300)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, 2, 300]}, "prompt"),
        ({"prompt": [1, -2]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": ["x", 5]}, "prompt[1]"),
        ({"prompt": ["x", [True]]}, "prompt[1]"),
        ({"prompt": 7}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logit_bias": {"-5": 1}}, "logit_bias"),
        ({"promt": "x"}, "promt"),
    ],
)
def test_a_mistake_is_named(fields, param):
    with pytest.raises(BadRequest) as caught:
        request(**fields)
    assert caught.value.param == param and caught.value.status == 400


def test_prompts_are_texts_or_ids_and_choices_are_in_their_order():
    async def body(client, engine):
        reply = await complete(client, prompt=["one", "two"], n=2, max_tokens=40, extra_body={"return_token_ids": True})
        by_ids = await complete(client, prompt=[[5, 6], [7]], max_tokens=3)
        return reply, by_ids, engine.requests

    reply, by_ids, requests = talk(lambda request: say(f"to {len(request.prompt_ids)}"), body)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    prompts = [list(renderer().tokenizer.encode(text)) for text in ("one", "two")]
    assert [choice.prompt_token_ids for choice in reply.choices] == [prompts[0]] * 2 + [prompts[1]] * 2
    assert reply.usage.prompt_tokens == sum(map(len, prompts)) and reply.usage.completion_tokens == 4 * len(say("to 3"))
    assert [list(request.prompt_ids) for request in requests[4:]] == [[5, 6], [7]]
    assert [choice.finish_reason for choice in by_ids.choices] == ["length", "length"]


def test_streamed_and_whole_agree_with_echo_stop_and_logprobs():
    async def body(client, engine):
        for fields in ({}, {"echo": True}, {"stop": "DE", "logprobs": 0}, {"max_tokens": 2}):
            whole = await complete(client, **{"max_tokens": 20, **fields})
            text, reason, tokens = "", None, []
            async for chunk in await complete(client, stream=True, **{"max_tokens": 20, **fields}):
                for choice in chunk.choices:
                    text += choice.text
                    reason = choice.finish_reason or reason
                    tokens += choice.logprobs.tokens if choice.logprobs else []
            assert (text, reason) == (whole.choices[0].text, whole.choices[0].finish_reason)
            assert tokens == (whole.choices[0].logprobs.tokens if whole.choices[0].logprobs else [])
            seen.append((fields, text, reason, whole.choices[0].logprobs))

    seen: list = []
    talk(lambda _: say("ABCDEFG"), body)
    assert [(text, reason) for _, text, reason, _ in seen] == [
        ("ABCDEFG", "stop"), ("hiABCDEFG", "stop"), ("ABC", "stop"), ("ABCD", "length"),
    ]  # fmt: skip
    logprobs = seen[2][3]
    assert logprobs.tokens == ["AB", "CD", "EF"] and logprobs.token_logprobs == [-0.25, -0.5, -0.75]
    assert logprobs.text_offset == [0, 2, 4]


def test_a_prompt_that_does_not_fit_is_a_400():
    async def body(client, engine):
        with pytest.raises(openai.BadRequestError):
            await complete(client, prompt=["x", "x" * 3000])
        return engine.requests

    assert talk(lambda _: say("x"), body) == []
