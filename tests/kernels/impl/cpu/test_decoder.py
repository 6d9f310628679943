"""Which shapes the layers in one call take (that they are right is a matter of ``tests/models/test_fused.py``)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.kernels.impl.cpu.decoder import Shape

SMALL = Shape(
    hidden=64, heads=4, groups=2, size=16, mlp=96, eps=1e-5, scale=0.25, offset=False, activation="silu"
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "fits"), [({}, True), ({"mlp": 75}, False), ({"hidden": 48}, False), ({"size": 8}, False),
                         ({"heads": 3, "groups": 3}, False), ({"heads": 6}, True)],
)  # fmt: skip
def test_only_whole_tiles_fit(change: dict[str, int], fits: bool) -> None:
    assert replace(SMALL, **change).fits is fits
