"""The engine in a process of its own: the same answers, weights that arrive, an end that has a name."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.app.build import LiveModel, engine_of
from tandem.app.preflight import prepare_model
from tandem.config.load import from_mapping
from tandem.config.tree import Recipe
from tandem.core.errors import EngineError, EngineLost, PromptTooLong
from tandem.core.types import Completion, FinishReason, GenerateRequest, SamplingParams, ids
from tandem.engine.process.client import ProcessEngine

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd_create on this system")
WAIT_S = 60.0


def awaited(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test in an event loop of its own."""

    @functools.wraps(test)
    def run(**given: object) -> None:
        asyncio.run(asyncio.wait_for(test(**given), 2 * WAIT_S))

    return run


def recipe(*, process: bool = True, **engine: object) -> Recipe:
    return from_mapping({
        "model": {"path": "tiny", "max_context_tokens": 256},
        "rollout": {"max_turn_tokens": 32},
        "engine": {"process": process, "threads": 1, "infer": {"kv_tokens": 65536}} | engine,
    })


@asynccontextmanager
async def live(*, process: bool = True) -> AsyncIterator[LiveModel]:
    chosen = recipe(process=process)
    async with asyncio.timeout(WAIT_S), engine_of(chosen, prepare_model(chosen)) as made:
        yield made


def asked(name: str, *, prompt: Sequence[int] = range(5, 25), **params: object) -> GenerateRequest:
    chosen = SamplingParams(**{"ignore_eos": True, "max_tokens": 32} | params)
    return GenerateRequest(id=name, prompt_ids=ids(prompt), params=chosen, seed=3)


def told(completion: Completion) -> tuple[list[int], list[float], list[int]]:
    return completion.token_ids.tolist(), completion.logprobs.tolist(), completion.versions.tolist()


def resident(pid: int) -> int:
    """Bytes of memory that the process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


async def change(made: LiveModel, amount: float) -> None:
    def work() -> None:
        with torch.no_grad():
            for parameter in made.weights.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * amount)
        made.weights.bump(1)

    await made.compute.run("train", work)


@awaited
async def test_it_answers_as_the_engine_in_this_process_does_under_every_version() -> None:
    requests = [asked(f"r{number}", prompt=range(number + 3, number + 30), max_tokens=12) for number in range(4)]
    outcomes = []
    for process in (False, True):
        async with live(process=process) as made:
            rounds = []
            for _ in range(3):  # each slot, and the first again
                rounds.append([told(each) for each in await asyncio.gather(*map(made.engine.generate, requests))])
                await change(made, 0.05)
                await made.engine.load(made.weights.current)
            outcomes.append(rounds)
    assert outcomes[0] == outcomes[1]
    assert [{version for each in of_round for version in each[2]} for of_round in outcomes[1]] == [{0}, {1}, {2}]


@awaited
async def test_tokens_stream_guides_rule_errors_have_their_type_and_nothing_stays() -> None:
    class Even:
        """Only even ids may follow, and the one after the last."""

        def __init__(self) -> None:
            self.seen: list[int] = []

        def allowed(self) -> np.ndarray:
            flags = np.zeros(300, bool)
            flags[20:200:2] = True
            return flags

        def advance(self, token_id: int) -> None:
            self.seen.append(token_id)

    class Broken(Even):
        def allowed(self) -> np.ndarray:
            raise RuntimeError("no idea")

    async with live() as made:
        engine, heard, guide = made.engine, [], Even()
        completion = await engine.generate(asked("a", max_tokens=10), on_tokens=heard.extend, guide=guide)
        assert heard == completion.token_ids.tolist() and len(heard) == 10
        assert all(token % 2 == 0 for token in heard) and guide.seen == heard[:-1]
        with pytest.raises(EngineError, match="no idea"):
            await engine.generate(asked("b"), guide=Broken())
        with pytest.raises(PromptTooLong, match="the engine holds"):
            await engine.generate(asked("c", max_tokens=5000))
        with pytest.raises(EngineError, match="its listener raised"):
            await engine.generate(asked("d"), on_tokens=lambda new: 1 / 0)  # type: ignore[arg-type,return-value]
        running = asyncio.ensure_future(engine.generate(asked("e", max_tokens=200)))
        started = asyncio.Event()
        aborted = asyncio.ensure_future(
            engine.generate(asked("f", max_tokens=200), on_tokens=lambda new: started.set())
        )
        await started.wait()
        await engine.abort("f")
        assert (partial := await aborted).finish_reason is FinishReason.ABORT and 0 < len(partial.token_ids) < 200
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await engine.generate(asked("g", max_tokens=2))
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.blocks_in_use) == (0, 0, 0)


@awaited
async def test_a_version_that_comes_while_it_samples_tags_the_tokens_after_it() -> None:
    async with live() as made:
        seen = asyncio.Event()
        running = asyncio.ensure_future(
            made.engine.generate(asked("a", max_tokens=200), on_tokens=lambda new: seen.set())
        )
        await seen.wait()
        await change(made, 0.01)
        await made.engine.load(made.weights.current)
        versions = (await running).versions.tolist()
        assert versions == sorted(versions) and {0, 1} == set(versions)


@awaited
async def test_sleep_gives_memory_back_and_a_request_wakes_it() -> None:
    async with live() as made:
        engine = made.engine
        assert isinstance(engine, ProcessEngine)
        request = asked("a", prompt=range(200), max_tokens=40)
        before = told(await engine.generate(request))
        many = [asked(f"b{n}", prompt=[n % 250 + 1, *range(199)], max_tokens=40) for n in range(40)]
        await asyncio.gather(*map(engine.generate, many))
        awake = resident(engine.process_id)
        with pytest.raises(EngineError, match="in flight: z"):
            running = asyncio.ensure_future(engine.generate(asked("z", max_tokens=200)))
            await asyncio.sleep(0)
            try:
                await engine.sleep()
            finally:
                await running
        await engine.sleep()
        weights = sum(each.numel() * each.element_size() for each in made.weights.model.parameters())
        cache = 40 * 240 * 2 * made.weights.model.spec.num_layers * made.weights.model.spec.num_kv_heads * (
            made.weights.model.spec.head_dim * made.weights.model.embedding.weight.element_size()
        )
        assert resident(engine.process_id) < awake - 0.8 * (weights + cache)
        assert told(await engine.generate(request)) == before


@pytest.mark.parametrize("moment", ["idle", "generating", "publishing"])
@awaited
async def test_its_violent_end_is_named_and_leaves_nothing(moment: str) -> None:
    maps = Path("/proc/self/maps")
    before = maps.read_text().count("memfd:tandem-weights")
    with pytest.raises(EngineLost, match="was ended by SIGKILL while it served weights 0") as caught:
        async with live() as made:
            engine = made.engine
            assert isinstance(engine, ProcessEngine)
            pid = engine.process_id
            if moment == "generating":
                seen = asyncio.Event()
                running = asyncio.ensure_future(
                    engine.generate(asked("a", max_tokens=200), on_tokens=lambda new: seen.set())
                )
                await seen.wait()
            os.kill(pid, signal.SIGKILL)
            if moment == "generating":
                with pytest.raises(EngineLost):
                    await running
            if moment == "publishing":
                await change(made, 0.01)
                await engine.load(replace(made.weights.current))
            await asyncio.sleep(WAIT_S)
    assert caught.value.hint and str(pid) in caught.value.message
    assert is_gone(pid)
    del made, engine
    gc.collect()
    assert maps.read_text().count("memfd:tandem-weights") == before
