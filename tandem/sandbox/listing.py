"""A list of boxes in pages.

Owns: their order (the oldest first) and the token of a place in it. Invariant: a box that is there all the time is on
one page exactly, whatever begins and ends meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tandem.core.boxes import SandboxState
from tandem.sandbox.records import BoxRecord, Page

PAGE_BOXES = 100


def page_of(
    records: Iterable[BoxRecord], *, metadata: Mapping[str, str], states: Sequence[SandboxState], limit: int, after: str
) -> Page:
    """Those with all pairs of ``metadata`` and in one of ``states`` (empty: any); ``after`` is the ``next`` of the
    page before. Raises ValueError: it is none."""
    wanted = metadata.items()
    found = sorted(
        (record for record in records
         if wanted <= record.metadata.items() and (not states or record.state in states)),
        key=_place,
    )
    if after:
        place = _place_of(after)
        found = [record for record in found if _place(record) > place]
    page = found[:max(1, limit)]
    more = len(found) > len(page)
    return Page(boxes=page, next=f"{page[-1].created_at!r}/{page[-1].id}" if more else "")


def _place(record: BoxRecord) -> tuple[float, str]:
    return record.created_at, record.id


def _place_of(token: str) -> tuple[float, str]:
    created_at, _, sandbox_id = token.partition("/")
    try:
        return float(created_at), sandbox_id
    except ValueError:
        raise ValueError(f"{token!r} is no page of a list") from None
