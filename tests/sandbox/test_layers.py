"""Long chains of durable snapshots are kept short, and no kill loses one that was told to be safe."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import chained
import pytest
from chained import MOST_LAYERS, Chain
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.errors import SnapshotCorrupt

PATHS = st.sampled_from(["a", "b", "d/a", "d/b", "e/a"])
CHANGES = st.dictionaries(PATHS, st.none() | st.text("xyz", max_size=3), min_size=1, max_size=4)
MOVES = st.lists(st.tuples(CHANGES, st.integers(0, 20), st.booleans()), min_size=1, max_size=14)


@settings(max_examples=20, deadline=None)
@given(moves=MOVES)
def test_a_chain_stays_short_and_shows_what_it_did(moves: list[tuple[dict[str, str | None], int, bool]]) -> None:
    """Any tree of snapshots, some deleted on the way: each shows its files, and the store holds what they name."""

    async def main(folder: Path) -> None:
        chain = Chain(folder)
        contents: dict[str, dict[str, str]] = {}
        for changes, which, deleting in moves:
            known = list(contents)
            parent = known[which % len(known)] if known and which < 5 else known[-1] if known else ""
            record = await chain.add(parent, changes)
            assert len(record.layers) <= MOST_LAYERS
            merged = {**contents.get(parent, {}), **changes}
            contents[record.id] = {path: text for path, text in merged.items() if text is not None}
            if deleting and len(contents) > 2:
                gone = list(contents)[which % (len(contents) - 1)]
                await chain.tree.delete(gone)
                del contents[gone]
            named = {blob for each in chain.table.snapshots() for blob in each.blobs()}
            assert chain.store.names() == named
        for snapshot_id, content in contents.items():
            assert await chain.content(snapshot_id) == content
        for snapshot_id in contents:
            await chain.tree.delete(snapshot_id)
        assert chain.store.names() == set()
        chain.table.close()

    with tempfile.TemporaryDirectory() as name:
        asyncio.run(main(Path(name)))


def test_siblings_share_what_their_chain_became(tmp_path: Path) -> None:
    async def main() -> None:
        chain, parent = Chain(tmp_path), ""
        for number in range(MOST_LAYERS):
            parent = (await chain.add(parent, {f"f{number}": "x"})).id
        siblings = [await chain.add(parent, {"mine": str(number)}) for number in range(3)]
        assert len({each.layers[1].blob for each in siblings}) == 1 and {len(each.layers) for each in siblings} == {2}
        assert len(chain.store.names()) == MOST_LAYERS + 1 + 3
        path = next(tmp_path.glob(f"blobs/*/{siblings[0].layers[1].blob}"))
        path.write_bytes(path.read_bytes().replace(b"x", b"y", 1))
        subprocess.run(["rm", "-r", str(tmp_path / "state/layers")], check=True)
        chain.table.close()
        later = Chain(tmp_path)
        with pytest.raises(SnapshotCorrupt, match=siblings[0].layers[1].blob):
            await later.content(siblings[1].id)
        later.table.close()

    asyncio.run(main())


def test_kills_in_the_middle_lose_nothing(tmp_path: Path) -> None:
    dice = random.Random(7)
    safe: dict[str, dict[str, str]] = {}
    gone: set[str] = set()
    for _ in range(6):
        process = subprocess.Popen(
            [sys.executable, chained.__file__, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]  # it works
        time.sleep(dice.random() * 0.2)  # anywhere in the middle of something
        process.kill()
        lines += process.stdout.read().splitlines()
        process.wait(timeout=30)
        for line in lines:
            if line.endswith(("}]", "}]\n", "null]", "null]\n")):
                snapshot_id, content = json.loads(line)
                if content is None:
                    gone.add(snapshot_id)
                else:
                    safe[snapshot_id] = content

    async def main() -> None:
        chain = Chain(tmp_path)
        await chain.tree.collect()
        there = {record.id for record in chain.tree.kept()}
        assert set(safe) - gone <= there and len(there) <= len(safe) - len(gone) + 6 * 2
        for snapshot_id in set(safe) & there:
            assert await chain.content(snapshot_id) == safe[snapshot_id]
        named = {blob for record in chain.table.snapshots() for blob in record.blobs()}
        assert chain.store.names() == named and max(len(each.layers) for each in chain.tree.kept()) <= MOST_LAYERS
        assert not list((tmp_path / "state/scratch").iterdir())
        chain.table.close()

    assert len(safe) > 10
    asyncio.run(main())
