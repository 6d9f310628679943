"""The races of ``benchmarks/sandbox_races.py``, a few rounds of each on every backend that can."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from folderbox import FolderBackend, processes_in

from benchmarks.sandbox_races import RACES, rounds
from tandem.config.sections.sandbox import SandboxSection
from tandem.core.boxes import SandboxSpec
from tandem.core.errors import SandboxUnavailable
from tandem.record.sinks.nowhere import NowhereSink
from tandem.sandbox.manager import SandboxManager


@pytest.mark.parametrize("name", RACES)
@pytest.mark.parametrize("kept", [False, True])
def test_on_folders(tmp_path: Path, name: str, kept: bool) -> None:
    async def main() -> None:
        backend = FolderBackend(tmp_path / "backend")
        if RACES[name][1] - backend.abilities:
            pytest.skip("a folder runs no interpreters")
        manager = SandboxManager(
            SandboxSection(warm=0), NowhereSink(), backend=backend, state=tmp_path / "state" if kept else None
        )
        ways = await rounds(manager, name, 15)
        assert ways.total() == 15 and not backend.boxes and backend.num_frozen == 0
        await manager.close()

    asyncio.run(main())
    assert processes_in(tmp_path) == []


@pytest.mark.parametrize("name", RACES)
def test_on_namespaces(tmp_path: Path, name: str) -> None:
    async def main() -> None:
        manager = SandboxManager(SandboxSection(warm=0), NowhereSink(), state=tmp_path / "state")
        try:
            await manager.check(SandboxSpec())
            missing = RACES[name][1] - manager.backend.abilities
            if missing:
                pytest.skip(f"the namespace backend cannot {', '.join(sorted(missing))} here")
            await rounds(manager, name, 10)
        except SandboxUnavailable as error:
            pytest.skip(f"no boxes here: {error.message}")
        finally:
            await manager.close()

    asyncio.run(main())
