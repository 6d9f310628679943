"""Weights that come while requests run, in an engine of this process and in one of its own."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tandem.app.build import LiveModel, engine_of
from tandem.app.preflight import prepare_model
from tandem.config.load import from_mapping
from tandem.core.resume import resumed
from tandem.core.types import Completion, FinishReason, GenerateRequest, Sampled, SamplingParams, ids

NEEDS = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd_create on this system")


def drawn(draw: random.Random, name: str) -> GenerateRequest:
    params = SamplingParams(
        max_tokens=draw.randint(1, 60), ignore_eos=True, top_logprobs=draw.choice([0, 2]),
        prompt_logprobs=draw.random() < 0.2, temperature=draw.choice([1.0, 0.7]),
    )  # fmt: skip
    prompt = [draw.randrange(200) for _ in range(draw.randint(1, 60))]
    return GenerateRequest(id=name, prompt_ids=ids(prompt), params=params, seed=draw.randrange(99))


async def publish(live: LiveModel) -> None:
    def change() -> None:
        with torch.no_grad():
            for parameter in live.weights.model.parameters():
                parameter.mul_(1.02)
        live.weights.bump(1)

    await live.compute.run("train", change)
    await live.engine.load(live.weights.current)


async def answers_under_publishes(
    live: LiveModel, requests: Sequence[GenerateRequest], after: Sequence[int]
) -> list[Completion]:
    """Weights are published when so many tokens have been heard of all of them."""
    heard, publishes = 0, list[asyncio.Task[None]]()

    def hear(new: Sampled) -> None:
        nonlocal heard
        for _ in new.token_ids:
            heard += 1
            if heard in after:
                publishes.append(asyncio.ensure_future(publish(live)))

    made = await asyncio.gather(*(live.engine.generate(request, on_tokens=hear) for request in requests))
    await asyncio.gather(*publishes)
    return list(made)


def assert_one_index(request: GenerateRequest, completion: Completion) -> None:
    count = len(completion.token_ids)
    assert len(completion.logprobs) == len(completion.versions) == count
    assert completion.tops is None if not request.params.top_logprobs else len(completion.tops or ()) == count
    assert completion.versions.tolist() == sorted(completion.versions)
    if request.params.prompt_logprobs and completion.prompt_logprobs is not None:
        assert len(completion.prompt_logprobs) == len(request.prompt_ids) - 1


def cut(completion: Completion, count: int) -> Completion:
    tops = None if completion.tops is None else completion.tops[:count]
    return replace(completion, token_ids=completion.token_ids[:count], logprobs=completion.logprobs[:count],
                   versions=completion.versions[:count], tops=tops)  # fmt: skip


def streams(completion: Completion) -> tuple[list[int], list[float], list[int]]:
    return completion.token_ids.tolist(), completion.logprobs.tolist(), completion.versions.tolist()


@pytest.mark.parametrize("process", [False, pytest.param(True, marks=NEEDS)])
@pytest.mark.parametrize("mode", ["keep", "reprefill", "abort"])
def test_every_token_has_its_version_and_nothing_is_lost(mode: str, process: bool) -> None:
    recipe = from_mapping({
        "model": {"path": "tiny", "max_context_tokens": 256},
        "rollout": {"max_turn_tokens": 32},
        "engine": {"process": process, "threads": 1, "infer": {"at_publish": mode, "max_num_seqs": 6}},
    })
    draw = random.Random(f"{mode} {process}")

    async def body() -> None:
        changed = differing = 0
        async with asyncio.timeout(240), engine_of(recipe, prepare_model(recipe)) as live:
            for number in range(4):
                requests = [drawn(draw, f"{number}.{i}") for i in range(8)]
                after = sorted(draw.sample(range(1, 120), 2))
                for request, made in zip(requests, await answers_under_publishes(live, requests, after), strict=True):
                    assert_one_index(request, made)
                    whole, now = made, live.weights.version
                    if mode == "abort":
                        again = resumed(request, made, version=now)
                        assert (again is None) == (made.finish_reason is FinishReason.LENGTH)
                        if again is not None:
                            whole = await live.engine.generate(again)
                            assert_one_index(request, whole)
                            assert streams(cut(whole, len(made.token_ids))) == streams(made)
                            assert set(whole.versions[len(made.versions) :]) == {now}
                        assert len(set(made.versions)) == 1
                    assert whole.finish_reason is FinishReason.LENGTH
                    assert len(whole.token_ids) == request.params.max_tokens
                    if mode != "abort" and len(set(made.versions)) > 1 and made.versions[-1] == now:
                        changed += 1
                        begun = cut(made, made.versions.index(now))
                        fresh = await live.engine.generate(replace(request, so_far=begun))
                        differing += streams(fresh) != streams(made)
                    changed += mode == "abort" and made.finish_reason is FinishReason.ABORT
            stats = live.engine.stats()
            assert (stats.num_running, stats.num_waiting, stats.blocks_in_use) == (0, 0, 0)
        assert changed, "no publish met a running request"
        # What goes on from old keys is not what the new weights make of those tokens; computed again, it is to the bit.
        assert bool(differing) == (mode == "keep")

    asyncio.run(body())
