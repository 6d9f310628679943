"""Rows of the seats."""

from __future__ import annotations

import numpy as np

from tandem.core.types import GenerateRequest, SamplingParams, ids
from tandem.engine.infer.request import NO_SEAT, Request
from tandem.engine.infer.seats import Seats


def test_slots_follow_the_blocks() -> None:
    seats = Seats(2, 10, 4)
    assert seats.width == 12
    request = Request(GenerateRequest(id="r", prompt_ids=ids(range(6)), params=SamplingParams(max_tokens=4)))
    request.blocks = [5, 2]
    seats.take(request)
    seats.extend(request, 2, [9])
    expected = [20, 21, 22, 23, 8, 9, 10, 11, 36, 37, 38, 39]
    assert np.array_equal(seats.slots_MN[request.seat], expected)
    seats.leave(request)
    assert (seats.num_free, request.seat) == (2, NO_SEAT)


def test_parameters_sit_down_with_their_request() -> None:
    seats = Seats(3, 8, 4)
    for seed, temperature in ((-1, 0.5), (2**63 - 1, 0.0)):
        params = SamplingParams(max_tokens=1, temperature=temperature, top_p=0.9, top_k=7)
        request = Request(GenerateRequest(id="r", prompt_ids=ids([1]), params=params, seed=seed))
        seats.take(request)
        row = request.seat
        assert (seats.temperature_M[row], seats.top_k_M[row]) == (temperature, 7)
        assert seats.top_p_M[row] == 0.9
        assert int(seats.seed_M[row]) == seed % 2**64
