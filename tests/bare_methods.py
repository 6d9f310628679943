"""GRPO without its reference: for tests of what is the same with one, where a second model would only take time."""

from __future__ import annotations

import dataclasses

from tandem.algorithms.catalog import grpo

GRPO = dataclasses.replace(grpo.GRPO, kl_weight=0.0)
