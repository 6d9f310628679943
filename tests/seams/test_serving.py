"""The chat server over the real inference engine: what the two promise each other."""

import asyncio
import contextlib

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
from tandem.serve.openai import Served, make_app
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
