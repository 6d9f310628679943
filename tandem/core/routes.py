"""Which experts each token of a stream went through, where a mixture of experts was sampled.

Invariant: one row a token, ``width`` numbers in it, or all of it ``MISSING``: what nobody recorded is never expert 0.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

MISSING = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """Rows of ``width`` expert numbers, packed as 16-bit integers: layer after layer of those that have experts, in
    each the token's experts in ascending order. Row t is of token t as input, so the last token of an answer, which
    the model did not read, has none."""

    width: int
    experts: array

    def __post_init__(self) -> None:
        if self.experts.typecode != "h" or self.width < 1 or len(self.experts) % self.width:
            raise ValueError(
                f"routes: {len(self.experts)} numbers of type {self.experts.typecode!r} in rows of {self.width}"
            )

    def __len__(self) -> int:
        return len(self.experts) // self.width

    def rows(self, start: int, stop: int) -> Routes:
        """The rows from ``start`` to before ``stop``; rows beyond the end are missing."""
        cut = self.experts[start * self.width : stop * self.width]
        return Routes(width=self.width, experts=cut + missing(self.width, stop - start).experts[len(cut) :])

    def behind(self, other: Routes | None) -> Routes:
        """These rows after those of ``other``."""
        if other is None:
            return self
        if other.width != self.width:
            raise ValueError(f"routes of width {self.width} cannot follow those of width {other.width}")
        return Routes(width=self.width, experts=other.experts + self.experts)


def missing(width: int, count: int) -> Routes:
    """Rows of tokens whose experts nobody recorded."""
    return Routes(width=width, experts=array("h", [MISSING]) * (width * count))
