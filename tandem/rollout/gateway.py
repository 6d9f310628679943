"""The contract of what serves an episode's model to an agent that brings its own loop.

Implemented where a web server may be named (``app``); a driver without one refuses such workflows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from tandem.core.types import Limits, SamplingParams, StopReason, Turn
from tandem.envs.workflow import Endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """``over`` tells which limit refused a request of this episode, if one did."""

    endpoint: Endpoint
    over: Callable[[], StopReason | None]


class Gateway(Protocol):
    def serve(
        self,
        episode_id: str,
        *,
        group: str,
        priority: int,
        params: SamplingParams,
        seed: int,
        limits: Limits,
        on_turn: Callable[[Turn, int], None],
    ) -> AbstractAsyncContextManager[Served]:
        """Serve one episode; the requests of one ``group`` share one line of the engine, and a step of ``priority``
        doubles that line's share. ``params`` are what every request is sampled with, ``on_turn`` hears each answer and
        how many of its prompt's tokens were cached."""
        ...
