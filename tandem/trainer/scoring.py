"""Streams that samples need before they are trained on: log-probabilities of reference and old weights, values."""

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


async def with_old(samples: Sequence[Sample], score: Score) -> list[Sample]:
    """The samples with the log-probability of every token under the weights that the step begins with."""
    streams = await score([sample.trajectory for sample in samples])
    return [dataclasses.replace(sample, old_logprobs=stream) for sample, stream in zip(samples, streams, strict=True)]


async def with_values(samples: Sequence[Sample], values: Score) -> list[Sample]:
    """The samples with a critic's value of what comes before every token."""
    streams = await values([sample.trajectory for sample in samples])
    return [dataclasses.replace(sample, values=stream) for sample, stream in zip(samples, streams, strict=True)]
