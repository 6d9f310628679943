"""Versions and digests."""

from __future__ import annotations

import torch

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
