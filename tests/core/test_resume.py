"""Which ends are a publish's."""

from __future__ import annotations

import pytest

from tandem.core.resume import resumed
from tandem.core.types import Completion, FinishReason, GenerateRequest, SamplingParams, floats, ids

REQUEST = GenerateRequest(id="r", prompt_ids=ids([1]), params=SamplingParams(), seed=4)


def made(versions: list[int], reason: FinishReason) -> Completion:
    logprobs = floats(-0.5 for _ in versions)
    return Completion(request_id="r", token_ids=ids(versions), logprobs=logprobs, versions=ids(versions),
                      finish_reason=reason)  # fmt: skip


def test_newer_weights_let_it_go_on_with_what_it_has() -> None:
    part = made([3, 4], FinishReason.ABORT)
    again = resumed(REQUEST, part, version=5)
    assert again is not None and again.so_far is part and (again.id, again.seed) == ("r", 4)


@pytest.mark.parametrize(
    ("versions", "reason"),
    [([3, 5], FinishReason.ABORT), ([], FinishReason.ABORT), ([3], FinishReason.STOP), ([3], FinishReason.LENGTH)],
)
def test_other_ends_are_ends(versions: list[int], reason: FinishReason) -> None:
    assert resumed(REQUEST, made(versions, reason), version=5) is None
