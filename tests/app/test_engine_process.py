"""The engine in a process of its own: the same answers, weights that arrive, an end that has a name."""

from __future__ import annotations

import asyncio
import functools
import gc
import mmap
import os
import signal
import sys
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
from tandem.core.errors import EngineError, EngineLost, NotRunning, PromptTooLong
from tandem.core.protocols import TokenEngine
from tandem.core.types import Completion, FinishReason, GenerateRequest, Sampled, SamplingParams, ids
from tandem.engine.process import client
from tandem.engine.process.client import ProcessEngine
from tandem.kernels.impl.cpu import projection

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd_create on this system")
WAIT_S = 240.0


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


@pytest.mark.skipif(not projection.road(), reason="the machine has no instructions for weights of 8 bits")
@awaited
async def test_weights_of_eight_bits_are_made_anew_of_every_version() -> None:
    request, outcomes = asked("r", max_tokens=12), []
    for process in (False, True):
        chosen = from_mapping({
            "model": {"path": "tiny", "max_context_tokens": 256, "dtype": "bfloat16"},
            "rollout": {"max_turn_tokens": 32},
            "engine": {"process": process, "threads": 1, "quantize": "int8", "infer": {"kv_tokens": 8192}},
        })  # fmt: skip
        async with asyncio.timeout(WAIT_S), engine_of(chosen, prepare_model(chosen)) as made:
            rounds = []
            for _ in range(3):
                rounds.append(told(await made.engine.generate(request)))
                await change(made, 0.05)
                await made.engine.load(made.weights.current)
            outcomes.append(rounds)
    assert outcomes[0] == outcomes[1]
    assert len({tuple(logprobs) for _, logprobs, _ in outcomes[1]}) == 3


