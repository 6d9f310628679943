"""vLLM behind the seam: in its own interpreter where one is named, else a stand-in of it in a real process."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.app.build import LiveModel, engine_of
from tandem.app.preflight import prepare_model
from tandem.config.load import from_mapping
from tandem.core.errors import EngineError, EngineLost, PromptTooLong
from tandem.core.protocols import TokenGuide
from tandem.core.resume import resumed
from tandem.core.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    Sampled,
    SamplingParams,
    Trajectory,
    floats,
    ids,
    mask,
)
from tandem.engine.process.client import ProcessEngine
from tandem.engine.train.score import Scorer

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd_create on this system")
STANDIN = Path(__file__).parent / "standin"
REAL = os.environ.get("TANDEM_TEST_VLLM", "")
WAIT_S, REAL_S = 240.0, 240.0
LONG = 200


def awaited(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test in an event loop of its own."""

    @functools.wraps(test)
    def run(**given: object) -> None:
        asyncio.run(asyncio.wait_for(test(**given), REAL_S))

    return run


@asynccontextmanager
async def live(*, python: str = "", at_publish: str = "keep", wait_s: float = WAIT_S) -> AsyncIterator[LiveModel]:
    engine = {"name": "vllm", "python": python, "threads": 1, "infer": {"kv_tokens": 8192, "at_publish": at_publish}}
    chosen = from_mapping({
        "model": {"path": "tiny", "dtype": "float32", "max_context_tokens": 512},
        "rollout": {"max_turn_tokens": 32}, "engine": engine,
    })  # fmt: skip
    async with asyncio.timeout(wait_s), engine_of(chosen, prepare_model(chosen)) as made:
        yield made


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(STANDIN))


def asked(name: str, *, prompt: Sequence[int] = range(5, 25), seed: int = 3, **params: Any) -> GenerateRequest:
    chosen = replace(SamplingParams(ignore_eos=True, max_tokens=8), **params)
    return GenerateRequest(id=name, prompt_ids=ids(prompt), params=chosen, seed=seed)


async def change(made: LiveModel) -> None:
    def work() -> None:
        with torch.no_grad():
            for parameter in made.weights.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.02)
        made.weights.bump(1)

    await made.compute.run("train", work)
    await made.engine.load(made.weights.current)


async def begun(made: LiveModel, request: GenerateRequest) -> asyncio.Task[Completion]:
    """The request, when its first token has come."""
    first = asyncio.Event()
    task = asyncio.ensure_future(made.engine.generate(request, on_tokens=lambda _: first.set()))
    await first.wait()
    return task


@pytest.mark.usefixtures("standin")
@awaited
async def test_answers_carry_log_probabilities_and_the_version_they_were_sampled_under() -> None:
    async with live() as made:
        answers = []
        for version in range(3):
            told: list[Sampled] = []
            answer = await made.engine.generate(asked(f"a{version}", top_logprobs=2), on_tokens=told.append)
            heard = [token for new in told for token in new.token_ids]
            assert [value for new in told for value in new.logprobs] == answer.logprobs.tolist()
            assert tuple(top for new in told for top in new.tops or ()) == answer.tops
            assert heard == answer.token_ids.tolist() and answer.versions.tolist() == [version] * 8
            assert answer.logprobs.tolist() == pytest.approx([-token / 1000 for token in heard])
            assert answer.tops is not None and [top.token_ids[0] for top in answer.tops] == heard
            assert answer.finish_reason is FinishReason.LENGTH and answer.num_cached_tokens == 0
            again = await made.engine.generate(asked(f"b{version}"))
            assert again.token_ids == answer.token_ids and again.num_cached_tokens == 19
            answers.append(heard)
            await change(made)
        assert len({tuple(answer) for answer in answers}) == 3, "the weights that were published are those that sample"
        last = asked("s", max_tokens=8)
        whole = await made.engine.generate(last)
        stop = whole.token_ids[3]
        cut = await made.engine.generate(asked("t", stop_token_ids=(stop,)))
        assert cut.finish_reason is FinishReason.STOP and cut.token_ids == whole.token_ids[:4]
        stats = made.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.blocks_in_use, stats.version) == (0, 0, 0, 3)
        assert stats.prompt_tokens == 8 * 20 and stats.cached_tokens == 4 * 19 and stats.generated_tokens == 7 * 8 + 4


