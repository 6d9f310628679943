"""A request's streams and how it ends."""

from __future__ import annotations

from typing import Any

from tandem.core.types import FinishReason, GenerateRequest, SamplingParams, ids
from tandem.engine.infer.request import Request


def made(**params: Any) -> Request:
    return Request(GenerateRequest(id="r", prompt_ids=ids([5, 6]), params=SamplingParams(**params)), eos_ids=[2])


def test_the_end_token_is_part_of_the_answer() -> None:
    request = made(max_tokens=5)
    request.append(7, -0.5, 3)
    assert request.finish_reason is None
    request.append(2, -1.5, 4)
    done = request.completion()
    assert done.finish_reason is FinishReason.STOP
    assert (list(done.token_ids), list(done.logprobs), list(done.versions)) == ([7, 2], [-0.5, -1.5], [3, 4])
    assert done.queue_s >= 0 and done.total_s >= 0


def test_length_and_ignored_end() -> None:
    request = made(max_tokens=2, ignore_eos=True, stop_token_ids=(9,))
    request.append(2, -1.0, 0)
    assert request.finish_reason is None
    request.append(3, -1.0, 0)
    assert request.completion().finish_reason is FinishReason.LENGTH
    own = made(max_tokens=2, ignore_eos=True, stop_token_ids=(9,))
    own.append(9, -1.0, 0)
    assert own.finish_reason is FinishReason.STOP


def test_a_stop_at_the_last_token_is_a_stop() -> None:
    request = made(max_tokens=1)
    request.append(2, -1.0, 0)
    assert request.finish_reason is FinishReason.STOP


def test_an_unfinished_request_returns_what_it_has() -> None:
    request = made(max_tokens=4)
    assert len(request.completion().token_ids) == 0
    request.append(7, -0.5, 1)
    done = request.completion()
    assert done.finish_reason is FinishReason.ABORT
    assert list(done.token_ids) == [7]