@awaited
async def test_a_publish_that_fails_half_way_leaves_the_version_before_served() -> None:
    async with live() as made:
        assert isinstance(made.engine, ProcessEngine)
        request, sender = asked("r", max_tokens=12), made.engine._sender
        before = told(await made.engine.generate(request))
        memory = mmap.mmap(sender.files[0], 0)
        await change(made, 0.05)

        def ended(slot: int) -> np.ndarray:
            """Half of the weights are there."""
            sender_send(slot)
            memory[len(memory) // 2 + 5_000 :] = bytes(len(memory) - len(memory) // 2 - 5_000)
            raise MemoryError("no room")

        def flipped(slot: int) -> np.ndarray:
            """One bit is another one."""
            sums = sender_send(slot)
            memory[len(memory) // 2 + 5_000] ^= 16
            return sums

        sender_send = sender.send
        for fault, error, said in ((ended, MemoryError, "no room"), (flipped, EngineError, "did not arrive whole")):
            sender.send = fault  # type: ignore[method-assign]
            with pytest.raises(error, match=said):
                await made.engine.load(made.weights.current)
            assert told(await made.engine.generate(request)) == before
        sender.send = sender_send  # type: ignore[method-assign]
        await made.engine.load(made.weights.current)
        after = told(await made.engine.generate(request))
        assert after[2] == [1] * 12 and after[:2] != before[:2]


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
        engine, guide = made.engine, Even()
        news: list[Sampled] = []
        params = {"max_tokens": 10, "top_logprobs": 2, "prompt_logprobs": True}
        completion = await engine.generate(asked("a", **params), on_tokens=news.append, guide=guide)
        heard = completion.token_ids.tolist()
        assert [new.token_ids.tolist() for new in news] == [[token] for token in heard] and len(heard) == 10
        assert [new.logprobs[0] for new in news] == completion.logprobs.tolist()
        assert completion.tops == tuple(top for new in news for top in new.tops or ())
        first, *others = [(new.prompt_logprobs, new.prompt_tops) for new in news]
        assert first == (completion.prompt_logprobs, completion.prompt_tops) and first[0] and first[1]
        assert set(others) == {(None, None)}
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


class Odd:
    """Only odd ids may follow."""

    def allowed(self) -> np.ndarray:
        return np.arange(300) % 2 == 1

    def advance(self, token_id: int) -> None: ...


async def parent_and_forks(
    engine: TokenEngine, name: str, *, guided: bool
) -> tuple[Completion, list[Completion], dict[str, list[int]]]:
    """A request, its forks at its fourth token with its own seed and another, and what was heard of them."""
    heard: dict[str, list[int]] = {}
    forked: list[asyncio.Task[list[Completion]]] = []
    seen: list[int] = []

    def listen(way: str, new: Sampled) -> None:
        heard.setdefault(way, []).extend(new.token_ids)

    def hear(new: Sampled) -> None:
        seen.extend(new.token_ids)
        if len(seen) == 6:
            ways = {f"{name}{seed}": seed for seed in (3, 8)}
            guides = {way: Odd() for way in ways} if guided else None
            work = engine.fork(name, ways, at=4, on_tokens=listen, guides=guides)
            forked.append(asyncio.ensure_future(work))

    parent = await engine.generate(asked(name), on_tokens=hear, guide=Odd() if guided else None)
    return parent, await forked[0], heard


@awaited
async def test_a_fork_goes_on_in_both_as_the_parent_does_with_its_seed() -> None:
    outcomes = []
    for process in (False, True):
        async with live(process=process) as made:
            ways = []
            for guided in (False, True):
                parent, forks, heard = await parent_and_forks(made.engine, f"r{guided}", guided=guided)
                same, other = forks
                assert told(same) == told(parent)
                assert other.token_ids[:4] == parent.token_ids[:4] and told(other) != told(parent)
                assert all(heard[fork.request_id] == fork.token_ids[4:].tolist() for fork in forks)
                assert not guided or all(token % 2 for token in other.token_ids)
                ways += map(told, forks)
            with pytest.raises(NotRunning, match="request a is not running"):
                await made.engine.fork("a", {"x": 1})
            stats = made.engine.stats()
            assert (stats.num_running, stats.blocks_in_use) == (0, 0)
        outcomes.append(ways)
    assert outcomes[0] == outcomes[1]


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
    gc.collect()  # what other tests left
    before = maps.read_text().count("tandem-weights (deleted)")
    running: asyncio.Future[Completion] | None = None
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
    del made, engine, caught, running  # errors hold the frames they came through, and those the engine
    gc.collect()
    assert maps.read_text().count("tandem-weights (deleted)") == before


@pytest.mark.parametrize("late", ["taken", "refused"])
@awaited
async def test_a_process_that_is_silent_keeps_its_version_and_a_late_answer_counts(
    monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    async with live() as made:
        engine = made.engine
        assert isinstance(engine, ProcessEngine)
        request = asked("r", max_tokens=12)
        before = told(await engine.generate(request))
        sent: list[int] = []
        send = engine._sender.send

        def noted(slot: int) -> np.ndarray:
            sent.append(slot)
            sums_N8 = send(slot)
            return sums_N8 ^ np.uint64(late == "refused" and len(sent) == 1)

        engine._sender.send = noted  # type: ignore[method-assign]
        os.kill(engine.process_id, signal.SIGSTOP)
        try:
            with monkeypatch.context() as patched:
                patched.setattr(client, "LOAD_S", 0.2)
                # The second one may not write: both slots are perhaps served by now.
                for what in ("to take weights 1", "whether it took"):
                    await change(made, 0.05)
                    with pytest.raises(EngineError, match=rf"did not answer within 0\.2 s when asked {what}"):
                        await engine.load(made.weights.current)
            assert engine.published.number == 0 and len(sent) == 1
        finally:
            os.kill(engine.process_id, signal.SIGCONT)
        await engine.load(made.weights.current)
        after = told(await engine.generate(request))
        assert after[2] == [2] * 12 and after[:2] != before[:2]
        assert len(sent) == 2 and (sent[0] == sent[1]) is (late == "refused")
        assert engine.published.number == 2


TRAINER = """
import asyncio, torch
from tandem.app.build import engine_of
from tandem.app.preflight import prepare_model
from tandem.config.load import from_mapping

async def main():
    chosen = from_mapping({
        "model": {"path": "tiny", "max_context_tokens": 256}, "rollout": {"max_turn_tokens": 32},
        "engine": {"process": True, "threads": 1, "infer": {"kv_tokens": 8192}},
    })
    async with engine_of(chosen, prepare_model(chosen)) as made:
        print(made.engine.process_id, flush=True)
        for number in range(10**9):
            made.weights.bump(number)
            await made.engine.load(made.weights.current)
            if number == 5:
                print("publishing", flush=True)

asyncio.run(main())
"""


@awaited
async def test_it_ends_with_a_trainer_that_is_killed_while_it_publishes() -> None:
    trainer = await asyncio.create_subprocess_exec(sys.executable, "-c", TRAINER, stdout=asyncio.subprocess.PIPE)
    try:
        assert trainer.stdout is not None
        pid = int(await trainer.stdout.readline())
        assert await trainer.stdout.readline() == b"publishing\n" and not is_gone(pid)
    finally:
        trainer.kill()
        await trainer.wait()
    async with asyncio.timeout(10):
        while not is_gone(pid):
            await asyncio.sleep(0.05)