@pytest.mark.usefixtures("standin")
@awaited
async def test_requests_end_when_they_are_told_to_and_nothing_stays() -> None:
    async with live() as made:
        aborted = await begun(made, asked("a", max_tokens=LONG))
        cancelled = await begun(made, asked("c", max_tokens=LONG))
        with pytest.raises(EngineError, match="in flight already"):
            await made.engine.generate(asked("a"))
        await made.engine.abort("a")
        assert (partial := await aborted).finish_reason is FinishReason.ABORT and 0 < len(partial.token_ids) < LONG
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await made.engine.generate(asked("d"))
        stats = made.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.blocks_in_use) == (0, 0, 0)


@pytest.mark.usefixtures("standin")
@awaited
async def test_at_a_publish_running_requests_go_on_or_come_back_with_what_they_have() -> None:
    async with live() as made:
        task = await begun(made, asked("k", max_tokens=100))
        await change(made)
        versions = (await task).versions.tolist()
        assert versions == sorted(versions) and set(versions) == {0, 1}
    async with live(at_publish="abort") as made:
        request = asked("r", max_tokens=LONG)
        task = await begun(made, request)
        await change(made)
        partial = await task
        assert partial.finish_reason is FinishReason.ABORT and set(partial.versions) == {0}
        onward = resumed(request, partial, version=1)
        assert onward is not None
        whole = await made.engine.generate(onward)
        before = len(partial.token_ids)
        assert len(whole.token_ids) == LONG and whole.token_ids[:before] == partial.token_ids
        assert whole.versions.tolist() == [0] * before + [1] * (LONG - before)


@pytest.mark.usefixtures("standin")
@awaited
async def test_what_it_cannot_do_is_refused_by_name() -> None:
    class All:
        def allowed(self) -> list[bool]:
            return [True] * 512

        def advance(self, token_id: int) -> None: ...

    guide: TokenGuide = All()
    async with live() as made:
        engine = made.engine
        assert isinstance(engine, ProcessEngine)
        for work, said in (
            (engine.generate(asked("a"), guide=guide), "cannot follow a guide"),
            (engine.generate(asked("b", prompt_logprobs=True)), "cannot tell the log-probabilities of a prompt"),
            (engine.fork("a", {"b": 1}), "cannot fork"),
            (engine.sleep(), "cannot sleep"),
            (engine.generate(asked("c", temperature=-1.0)), "vLLM refused it: temperature must be non-negative"),
            (engine.generate(asked("d", prompt=[9999])), "outside the vocabulary of 512"),
        ):
            with pytest.raises(EngineError, match=said):
                await work
        with pytest.raises(PromptTooLong, match="20 prompt tokens and 5000 new ones are 5020, the engine holds 512"):
            await engine.generate(asked("e", max_tokens=5000))
        assert len((await engine.generate(asked("f"))).token_ids) == 8


@pytest.mark.usefixtures("standin")
@awaited
async def test_a_step_that_fails_is_a_lost_engine() -> None:
    with pytest.raises(EngineLost, match="ended with exit code 70 while it served weights 0; 1 call waited"):
        async with live() as made:
            await made.engine.generate(asked("a", seed=666))


@pytest.mark.skipif(not REAL, reason="TANDEM_TEST_VLLM names no interpreter that has vllm")
@pytest.mark.slow
@awaited
async def test_the_real_one_samples_from_the_weights_in_training() -> None:
    async with live(python=REAL, wait_s=REAL_S) as made:
        scorer = Scorer(made.weights.model, made.compute, from_mapping({}).engine.train)
        for version in range(3):
            requests = [
                asked(f"{version}.{place}", prompt=range(3, 300), temperature=temperature, max_tokens=16, seed=place)
                for place, temperature in enumerate((0.0, 0.7, 1.0, 1.3))
            ]
            num_cached = 0
            for request in requests:
                answer = await made.engine.generate(request)
                assert answer.versions.tolist() == [version] * 16
                length = len(request.prompt_ids)
                scored = Trajectory(
                    episode_id="e", group_id="g", token_ids=request.prompt_ids + answer.token_ids,
                    loss_mask=mask([0] * length + [1] * 16), logprobs=floats([0.0] * length) + answer.logprobs,
                    versions=ids([-1] * length) + answer.versions, num_prompt_tokens=length,
                    temperature=request.params.temperature or 1.0,
                )  # fmt: skip
                (stream,) = await scorer.score([scored])
                num_cached += answer.num_cached_tokens
                assert answer.logprobs.tolist() == pytest.approx(stream[length:].tolist(), abs=1e-4)
            assert num_cached > 0, "the prompt is known from the request before"
            await change(made)
