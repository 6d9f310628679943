"""A server that makes boxes in every state, says which, and waits to be killed: ``killed_server.py FOLDER``."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from folderbox import FolderBackend

from tandem.config.sections.sandbox import SandboxSection
from tandem.core.boxes import SandboxSpec
from tandem.sandbox.manager import SandboxManager
from tandem.sandbox.records import Life, OnTimeout, PauseMode


class Nowhere:
    def emit(self, event: object, *, cause: int = -1) -> int:
        return 0

    def put_blob(self, data: bytes) -> str:
        return ""


async def main(folder: Path) -> None:
    backend = FolderBackend(folder / "backend")
    manager = SandboxManager(SandboxSection(warm=0), Nowhere(), backend=backend, state=folder / "state")
    await manager.open()
    names = ["running", "warm", "files", "pausing", "resuming", "snapshotting", "forking", "due", "saved"]
    life = Life(metadata={"for": "test"}, on_timeout=OnTimeout.PAUSE)
    boxes = {name: await manager.create(SandboxSpec(), life=life) for name in names}
    for name, session in boxes.items():
        await session.files.write("name", name)
    await manager.pause(boxes["warm"].id)
    await manager.pause(boxes["files"].id, mode=PauseMode.FILES)
    await manager.pause(boxes["resuming"].id)
    snapshot = await manager.snapshot(boxes["saved"].id, name="base")
    await manager.fork(boxes["saved"].id, 1)  # a child on a snapshot in memory
    await manager.kill(boxes["saved"].id)
    manager.set_timeout(boxes["due"].id, 0.5)
    half_done = []
    for verb, name in (("pause", "pausing"), ("resume", "resuming"), ("snapshot", "snapshotting"), ("fork", "forking")):
        backend.slow, backend.waiting = {"create" if verb == "fork" else verb}, asyncio.Event()
        arguments = (boxes[name].id, 2) if verb == "fork" else (boxes[name].id,)
        half_done.append(asyncio.create_task(getattr(manager, verb)(*arguments)))
        await backend.waiting.wait()
    ids = {name: session.id for name, session in boxes.items()}
    print(json.dumps({**ids, "snapshot": snapshot.id}), flush=True)
    await asyncio.gather(*half_done)


asyncio.run(main(Path(sys.argv[1])))
