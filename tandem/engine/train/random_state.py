"""The global random generators, saved and put back. Nothing of Tandem draws from them; a plug-in may."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import cast

import numpy as np
import torch


def random_state() -> dict[str, object]:
    """The state of every global generator, as plain values."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": [str(kind), np.asarray(keys, dtype=np.uint32).tobytes(), int(position), int(has_gauss), float(gauss)],
        "python": [version, list(internal), gauss_next],
    }


def set_random_state(state: Mapping[str, object]) -> None:
    """Put every global generator back where ``random_state`` found it."""
    torch.set_rng_state(torch.frombuffer(bytearray(cast(bytes, state["torch"])), dtype=torch.uint8))
    kind, keys, position, has_gauss, gauss = cast("list", state["numpy"])
    np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = cast("list", state["python"])
    random.setstate((version, tuple(internal), gauss_next))
