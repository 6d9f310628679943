"""When a request that the engine gave up can go on, and as what.

An engine may end running requests when new weights are published (``engine.infer.at_publish = "abort"``) and returns
what they have. Owns: telling such an end from any other, and the request that goes on from there.
"""

from __future__ import annotations

from dataclasses import replace

from tandem.core.types import Completion, FinishReason, GenerateRequest


def resumed(request: GenerateRequest, completion: Completion, *, version: int) -> GenerateRequest | None:
    """``request`` from behind what ``completion`` has of its answer, with the tokens' own log-probabilities and
    versions; None where the answer ended, or was aborted by somebody rather than by weights newer than its own.
    ``version``: what the engine serves now."""
    if completion.finish_reason is not FinishReason.ABORT or not len(completion.versions):
        return None
    return None if completion.versions[-1] == version else replace(request, so_far=completion)
