"""Versions and digests."""

from __future__ import annotations

import pytest
import torch

from tandem.core.errors import EngineError
from tandem.engine.weights import PublishedWeights
from tests.engine.train.tiny import tiny_model


def test_every_change_has_its_number() -> None:
    weights = PublishedWeights(tiny_model())
    assert (weights.version, weights.current.step) == (0, 0)
    assert (weights.bump(1).number, weights.bump(7).number) == (1, 2)
    assert weights.current.step == 7
    assert weights.set(40, 12).number == weights.version == 40


def test_the_digest_names_every_byte() -> None:
    weights, twin = PublishedWeights(tiny_model()), PublishedWeights(tiny_model())
    before = weights.digest()
    assert before == twin.digest() != PublishedWeights(tiny_model(dtype=torch.bfloat16)).digest()
    for parameter in weights.model.parameters():
        with torch.no_grad():
            parameter.view(-1)[-1] += 1
        changed = weights.digest()
        assert changed != before
        before = changed


def test_a_bit_that_changed_in_a_packed_copy_ends_the_publish_and_the_version_stays() -> None:
    model = tiny_model(dtype=torch.bfloat16)
    weights = PublishedWeights(model)
    served = weights.bump(1)
    packable = model.packable()
    if not packable:
        pytest.skip("no packed projections on this machine")
    assert {name for name in packable if ".mlp." in name or ".attention." in name}
    name = sorted(packable)[1]
    model.ops.packed(packable[name]).view(torch.uint8)[77] ^= 4
    with pytest.raises(EngineError, match=f"first {name}"):
        weights.verify()
    with torch.no_grad():
        packable[name].mul_(2.0)
    with pytest.raises(EngineError, match=f"first {name}"):
        weights.bump(2)
    assert weights.current == served


def test_weights_held_packed_have_a_digest_too_and_a_changed_bit_is_found() -> None:
    model = tiny_model(dtype=torch.bfloat16)
    if not model.packable():
        pytest.skip("no packed projections on this machine")
    model.hold_packed()
    weights = PublishedWeights(model)
    before = weights.digest()
    assert before == weights.digest()
    name = sorted(model.packable())[0]
    model.ops.packed(model.packable()[name]).view(torch.uint8)[-1] ^= 1
    with pytest.raises(EngineError, match=f"first {name}"):
        weights.verify()
