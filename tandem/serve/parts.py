"""What comes with a piece of an answer's text: the tokens that end in it.

Owns: which tokens a chunk has. Invariant: the parts of all chunks of a choice, joined, are the whole answer's part. A
token comes when all of its text is out, or will never be; what nothing follows (an end token, what a stop string cut)
comes with the last chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.types import Completion, Ids, Sampled, Top, floats, ids

Scored = Sampled | Completion
"""Who has a prompt's log-probabilities, if they were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Tokens with their log-probabilities, the likeliest ones beside them (None: not asked for), and the character of
    the answer's text at which each begins."""

    token_ids: Ids
    logprobs: Sequence[float | None]
    tops: Sequence[Top | None]
    places: Sequence[int]

    def behind(self, other: Part) -> Part:
        """Both, the other one first."""
        return Part(
            token_ids=other.token_ids + self.token_ids,
            logprobs=[*other.logprobs, *self.logprobs],
            tops=[*other.tops, *self.tops],
            places=[*other.places, *self.places],
        )


def whole_part(completion: Completion, num_tokens: int, places: Sequence[int]) -> Part:
    """The first ``num_tokens`` of a completion, each with its place."""
    return Part(
        token_ids=completion.token_ids[:num_tokens],
        logprobs=completion.logprobs[:num_tokens],
        tops=[None] * num_tokens if completion.tops is None else completion.tops[:num_tokens],
        places=places[:num_tokens],
    )


class Telling:
    """The tokens of one choice while it is made, to be told part by part."""

    def __init__(self) -> None:
        self._token_ids, self._logprobs, self._tops = ids(), floats(), list[Top | None]()
        self._told = 0
        self.scored: Scored | None = None

    def hear(self, new: Sampled) -> None:
        self._token_ids.extend(new.token_ids)
        self._logprobs.extend(new.logprobs)
        self._tops.extend(new.tops or [None] * len(new.token_ids))
        if self.scored is None and new.prompt_logprobs is not None:
            self.scored = new

    def end(self, completion: Completion) -> None:
        """All of them are known: also those that nobody was told of one by one."""
        self._token_ids, self._logprobs = completion.token_ids, completion.logprobs
        self._tops = list(completion.tops or [None] * len(completion.token_ids))
        self.scored = self.scored or completion

    def part(self, stop: int, places: Sequence[int]) -> Part:
        """Those before the token number ``stop`` that were not told yet."""
        told = slice(self._told, stop)
        self._told = max(self._told, stop)
        return Part(
            token_ids=self._token_ids[told],
            logprobs=self._logprobs[told],
            tops=self._tops[told],
            places=places[told],
        )
