"""The chat server over the real inference engine: what the two promise each other."""

import asyncio
import contextlib
import json

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

USER = {"role": "user", "content": "Count to five."}


@contextlib.asynccontextmanager
async def tiny_server():
    """The ``tiny`` model behind a server; yields its address and engine."""
    folder = resolve_model("tiny")
    model = load_model(folder, dtype=torch.float32, device="cpu", numerics="exact")
    compute = ComputeQueue()
    section = EngineSection(infer=InferSection(kv_tokens=4096, max_num_seqs=16, block_size=4))
    engine = InferEngine(model, PublishedWeights(model), section, compute, max_context_tokens=512,
                         eos_ids=read_spec(folder).eos_ids)  # fmt: skip
    served = Served(engine=engine, renderer=Renderer(load_tokenizer(folder)), names=("tiny",), max_context_tokens=512)
    ready = asyncio.get_running_loop().create_future()
    server = asyncio.ensure_future(serve_forever(make_app(served), host="127.0.0.1", port=0, on_ready=ready.set_result))
    try:
        yield await asyncio.wait_for(ready, 10), engine
    finally:
        server.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait_for(server, 10)
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

    alone, crowded, streamed, stats = asyncio.run(asyncio.wait_for(body(), 60))
    first, second = alone.choices[0], crowded.choices[0]
    assert first.token_ids == second.token_ids and first.message.content == second.message.content == streamed
    assert [each.logprob for each in first.logprobs.content] == [each.logprob for each in second.logprobs.content]
    assert crowded.usage.prompt_tokens_details.cached_tokens > 0
    assert stats.num_running == stats.num_waiting == stats.blocks_in_use == 0


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
            async with asyncio.timeout(10):
                while engine.stats().num_running or engine.stats().blocks_in_use:
                    await asyncio.sleep(0.01)
            return engine.stats().generated_tokens

    assert asyncio.run(asyncio.wait_for(body(), 60)) < 1600


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

    guided, worded, broken, said, again = asyncio.run(asyncio.wait_for(body(), 60))
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
