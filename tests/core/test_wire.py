"""Records to bytes and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.errors import RecordError
from tandem.core.types import Task, Trajectory, floats, ids, mask
from tandem.core.wire import decode, derive_seed, digest, encode, storable


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans(), st.floats(width=32, allow_nan=False))))
def test_packed_streams_come_back_bit_equal(rows):
    record = Trajectory(
        episode_id="e", group_id="g", num_prompt_tokens=0, token_ids=ids([row[0] for row in rows]),
        loss_mask=mask([row[1] for row in rows]), logprobs=floats([row[2] for row in rows]),
        versions=ids([0] * len(rows)),
    )  # fmt: skip
    assert decode(encode(record), Trajectory) == record
    assert encode(decode(encode(record), Trajectory)) == encode(record)


def test_free_form_data_comes_back():
    task = Task(id="t", messages=(), private={"answer": 3, "list": [1, {"a": None}]}, files={"a": "b"})
    assert decode(encode(task), Task) == task


def test_other_formats_and_broken_bytes_are_refused():
    good = encode(Task(id="t", messages=()))
    for data in (b"", bytes([99]) + good[1:]):
        with pytest.raises(RecordError, match="has format"):
            decode(data, Task)
    for data in (good[:-1], good[:1] + b"\xc1", encode(3)):
        with pytest.raises(RecordError, match="broken Task record"):
            decode(data, Task)


def test_digests_and_seeds_are_fixed_for_ever():
    """Recorded runs depend on both."""
    assert digest(b"")[:16] == "0e5751c026e543b2"
    assert derive_seed("run", 0) == derive_seed("run", 0) != derive_seed("run", 1)
    assert derive_seed("ab", "c") != derive_seed("a", "bc")
    assert 0 <= derive_seed("x") < 2**63


def test_storable_text_can_be_recorded_and_is_otherwise_as_it_was():
    task = Task(id=storable("a\ud800b ü 😀"), messages=())
    assert decode(encode(task), Task).id == "a?b ü 😀"
