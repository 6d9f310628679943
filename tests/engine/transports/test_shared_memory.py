"""Two ends of shared memory: what is sent is what is read, and what was changed on the way is found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tandem.core.errors import EngineError, PluginError
from tandem.engine.transports.shared_memory import TRANSPORT, SharedMemoryReceiver, SharedMemorySender
from tandem.engine.transports.transport import check_arrival, digest_of, find_transport, layout_of
from tests.engine.train.tiny import tiny_model

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd_create on this system")


def ends(tensors: dict[str, torch.Tensor]) -> tuple[SharedMemorySender, SharedMemoryReceiver]:
    layout = layout_of(tensors)
    sender = TRANSPORT.sender(layout, tensors)
    return sender, TRANSPORT.receiver(layout, [os.dup(file) for file in sender.files])


def test_each_slot_has_what_was_sent_to_it_and_keeps_it() -> None:
    live = dict(tiny_model(dtype=torch.bfloat16).named_parameters())
    sender, receiver = ends(live)
    first = sender.send(0)
    before = {name: tensor.detach().clone() for name, tensor in live.items()}
    with torch.no_grad():
        for tensor in live.values():
            tensor.add_(1)
    second = sender.send(1)
    for slot, wanted, sums in ((0, before, first), (1, live, second)):
        came = receiver.receive(slot)
        assert list(came) == list(wanted) and all(torch.equal(came[name], wanted[name]) for name in wanted)
        check_arrival(came, sums, version=slot)
    assert (first != second).any(1).all()
    layout = layout_of(live)
    assert digest_of(layout, first) != digest_of(layout, second) == digest_of(layout, sender.send(0))


@pytest.mark.parametrize("place", [0, -1])
def test_a_tensor_that_changed_on_the_way_is_named(place: int) -> None:
    sender, receiver = ends(dict(tiny_model().named_parameters()))
    sums = sender.send(0)
    came = receiver.receive(0)
    name = list(came)[place]
    came[name].view(-1)[-1] += 1e-3
    with pytest.raises(EngineError, match=f"weights 7 did not arrive whole: 1 of .* first {name}"):
        check_arrival(came, sums, version=7)


def test_what_needs_no_gradient_is_moved_once_and_again_after_its_memory_was_given_back() -> None:
    live = {"base": torch.randn(100, 64), "adapter": torch.randn(8, 64).requires_grad_(True)}
    sender, receiver = ends(live)
    sender.send(0)
    assert receiver.receive(0)["base"].data_ptr() == receiver.receive(1)["base"].data_ptr()
    marked = receiver.receive(0)["base"]
    marked[0, 0] = 5.0
    sender.send(1)
    assert marked[0, 0] == 5.0 and torch.equal(receiver.receive(1)["adapter"], live["adapter"])
    sender.release()
    assert not marked.any()
    check_arrival(receiver.receive(1), sender.send(1), version=1)


def test_nothing_of_it_is_left_when_both_ends_are_closed() -> None:
    def memories() -> int:
        return Path("/proc/self/maps").read_text().count("tandem-weights (deleted)")

    before = memories()
    sender, receiver = ends({"x": torch.randn(64)})
    assert memories() > before
    for file in sender.files:
        os.fstat(file)
    sender.close()
    sender.close()
    receiver.close()
    del sender, receiver
    assert memories() == before


def test_what_cannot_be_moved_is_refused() -> None:
    with pytest.raises(EngineError, match="x lies on meta"):
        layout_of({"x": torch.empty(4, device="meta")})
    with pytest.raises(PluginError, match="no transport named 'shared_memry'"):
        find_transport("shared_memry")
    small, large = layout_of({"x": torch.zeros(4)}), layout_of({"x": torch.zeros(4000)})
    sender = TRANSPORT.sender(small, {"x": torch.zeros(4)})
    with pytest.raises(EngineError, match="the weights need"):
        TRANSPORT.receiver(large, sender.files)
    sender.close()
