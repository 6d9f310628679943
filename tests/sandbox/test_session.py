"""Files of a box: metadata, listings, moves and removals, in the box as its user."""

from __future__ import annotations

import asyncio
import stat

import pytest

from tandem.core.boxes import SandboxSpec
from tandem.sandbox.backends.namespace import NamespaceBackend
from tandem.sandbox.session import Session


def test_entries_are_told_moved_and_removed_and_no_link_is_followed() -> None:
    async def main() -> None:
        backend = NamespaceBackend()
        session = Session("one", SandboxSpec(), await backend.create(SandboxSpec(), timeout_s=20),
                          on_end=lambda *_: None)
        files = session.files
        await files.write("a/b/text", b"12345")
        await session.commands.run("ln -s /usr a/out; chmod 600 a/b/text", timeout_s=30)
        entry = await files.stat("a/b/text")
        assert (stat.filemode(entry.mode), entry.size_bytes, entry.uid) == ("-rw-------", 5, 1000)
        assert entry.modified_ns > 10**18
        link = await files.stat("a/out")
        assert stat.S_ISLNK(link.mode) and link.target == "/usr"
        home = "/home/agent"
        assert [e.path for e in await files.entries("a")] == [f"{home}/a/b", f"{home}/a/out"]
        assert [e.path for e in await files.entries("a", depth=9)] == [
            f"{home}/a/b", f"{home}/a/b/text", f"{home}/a/out"
        ]
        await files.make_folder("new/deep")
        with pytest.raises(FileExistsError):
            await files.make_folder("new/deep")
        await files.move("a/b/text", "moved/here")
        assert await files.read("moved/here") == b"12345"
        await session.commands.run("mkdir keep; touch keep/x; ln -s ../keep a/kept", timeout_s=30)
        await files.remove("a")
        with pytest.raises(FileNotFoundError):
            await files.stat("a")
        assert await files.list("keep") == ["x"]
        with pytest.raises(OSError):
            await files.remove("/usr/bin/env")
        with pytest.raises(FileNotFoundError):
            await files.entries("nowhere")
        await backend.close()

    asyncio.run(main())
