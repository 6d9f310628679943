"""The packed layout: shared prefixes, key lists, and which row predicts which token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bare_methods import GRPO
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.types import ids
from tandem.engine.train.batch import lay_out, make_micro_batch
from tests.engine.train.tiny import sample

CPU = torch.device("cpu")


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9).map(ids), min_size=1, max_size=6), st.booleans())
def test_every_row_attends_to_its_own_past_in_order(streams, share) -> None:
    layout = lay_out(streams, share_prefixes=share, device=CPU)
    for stream, slots in zip(streams, layout.slots, strict=True):
        assert layout.ids_T[slots.astype(np.int64)].tolist() == list(stream)
        for t, slot in enumerate(slots):
            start, count = int(layout.keys.starts_T[slot]), int(layout.keys.counts_T[slot])
            assert int(layout.positions_T[slot]) == t and count == t + 1
            seen = layout.keys.slots_L[start : start + count].long()
            assert layout.ids_T[seen].tolist() == list(stream[: t + 1])
            assert seen[-1] == slot
    if share:
        assert len(layout.ids_T) == len({tuple(s[: i + 1]) for s in streams for i in range(len(s))})


def micro_batch(samples, **changes):
    arguments = {
        "num_loss_tokens_of_step": 10, "num_sequences_of_step": 2, "version": 3, "share_prefixes": True, "device": CPU,
    }  # fmt: skip
    return make_micro_batch(samples, GRPO, **(arguments | changes))


def test_case_4_siblings_learn_their_first_token_from_one_shared_row() -> None:
    batch = micro_batch([sample([7, 8, 1, 2], [0, 0, 1, 1]), sample([7, 8, 3], [0, 0, 1])])
    assert batch.layout.ids_T.tolist() == [7, 8, 1]  # the last loss token of a sample predicts nothing
    assert batch.predictions.rows_N.tolist() == [1, 2, 1]
    assert batch.predictions.targets_N.tolist() == [1, 2, 3]
    assert batch.sequence_N.tolist() == [0, 0, 1]


def test_shares_versions_and_temperatures_travel_along() -> None:
    first, second = sample([1, 2, 3], [0, 1, 1], version=3, temperature=0.5), sample([1, 4], [0, 1], version=2)
    batch = micro_batch([first, second])
    assert batch.rl_shares_N.tolist() == pytest.approx([1 / 4, 1 / 4, 1 / 2])
    assert batch.current_N.tolist() == [True, True, False]
    assert batch.predictions.temperature_N.tolist() == [0.5, 0.5, 1.0]


def test_masked_tokens_reach_no_loss() -> None:
    batch = micro_batch([sample([1, 2, 3, 4, 5], [0, 1, 0, 0, 1])])
    assert batch.predictions.targets_N.tolist() == [2, 5]
    assert batch.predictions.rows_N.tolist() == [0, 3]


def test_references_come_for_all_samples_or_none() -> None:
    import dataclasses

    from tandem.core.types import floats

    with_stream = dataclasses.replace(sample([1, 2], [0, 1]), reference_logprobs=floats([0.0, -1.5]))
    assert micro_batch([with_stream]).reference_N.tolist() == [-1.5]
    with pytest.raises(ValueError, match="1 of 2"):
        micro_batch([with_stream, sample([1, 2], [0, 1])])
