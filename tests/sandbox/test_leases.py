"""Layers of images stay while a box or a snapshot stands on them, and not longer."""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from image_pieces import Image, make_tar, member, system_layer

from tandem.config.sections.sandbox import SandboxSection
from tandem.core.boxes import SandboxLimits, SandboxSpec
from tandem.core.errors import SandboxError, SandboxUnavailable
from tandem.record.sinks.nowhere import NowhereSink
from tandem.sandbox.backends.namespace import NamespaceBackend
from tandem.sandbox.images.library import ImageLibrary
from tandem.sandbox.images.templates import Template
from tandem.sandbox.leases import Leases, paths_of
from tandem.sandbox.manager import SandboxManager

NAMES = ("one", "two", "both")
HOLDERS = st.sampled_from(["a", "b", "c"])
DATA = [make_tar([member(f"f{number}", bytes(3000))]) for number in range(3)]
DIGESTS = [f"sha256:{hashlib.sha256(data).hexdigest()}" for data in DATA]
LAYERS = {"one": DIGESTS[:1], "two": DIGESTS[1:2], "both": DIGESTS}


class InUse(RuleBasedStateMachine):
    """Against a model: a layer is there as long as a template names it or a holder holds it, and goes with both."""

    @initialize()
    def begin(self) -> None:
        self.place = tempfile.TemporaryDirectory()
        self.library = ImageLibrary(Path(self.place.name))
        self.leases = Leases(lambda: asyncio.run(self.library.tidy()))
        self.named: set[str] = set()
        self.held: dict[str, set[str]] = {}

    @rule(name=st.sampled_from(NAMES))
    def pull(self, name: str) -> None:
        for digest, data in zip(DIGESTS, DATA, strict=True):
            if digest in LAYERS[name]:
                self.library.store.add(digest, [data])
        self.library.index.put(Template(build_id=f"b-{name}", layers=LAYERS[name]), name)
        self.named.add(name)

    @rule(name=st.sampled_from(NAMES), holder=HOLDERS)
    def start(self, name: str, holder: str) -> None:
        if name not in self.named:
            with pytest.raises(SandboxUnavailable):
                self.library.lease(name)
            return
        lease = self.library.lease(name)
        self.leases.hold(holder, paths_of(lease.root))
        lease.release()
        self.held.setdefault(holder, set()).update(LAYERS[name])

    @rule(holder=HOLDERS)
    def end(self, holder: str) -> None:
        self.leases.drop(holder)
        self.held.pop(holder, None)

    @rule(name=st.sampled_from(NAMES))
    def remove(self, name: str) -> None:
        assert self.library.remove(name) == (name in self.named)
        self.named.discard(name)

    @rule()
    def everything_must_go(self) -> None:
        """A bound of nothing: only what is in use stays, with the templates that need it."""
        used = set().union(*self.held.values())
        self.library.store.max_bytes = 0
        self.library.evict()
        self.library.store.max_bytes = 2**40
        self.named = {name for name in self.named if self.library.index.find(name) is not None}
        assert all(self.library.index.find(name) is None for name in NAMES if not used)

    @invariant()
    def what_is_there_is_what_is_needed(self) -> None:
        if not hasattr(self, "library"):
            return
        needed = set().union(*self.held.values(), *(LAYERS[name] for name in self.named))
        assert {digest for digest in DIGESTS if self.library.store.find(digest)} == needed

    def teardown(self) -> None:
        if hasattr(self, "leases"):
            self.leases.close()
            self.place.cleanup()


TestInUse = InUse.TestCase
TestInUse.settings = settings(
    max_examples=15, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_boxes_and_snapshots_hold_their_image(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("boxes of images as root only")
    library = ImageLibrary(tmp_path / "images")
    layout = Image([system_layer("cat", "ls")], compress=bytes, config={"User": "0"}).write_layout(tmp_path / "layout")
    spec = SandboxSpec(template="base:1", limits=SandboxLimits(memory_bytes=2**27, disk_bytes=2**24))

    async def gone() -> None:
        async with asyncio.timeout(30):
            while list((library.folder / "layers").glob("sha256-*")):
                await asyncio.sleep(0.01)

    async def main() -> None:
        await library.load(layout, name="base:1")
        manager = SandboxManager(
            SandboxSection(warm=0), NowhereSink(), backend=NamespaceBackend(), state=tmp_path / "state",
            templates=library,
        )
        await manager.open()
        box = await manager.create(spec)
        await box.files.write("note", "kept")
        kept = [await manager.snapshot(box.id, durable=durable) for durable in (False, True)]
        library.remove("base:1")
        with pytest.raises(SandboxUnavailable):
            await manager.create(spec)
        await manager.kill(box.id)
        for snapshot in kept:
            library.evict(unneeded=True)
            child = await manager.create(spec, snapshot=snapshot.id)
            assert await child.files.read("note") == b"kept"
            await manager.delete_snapshot(snapshot.id)
            library.evict(unneeded=True)
            result = await child.commands.run(["/bin/cat", "note"], timeout_s=30)
            assert result.stdout == "kept"
            await manager.kill(child.id)
        await gone()
        await manager.close()

    asyncio.run(main())


def test_what_is_gone_cannot_be_held(tmp_path: Path) -> None:
    library, leases = ImageLibrary(tmp_path), Leases()
    layer = library.store.add(DIGESTS[0], DATA[:1])
    library.store.remove(DIGESTS[0])
    with pytest.raises(SandboxError, match="not here any more"):
        leases.hold("a", [layer.path])
    leases.hold("a", [tmp_path / "upper", Path("/proc/self/fd/3")])  # not of an image
    leases.drop("a")
