"""Long chains of layers become one that shows the same, over whatever lies below."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest
from box_pieces import OLDER, SPEC, backend, said

from tandem.core.errors import SnapshotError
from tandem.sandbox.backends.merge import MERGE_AT, merge_layers
from tandem.sandbox.backends.mounts import MountChoice

LOOK = "find . -printf '%p %y %m %s %l %n\\n' | grep -v '^. d' | sort; find . -type f -exec sha1sum {} + | sort"
MOVES = (
    "mkdir -p {a}/{b}; echo {n} > {a}/{b}/f{n}", "rm -rf {a}", "rm -rf {a}; mkdir {a}; echo new > {a}/only",
    "rm -rf {a}; echo file > {a}", "ln -sfn {b} {a}/link", "mv {a} {b}/moved{n}", "chmod 700 {a}",
    "ln {a}/only {b}/hard{n}", "rm -rf {a}; mkdir {a} && rmdir {a} && mkdir {a}",
)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mounts", [None, MountChoice(ways=OLDER)])
def test_what_a_box_sees_stays_the_same(seed: int, mounts: MountChoice | None) -> None:
    draw = random.Random(seed)

    async def main() -> None:
        async with backend(mounts=mounts) as made:
            mother = await made.create(SPEC, timeout_s=20)
            await said(mother, "mkdir -p a/b b/c c; echo below > a/below; echo x > a/b/deep; echo only > b/only")
            box = await made.create(SPEC, root=(await mother.snapshot()).root, timeout_s=20)  # over layers not its own
            seen = []
            for number in range(MERGE_AT * 2 + 8):
                move = draw.choice(MOVES).format(a=draw.choice("abc"), b=draw.choice("abc"), n=number)
                await said(box, f"{{ {move}; }} 2>/dev/null; true")
                frozen = await box.snapshot()
                seen.append((await said(box, LOOK), frozen))
                if box._merging is not None:
                    await box._merging
                assert len(box._root.layers) <= MERGE_AT + 2
            assert await said(box, LOOK) == seen[-1][0]
            for text, frozen in (seen[5], seen[MERGE_AT], seen[-1]):
                child = await made.create(SPEC, root=frozen.root, timeout_s=20)
                assert await said(child, LOOK) == text
            last = await made.create(SPEC, root=(await box.snapshot()).root, timeout_s=20)
            assert await said(last, LOOK) == seen[-1][0]

    asyncio.run(main())


def test_a_chain_has_no_end() -> None:
    async def main() -> None:
        async with backend() as made:
            box = await made.create(SPEC, timeout_s=20)
            for number in range(300):  # a stack of layers holds 256
                await said(box, f"echo {number} > n")
                await (await box.snapshot()).release()
            assert await said(box, "cat n") == "299"
            if box._merging is not None:
                await box._merging
            names = os.listdir(f"/proc/{made.keeper.pid}/fd")
            assert len(names) < 3 * MERGE_AT  # layers that nobody needs are let go

    asyncio.run(main())


def test_another_file_system_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    with pytest.raises(SnapshotError, match="gone"):
        merge_layers(str(tmp_path), ["one"], "made", device=os.stat(tmp_path).st_dev + 1)
    assert not (tmp_path / "made").exists()
