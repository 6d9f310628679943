"""The engine: what a caller gets, whatever else is in flight."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tandem.config.sections.engine import EngineSection, InferSection
from tandem.core.errors import EngineError, NotRunning, PromptTooLong
from tandem.core.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    Sampled,
    SamplingParams,
    WeightVersion,
    ids,
)
from tandem.engine.compute import ComputeQueue
from tandem.engine.infer.loop import InferEngine
from tandem.engine.weights import PublishedWeights
from tandem.kernels.ops import KeyIndex
from tandem.models.attention import AttentionContext
from tandem.models.causal_lm import CausalLM
from tandem.models.loader import init_model
from tandem.models.spec import ModelSpec

VOCABULARY = 300
SPEC = ModelSpec(
    family="llama", vocab_size=VOCABULARY, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    intermediate_size=96, max_positions=256, tied_head=True,
)  # fmt: skip
SMALL = InferSection(max_num_seqs=8, max_step_tokens=32, block_size=4, kv_tokens=1024)


def model_of(seed: int = 0, dtype: torch.dtype = torch.float32, spec: ModelSpec = SPEC) -> CausalLM:
    model = init_model(spec, seed=seed, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # distributions with a shape: neither flat nor one-hot
    return model


class Bench:
    """An engine with its model, weights and compute queue."""

    def __init__(self, model: CausalLM, section: InferSection, eos_ids: Sequence[int]) -> None:
        self.compute = ComputeQueue()
        self.weights = PublishedWeights(model)
        self.engine = InferEngine(
            model, self.weights, EngineSection(infer=section), self.compute, max_context_tokens=128, eos_ids=eos_ids
        )

    async def all(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        return await asyncio.wait_for(asyncio.gather(*map(self.engine.generate, requests)), 30)

    def assert_empty(self) -> None:
        stats = self.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.blocks_in_use) == (0, 0, 0)


@asynccontextmanager
async def bench(
    model: CausalLM | None = None, section: InferSection = SMALL, eos_ids: Sequence[int] = ()
) -> AsyncIterator[Bench]:
    made = Bench(model or model_of(), section, eos_ids)
    try:
        yield made
        await asyncio.sleep(0)
        await made.engine.close()
        made.assert_empty()
    finally:
        await made.engine.close()
        made.compute.close()


def run(body: Callable[[], Awaitable[object]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 240))


def request(name: str, prompt: Sequence[int], seed: int = 0, **params: Any) -> GenerateRequest:
    return GenerateRequest(id=name, prompt_ids=ids(prompt), params=SamplingParams(**params), seed=seed)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()


def streams(completion: Completion) -> tuple[object, ...]:
    return completion.token_ids, completion.logprobs, completion.finish_reason


MIXED = [
    request("plain", prompt(9), 1, max_tokens=20),
    request("warm", prompt(30, 1), 2, max_tokens=12, temperature=1.5),
    request("greedy", prompt(17, 2), 3, max_tokens=25, temperature=0.0),
    request("top-k", prompt(3, 3), 4, max_tokens=20, top_k=5),
    request("top-p", prompt(40, 4), 5, max_tokens=9, top_p=0.6, temperature=0.8),
    request("both", prompt(9), 6, max_tokens=20, top_k=40, top_p=0.9),
    request("same prompt", prompt(9), 7, max_tokens=20),
    request("long", prompt(80, 8), 8, max_tokens=30),
    request("one", [5], 9, max_tokens=1),
    request("waits", prompt(21, 9), 10, max_tokens=10),
]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def training_logprobs(model: CausalLM, job: GenerateRequest, answer: Completion) -> np.ndarray:
    """What training computes for the answer's tokens: one packed sequence, gradients on, the chunked projection."""
    tokens = [*job.prompt_ids, *answer.token_ids]
    n, first = len(tokens) - 1, len(job.prompt_ids) - 1
    slots = torch.arange(n, dtype=torch.int32)
    index = KeyIndex(slots, torch.zeros(n, dtype=torch.int64), slots + 1)
    hidden = model(torch.tensor(tokens[:-1]), torch.arange(n), AttentionContext(keys=index))
    temperature = torch.full((n - first,), job.params.temperature or 1.0)
    logprobs, _ = model.ops.token_logprobs(
        hidden[first:], model.head_weight, torch.tensor(tokens[first + 1 :]), temperature
    )
    assert logprobs.requires_grad
    return logprobs.detach().numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampled_log_probabilities_are_the_trained_ones(dtype: torch.dtype, threads: int) -> None:
    """Bit for bit: continuous batching, chunked prefill, shared prefixes, preemption against one training pass."""
    model = model_of(dtype=dtype)
    jobs = [job for job in MIXED if not job.params.top_k and job.params.top_p == 1]
    tight = SMALL.model_copy(update={"kv_tokens": 128})

    async def body() -> None:
        for section in (SMALL, tight):
            async with bench(model, section) as here:
                for job, answer in zip(jobs, await here.all(jobs), strict=True):
                    assert np.array_equal(training_logprobs(model, job, answer), np.array(answer.logprobs)), job.id

    run(body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixed_requests_get_what_they_get_alone(dtype: torch.dtype, threads: int) -> None:
    model = model_of(dtype=dtype)

    async def body() -> None:
        async with bench(model) as here:
            together = await here.all(MIXED)
            alone = [(await here.all([job]))[0] for job in reversed(MIXED)][::-1]
        async with bench(model, SMALL.model_copy(update={"prefix_cache": False, "max_step_tokens": 16})) as here:
            others = await here.all(MIXED[::-1])
        for a, b, c in zip(together, alone, others[::-1], strict=True):
            assert streams(a) == streams(b) == streams(c), a.request_id

    run(body)


def test_preemption_keeps_the_result() -> None:
    async def body() -> None:
        model = model_of()
        async with bench(model) as here:
            expected = await here.all(MIXED)
            assert here.engine._scheduler.num_preemptions == 0
        for prefix_cache in (True, False):
            tight = SMALL.model_copy(update={"kv_tokens": 128, "prefix_cache": prefix_cache})
            async with bench(model, tight) as here:
                answers = await here.all(MIXED)
                assert here.engine._scheduler.num_preemptions > 0
            assert list(map(streams, answers)) == list(map(streams, expected))

    run(body)


def test_swapped_keys_come_back_bit_for_bit() -> None:
    """Preempted requests and the turns of an episode, in a pool too small for them, with CPU memory behind it."""
    tight = SMALL.model_copy(update={"kv_tokens": 128, "swap_tokens": 512})

    async def body() -> None:
        for dtype in (torch.float32, torch.bfloat16):
            model = model_of(dtype=dtype)
            async with bench(model) as here:
                expected = await here.all(MIXED)
                turns = [request(job.id, [*job.prompt_ids, *answer.token_ids, 7], 1, max_tokens=4)
                         for job, answer in zip(MIXED, expected, strict=True)]  # fmt: skip
                after = [(await here.all([turn]))[0] for turn in turns if len(turn.prompt_ids) < 120]
            async with bench(model, tight) as here:
                assert list(map(streams, await here.all(MIXED))) == list(map(streams, expected))
                again = [(await here.all([turn]))[0] for turn in turns if len(turn.prompt_ids) < 120]
                stats = here.engine.stats()
                assert stats.preemptions and stats.swapped_blocks and stats.returned_blocks
            assert list(map(streams, again)) == list(map(streams, after))

    run(body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fork_goes_on_from_its_token(dtype: torch.dtype) -> None:
    """With the parent's seed it is the parent; with another it is what a request alone makes of that beginning."""
    model = model_of(dtype=dtype)
    job = request("p", prompt(18), 5, max_tokens=40, frequency_penalty=0.3, top_logprobs=2)

    async def body() -> None:
        async with bench(model) as here:
            whole = (await here.all([job]))[0]
            heard: list[int] = []
            forked: list[asyncio.Task[list[Completion]]] = []

            def hear(new: Sampled) -> None:
                heard.extend(new.token_ids)
                if len(heard) in (13, 17):
                    at = None if len(heard) == 17 else 6
                    ways = {f"{at}-{seed}": seed for seed in (5, 6, 7)}
                    forked.append(asyncio.ensure_future(here.engine.fork("p", ways, at=at)))

            parent = await here.engine.generate(job, on_tokens=hear)
            ways = [await task for task in forked]
        assert streams(parent) == streams(whole)
        for fork, (same, *others) in zip((6, 17), ways, strict=True):
            assert streams(same) == streams(whole) and same.tops == whole.tops
            for other in others:
                assert other.token_ids[:fork] == whole.token_ids[:fork] and other.token_ids != whole.token_ids
                assert len(other.token_ids) == len(other.tops or ()) == 40
                assert other.num_cached_tokens >= 18 + fork - 1
        begun = replace(whole, token_ids=whole.token_ids[:6], logprobs=whole.logprobs[:6],
                        versions=whole.versions[:6], tops=(whole.tops or ())[:6])  # fmt: skip
        async with bench(model) as fresh:
            alone = (await fresh.all([replace(job, seed=7, so_far=begun)]))[0]
        assert streams(alone) == streams(ways[0][2]) and alone.tops == ways[0][2].tops

    run(body)


def test_a_fork_is_refused_where_nothing_can_follow() -> None:
    async def body() -> None:
        async with bench() as here:
            with pytest.raises(NotRunning, match="request r is not running"):
                await here.engine.fork("r", {"f": 1})
            task = asyncio.ensure_future(here.engine.generate(request("r", prompt(9), max_tokens=100)))
            while not here.engine.stats().generated_tokens:
                await asyncio.sleep(0.001)
            with pytest.raises(EngineError, match="cannot be forked at 101"):
                await here.engine.fork("r", {"f": 1}, at=101)
            whole = await task
            with pytest.raises(EngineError, match="nothing can follow the 100 tokens"):
                await here.engine.generate(replace(request("r", prompt(9), max_tokens=100), so_far=whole))
            with pytest.raises(EngineError, match="so_far ids outside"):
                odd = replace(whole, token_ids=ids([VOCABULARY] * 100))
                await here.engine.generate(replace(request("r", prompt(9), max_tokens=101), so_far=odd))
            with pytest.raises(EngineError, match="priority 17"):
                await here.engine.generate(replace(request("r", prompt(9), max_tokens=2), priority=17))

    run(body)


def test_branches_of_a_conversation_compute_their_own_tokens_only() -> None:
    async def body() -> None:
        async with bench() as here:
            trunk = (await here.all([request("t", prompt(50), max_tokens=3)]))[0]
            before = here.engine.stats().computed_tokens
            turn = [*prompt(50), *trunk.token_ids, 1, 2, 3]
            await here.all([request(str(i), turn, i, max_tokens=10) for i in range(8)])
            # Its last answer token and three new ones, once; then the last token of each other branch, and the answers.
            assert here.engine.stats().computed_tokens == before + 4 + 7 + 8 * 9

    run(body)


def test_the_first_tokens_are_those_of_a_shorter_request() -> None:
    """Draws depend on seed and index alone: to stop and to go on later gives the same tokens."""

    async def body() -> None:
        async with bench() as here:
            whole, part = await here.all(
                [request("w", prompt(9), 3, max_tokens=20), request("p", prompt(9), 3, max_tokens=7)]
            )
            again, other = await here.all(
                [request("w", prompt(9), 3, max_tokens=20), request("o", prompt(9), 4, max_tokens=20)]
            )
        assert whole.token_ids[:7] == part.token_ids and whole.logprobs[:7] == part.logprobs
        assert streams(whole) == streams(again)
        assert whole.token_ids != other.token_ids

    run(body)


def test_prefixes_are_reused_and_reported() -> None:
    async def body() -> None:
        async with bench() as here:
            first, *siblings = await here.all([request(f"s{i}", prompt(30), i, max_tokens=8) for i in range(4)])
            assert (first.num_cached_tokens, [s.num_cached_tokens for s in siblings]) == (0, [29, 29, 29])
            turn = [*prompt(30), *first.token_ids, 7, 8]
            second = (await here.all([request("t", turn, 9, max_tokens=5)]))[0]
            assert second.num_cached_tokens == 37  # all that were computed
            stats = here.engine.stats()
            assert (stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens) == (160, 124, 37)
            assert stats.busy_s > 0
        async with bench(section=SMALL.model_copy(update={"prefix_cache": False})) as here:
            answers = await here.all([request(f"s{i}", prompt(30), i, max_tokens=8) for i in range(2)])
            assert [answer.num_cached_tokens for answer in answers] == [0, 0]
            assert streams(answers[0]) == streams(first)

    run(body)


def test_no_old_keys_after_an_update() -> None:
    """Case 5: the same prompt under new weights is what a fresh engine makes of it."""
    job = request("p", prompt(40), max_tokens=12, temperature=0.0)

    async def body() -> None:
        model, fresh = model_of(0), model_of(1)
        async with bench(model) as here:
            old = (await here.all([job]))[0]
            assert (await here.all([job]))[0].num_cached_tokens == 39

            def update() -> None:
                with torch.no_grad():
                    for ours, theirs in zip(model.parameters(), fresh.parameters(), strict=True):
                        ours.copy_(theirs)
                here.weights.bump(1)

            await here.compute.run("train", update)
            await here.engine.load(here.weights.current)
            new = (await here.all([job]))[0]
            assert (new.num_cached_tokens, set(new.versions)) == (0, {1})
        async with bench(fresh) as other:
            expected = (await other.all([job]))[0]
        assert streams(new) == streams(expected) != streams(old)

    run(body)


def test_tokens_carry_the_version_that_made_them() -> None:
    async def body() -> None:
        model = model_of()
        async with bench(model) as here:

            def hear(new: Sampled) -> None:
                heard.extend(new.token_ids)
                if len(heard) == 6:
                    updates.append(asyncio.ensure_future(here.compute.run("train", update)))

            def update() -> None:
                with torch.no_grad():
                    model.embedding.weight.mul_(1.5)
                here.weights.bump(1)

            heard: list[int] = []
            updates: list[asyncio.Future[None]] = []
            answer = await here.engine.generate(request("r", prompt(9), max_tokens=20), on_tokens=hear)
            versions = list(answer.versions)
            assert heard == list(answer.token_ids)
            assert versions == sorted(versions) and set(versions) == {0, 1} and 6 <= versions.index(1) <= 8
            # Its keys are of both versions: a sibling that begins now must find nothing of them.
            sibling = (await here.all([request("s", [*prompt(9), *answer.token_ids], max_tokens=2)]))[0]
            assert sibling.num_cached_tokens == 0

    run(body)


def test_stop_tokens() -> None:
    async def body() -> None:
        model = model_of()
        job = request("r", prompt(9), max_tokens=20)
        async with bench(model) as here:
            whole = (await here.all([job]))[0]
        stop = whole.token_ids[6]
        until = list(whole.token_ids).index(stop) + 1
        async with bench(model, eos_ids=[stop]) as here:
            ended, ignoring, own = await here.all(
                [
                    job,
                    request("i", prompt(9), max_tokens=20, ignore_eos=True),
                    request("o", prompt(9), max_tokens=20, ignore_eos=True, stop_token_ids=(whole.token_ids[2],)),
                ]
            )
        assert (ended.token_ids, ended.finish_reason) == (whole.token_ids[:until], FinishReason.STOP)
        assert streams(ignoring) == streams(whole)
        assert (own.finish_reason, own.token_ids[-1]) == (FinishReason.STOP, whole.token_ids[2])

    run(body)


def test_abort_returns_what_there_is() -> None:
    async def body() -> None:
        async with bench(section=SMALL.model_copy(update={"max_num_seqs": 2})) as here:
            heard: list[int] = []
            enough = asyncio.Event()

            def hear(new: Sampled) -> None:
                heard.extend(new.token_ids)
                if len(heard) == 5:
                    enough.set()

            jobs = [request(name, prompt(9, i), i, max_tokens=100) for i, name in enumerate("abc")]
            tasks = [asyncio.ensure_future(here.engine.generate(job, on_tokens=hear)) for job in jobs[:1]]
            tasks += [asyncio.ensure_future(here.engine.generate(job)) for job in jobs[1:]]
            await enough.wait()
            await here.engine.abort("a")
            await here.engine.abort("c")  # may still be waiting
            await here.engine.abort("nobody")
            first, third = await tasks[0], await tasks[2]
            assert first.finish_reason is third.finish_reason is FinishReason.ABORT
            assert 5 <= len(first.token_ids) <= 7
            assert len((await tasks[1]).token_ids) == 100

    run(body)


def test_cancelling_frees_blocks_and_name() -> None:
    async def body() -> None:
        async with bench() as here:
            task = asyncio.ensure_future(here.engine.generate(request("r", prompt(50), max_tokens=70)))
            while not here.engine.stats().generated_tokens:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            answer = (await here.all([request("r", prompt(5), max_tokens=3)]))[0]
            assert len(answer.token_ids) == 3
            here.assert_empty()

    run(body)


def test_refusals_name_what_is_wrong() -> None:
    async def body() -> None:
        async with bench() as here:
            with pytest.raises(PromptTooLong, match=r"100 prompt tokens and 29 new ones are 129, the engine holds 128"):
                await here.engine.generate(request("r", prompt(100), max_tokens=29))
            assert len((await here.all([request("r", prompt(100), max_tokens=28)]))[0].token_ids) == 28
            for bad in ([], [VOCABULARY], [-1]):
                with pytest.raises(EngineError, match="request r"):
                    await here.engine.generate(request("r", bad, max_tokens=2))
            with pytest.raises(EngineError, match="max_tokens 0"):
                await here.engine.generate(request("r", [1], max_tokens=0))
            twins = [here.engine.generate(request("r", prompt(9), max_tokens=9)) for _ in range(2)]
            first, second = await asyncio.gather(*twins, return_exceptions=True)
            assert isinstance(first, Completion) and "in flight already" in str(second)
            with pytest.raises(EngineError, match="weights 3 are not there"):
                await here.engine.load(WeightVersion(number=3, step=3))
            with pytest.raises(EngineError, match="live weights only"):
                await here.engine.load(WeightVersion(number=0, step=0, place="somewhere"))

    run(body)


def test_a_failed_step_fails_its_requests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with bench() as here:
            whole = here.engine._runner.run

            def failing(plan):
                if any(request.id == "bad" for request in plan.requests):
                    raise RuntimeError("out of something")
                return whole(plan)

            monkeypatch.setattr(here.engine._runner, "run", failing)
            with pytest.raises(EngineError, match="request bad: the engine step failed: RuntimeError: out of"):
                await here.engine.generate(request("bad", prompt(9), max_tokens=9))
            here.assert_empty()
            assert len((await here.all([request("good", prompt(9), max_tokens=9)]))[0].token_ids) == 9

    run(body)


def test_a_listener_that_raises_ends_its_request_only() -> None:
    async def body() -> None:
        def broken(new: Sampled) -> None:
            raise ValueError(new)

        async with bench() as here:
            other = asyncio.ensure_future(here.engine.generate(request("o", prompt(9), max_tokens=9)))
            with pytest.raises(EngineError, match="request r: its listener raised"):
                await here.engine.generate(request("r", prompt(9, 1), max_tokens=9), on_tokens=broken)
            assert len((await other).token_ids) == 9

    run(body)


def test_closing_fails_what_is_in_flight() -> None:
    async def body() -> None:
        async with bench() as here:
            task = asyncio.ensure_future(here.engine.generate(request("r", prompt(9), max_tokens=100)))
            while not here.engine.stats().generated_tokens:
                await asyncio.sleep(0.001)
            await here.engine.close()
            with pytest.raises(EngineError, match="request r: the engine was closed"):
                await task
            with pytest.raises(EngineError, match="closed"):
                await here.engine.generate(request("n", prompt(9), max_tokens=2))

    run(body)


def test_a_closed_compute_queue_is_an_error_not_a_hang() -> None:
    async def body() -> None:
        here = Bench(model_of(), SMALL, ())
        here.compute.close()
        with pytest.raises(EngineError, match="compute queue"):
            await here.engine.generate(request("r", prompt(9), max_tokens=2))
        here.assert_empty()

    run(body)


def test_one_engine_serves_several_event_loops_in_turn() -> None:
    """A loop that ends in the middle of a request leaves nothing behind."""
    here = Bench(model_of(), SMALL, ())

    async def begin() -> None:
        asyncio.ensure_future(here.engine.generate(request("r", prompt(50), max_tokens=70)))
        while not here.engine.stats().generated_tokens:
            await asyncio.sleep(0.001)

    try:
        for _ in range(3):  # the first ends in the middle of a request, the others before their first step
            asyncio.run(begin())
            here.assert_empty()
        assert len(asyncio.run(here.all([request("r", prompt(9), max_tokens=4)]))[0].token_ids) == 4
    finally:
        here.compute.close()


def test_windows_and_norms_on_queries_and_keys() -> None:
    """A model with sliding layers and query norms samples what it trains, too."""
    spec = ModelSpec(
        family="qwen3", vocab_size=VOCABULARY, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=1, head_dim=16,
        intermediate_size=96, max_positions=256, qk_norm=True, windows=(8, 0),
    )  # fmt: skip
    model = model_of(spec=spec, dtype=torch.bfloat16)

    async def body() -> None:
        async with bench(model) as here:
            jobs = [request(f"r{i}", prompt(5 + 9 * i, i), i, max_tokens=20) for i in range(4)]
            for job, answer in zip(jobs, await here.all(jobs), strict=True):
                assert np.array_equal(training_logprobs(model, job, answer), np.array(answer.logprobs))

    run(body)
