from __future__ import annotations

from array import array

import pytest

from tandem.core.routes import Routes, missing
from tandem.core.types import Trajectory, floats, ids, mask
from tandem.core.wire import decode, encode


def routes(*numbers: int) -> Routes:
    return Routes(width=2, experts=array("h", numbers))


def test_rows_are_cut_and_joined_and_those_beyond_the_end_are_missing():
    made = routes(0, 1, 2, 3, 4, 5)
    assert len(made) == 3
    assert made.rows(1, 3) == routes(2, 3, 4, 5)
    assert made.rows(2, 5) == routes(4, 5, -1, -1, -1, -1)
    assert made.rows(7, 8) == missing(2, 1)
    assert routes(2, 3).behind(routes(0, 1)) == routes(0, 1, 2, 3)
    assert made.behind(None) is made


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="rows of 2"):
        routes(1, 2, 3)
    with pytest.raises(ValueError, match="type 'i'"):
        Routes(width=2, experts=ids([1, 2]))
    with pytest.raises(ValueError, match="width 1 cannot follow"):
        missing(1, 1).behind(routes(1, 2))
    with pytest.raises(ValueError, match="differ in length"):
        Trajectory(
            episode_id="e", group_id="g", token_ids=ids([1, 2]), loss_mask=mask([0, 1]), logprobs=floats([0, -1]),
            versions=ids([-1, 0]), num_prompt_tokens=1, routes=routes(1, 2),
        )  # fmt: skip


def test_routes_travel_with_their_stream():
    made = Trajectory(
        episode_id="e", group_id="g", token_ids=ids([1, 2]), loss_mask=mask([0, 1]), logprobs=floats([0, -1]),
        versions=ids([-1, 0]), num_prompt_tokens=1, routes=routes(0, 3, -1, -1),
    )  # fmt: skip
    assert decode(encode(made), Trajectory) == made
