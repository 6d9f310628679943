"""Streams that samples need before they are trained on: log-probabilities under the reference weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence

from tandem.core.types import Floats, Sample, Trajectory

Score = Callable[[Sequence[Trajectory]], Awaitable[list[Floats]]]


async def with_reference(samples: Sequence[Sample], score: Score) -> list[Sample]:
    """The samples with the reference's log-probability of every token; ``score`` holds the frozen weights."""
    streams = await score([sample.trajectory for sample in samples])
    return [
        dataclasses.replace(sample, reference_logprobs=stream) for sample, stream in zip(samples, streams, strict=True)
    ]
