"""What requests change in their logits, what they get to know about them, and that neighbours see nothing of it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from tandem.core.errors import EngineError
from tandem.core.types import Completion, FinishReason, floats, ids
from tandem.engine.infer.request import Request
from tandem.engine.infer.shaping import is_shaped, shape
from tests.engine.infer.test_loop import (
    MIXED,
    SMALL,
    VOCABULARY,
    bench,
    model_of,
    prompt,
    request,
    run,
    streams,
    training_logprobs,
)


class Alternating:
    """Even ids, then odd ids, and so on; of the last ten ids none."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def allowed(self) -> np.ndarray:
        return np.arange(VOCABULARY - 10) % 2 == len(self.seen) % 2

    def advance(self, token_id: int) -> None:
        self.seen.append(token_id)


def shaped(logits: list[float], *, prompt_ids=(0,), answer=(), guide=None, **params) -> list[float]:
    made = Request(request("r", prompt_ids, max_tokens=9, **params), guide=guide)
    for token in answer:
        made.append(token, -1.0, 0)
    row = torch.tensor(logits)
    assert is_shaped(made)
    shape(row, made)
    return [round(value, 4) for value in row.tolist()]


def test_worked_values():
    row = [2.0, -1.0, 0.5, 0.0]
    assert shaped(row, logit_bias=((1, 3.0), (3, -100.0))) == [2.0, 2.0, 0.5, -100.0]
    assert shaped(row, prompt_ids=[0], answer=[1], repetition_penalty=2.0) == [1.0, -2.0, 0.5, 0.0]
    # Frequency and presence look at the answer alone.
    assert shaped(row, prompt_ids=[0], answer=[2, 2, 3], frequency_penalty=0.5) == [2.0, -1.0, -0.5, -0.5]
    assert shaped(row, prompt_ids=[0], answer=[2, 2, 3], presence_penalty=0.25) == [2.0, -1.0, 0.25, -0.25]
    # e^(0.5 - 2) = 0.223, e^(0 - 2) = 0.135, at temperature 2: 0.472 and 0.368.
    gone = float("-inf")
    assert shaped(row, min_p=0.2) == [2.0, gone, 0.5, gone]
    assert shaped(row, min_p=0.3, temperature=2.0) == [2.0, gone, 0.5, 0.0]
    assert not is_shaped(Request(request("r", [1], max_tokens=1, top_p=0.5)))


def test_a_shaped_request_leaves_its_neighbours_alone_and_reports_what_was_sampled():
    model = model_of()
    special = [
        request("bias", prompt(9), 21, max_tokens=15, logit_bias=((5, 100.0),), temperature=0.7),
        request("penal", prompt(12, 3), 22, max_tokens=15, repetition_penalty=1.3, presence_penalty=0.5, top_k=9),
        request("min-p", prompt(5, 4), 23, max_tokens=15, min_p=0.1, top_logprobs=3),
    ]

    async def body() -> None:
        async with bench(model) as here:
            expected = await here.all(MIXED)
            alone = [(await here.all([job]))[0] for job in special]
        async with bench(model, SMALL.model_copy(update={"kv_tokens": 160})) as here:  # with preemption
            answers = await here.all([*special, *MIXED])
        assert list(map(streams, answers[3:])) == list(map(streams, expected))
        assert list(map(streams, answers[:3])) == list(map(streams, alone))
        assert set(answers[0].token_ids) == {5}
        for token, logprob, top in zip(
            answers[2].token_ids, answers[2].logprobs, answers[2].tops or (), strict=True
        ):
            listed = dict(zip(top.token_ids, top.logprobs, strict=True))
            assert len(listed) <= 3 and list(listed.values()) == sorted(listed.values(), reverse=True)
            assert listed.get(token, min(listed.values())) >= logprob
            assert all(value >= max(listed.values()) + np.log(0.1) - 1e-5 for value in listed.values())

    run(body)


def test_a_guide_restricts_every_token_also_over_preemption():
    async def body() -> None:
        async with bench(model_of(), SMALL.model_copy(update={"kv_tokens": 160})) as here:
            guides = [Alternating() for _ in range(4)]
            jobs = [request(f"g{n}", prompt(20, n), n, max_tokens=20) for n in range(4)]
            others = asyncio.gather(*map(here.engine.generate, MIXED))
            answers = await asyncio.gather(
                *(here.engine.generate(job, guide=guide) for job, guide in zip(jobs, guides, strict=True))
            )
            await others
        for answer, guide in zip(answers, guides, strict=True):
            assert [token % 2 for token in answer.token_ids] == [place % 2 for place in range(20)]
            assert max(answer.token_ids) < VOCABULARY - 10 and guide.seen == list(answer.token_ids)

    run(body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompt_log_probabilities_are_the_trained_ones(dtype):
    """Bit for bit, over chunks, beside others, and after somebody cached the same prompt."""
    model = model_of(dtype=dtype)
    job = request("score", prompt(80, 8), 3, max_tokens=2, prompt_logprobs=True, top_logprobs=2, temperature=0.3)

    async def body() -> Completion:
        async with bench(model) as here:
            await here.all([request("cache", prompt(80, 8), 1, max_tokens=3)])
            return (await here.all([job, *MIXED]))[0]

    found: list[Completion] = []

    async def kept() -> None:
        found.append(await body())

    run(kept)
    answer = found[0]
    assert answer.prompt_logprobs is not None and answer.prompt_tops is not None
    as_answer = Completion(
        request_id="x", token_ids=ids(job.prompt_ids[1:]), logprobs=floats([0.0] * 79), versions=ids([0] * 79),
        finish_reason=FinishReason.STOP,
    )  # fmt: skip
    plain = request("x", job.prompt_ids[:1], max_tokens=99)
    assert np.array_equal(training_logprobs(model, plain, as_answer), np.array(answer.prompt_logprobs))
    assert len(answer.prompt_tops) == 79 and all(len(top.token_ids) == 2 for top in answer.prompt_tops)
    best = [top.logprobs[0] for top in answer.prompt_tops]
    assert all(value <= likeliest for value, likeliest in zip(answer.prompt_logprobs, best, strict=True))


def test_a_bias_outside_the_vocabulary_is_refused():
    async def body() -> None:
        async with bench() as here:
            with pytest.raises(EngineError, match="logit_bias for id 300"):
                await here.engine.generate(request("r", [1], max_tokens=1, logit_bias=((300, 1.0),)))

    run(body)
