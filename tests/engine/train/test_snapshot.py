"""Tensors held while others write them."""

from __future__ import annotations

import threading

import pytest
import torch

from tandem.engine.train.snapshot import Held, hold, keep_all


def test_what_was_held_is_read_whatever_is_written_meanwhile() -> None:
    live = {name: torch.full((5,), float(number)) for number, name in enumerate("abc")}
    held = hold(live)
    with held["a"].reading() as first:  # before the write: the live tensor itself, no copy
        assert first.data_ptr() == live["a"].data_ptr()
    assert keep_all(held.values()) == 2 * 5 * 4 and keep_all(held.values()) == 0
    for tensor in live.values():
        tensor.fill_(9.0)
    for name, wanted in (("b", 1.0), ("c", 2.0)):
        with held[name].reading() as kept:
            assert kept.tolist() == [wanted] * 5
    with pytest.raises(ValueError, match="read before"), held["b"].reading():
        pass
    assert held["a"].shape == torch.Size([5]) and held["a"].dtype is torch.float32


def test_who_writes_waits_for_the_tensor_that_is_being_read() -> None:
    tensor = torch.zeros(3)
    held = Held(tensor)
    kept = threading.Event()

    def write() -> None:
        held.keep()
        tensor.fill_(1.0)
        kept.set()

    with held.reading() as read:
        writer = threading.Thread(target=write)
        writer.start()
        assert not kept.wait(0.05) and read.tolist() == [0.0] * 3
    writer.join(timeout=30)
    assert kept.is_set() and tensor.tolist() == [1.0] * 3
