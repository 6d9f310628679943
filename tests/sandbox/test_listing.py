"""Pages of boxes: each box that stays is on one page exactly."""

from hypothesis import given
from hypothesis import strategies as st

from tandem.core.boxes import SandboxSpec, SandboxState
from tandem.sandbox.listing import page_of
from tandem.sandbox.records import BoxRecord, OnTimeout


def record(number: int, created_at: float) -> BoxRecord:
    return BoxRecord(
        id=f"sbx-{number}", spec=SandboxSpec(), state=SandboxState.RUNNING, intent="",
        metadata={"odd": str(number % 2)},
        backend="folder", created_at=created_at, lifetime_s=60.0, on_timeout=OnTimeout.KILL, auto_resume=True,
    )


@given(
    times=st.lists(st.sampled_from([1.0, 1.1, 2.5, 1e9 + 1 / 3]), max_size=20), limit=st.integers(0, 6),
    leaving=st.integers(0, 19),
)
def test_a_box_that_stays_is_on_one_page(times: list[float], limit: int, leaving: int) -> None:
    records = [record(number, at) for number, at in enumerate(times)]
    seen: list[str] = []
    after = ""
    for _ in range(len(records) + 1):
        page = page_of(records, metadata={}, states=[], limit=limit, after=after)
        seen += [each.id for each in page.boxes]
        after = page.next
        records = [each for each in records if each.id != f"sbx-{leaving}"]  # one ends meanwhile
        if not after:
            break
    assert not after
    assert sorted(each for each in seen if each != f"sbx-{leaving}") == sorted(each.id for each in records)
    assert len(seen) == len(set(seen))


def test_only_what_was_asked_for() -> None:
    records = [record(number, 1.0) for number in range(5)]
    page = page_of(records, metadata={"odd": "1"}, states=[SandboxState.RUNNING], limit=9, after="")
    assert [each.id for each in page.boxes] == ["sbx-1", "sbx-3"]
    assert not page_of(records, metadata={}, states=[SandboxState.PAUSED], limit=9, after="").boxes
