"""The root of a gVisor box: made on the host as every box's, on layers, with a quota of its own. gVisor keeps nothing
of it back, so what the box writes is there to be copied.

Owns: the message that makes a root, and the copies of boxes' files, each until its snapshot was released and no box
stands on it. Invariant: a folder that a root is made of stays as it is and where it is.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tandem.core.boxes import SandboxSpec
from tandem.core.errors import SandboxError
from tandem.sandbox.backend import Layer, Root
from tandem.sandbox.backends.frames import create_message, pack_steps
from tandem.sandbox.backends.frozen import copy_layer
from tandem.sandbox.backends.gvisor_bundle import PROGRAM, THE_KERNELS
from tandem.sandbox.backends.mounts import MountChoice
from tandem.sandbox.backends.template import WORK_ID, Step, Template

IDS = 65536
MESSAGE_MAX = 200 * 1024  # a socket's usual buffer
MIN_INODES, MAX_INODES = 1024, 1 << 18


class Ground:
    """What makes one root: ``words`` go before the command that finds it at ``place``, with ``descriptor`` open."""

    def __init__(self, folder: Path, agent: Path, template: Template, root: Root, spec: SandboxSpec, *, fresh: bool):
        """``folder`` has the empty folders ``hidden`` and ``root``. ``fresh``: not for a copy of a box.

        Raises:
            SandboxError: more layers than a message holds.
        """
        steps = [step for step in template.steps if step.path.split("/")[0] not in THE_KERNELS]
        limits = spec.limits
        message = create_message(
            0, hostname=spec.hostname, outer_ids=(0, 0, IDS), work_id=WORK_ID,
            disk=(limits.disk_bytes, min(max(limits.disk_bytes // 4096, MIN_INODES), MAX_INODES)), num_processes=0,
            data_bytes=0, watch_bytes=0, cgroups=(), steps=pack_steps([*steps, Step("f", PROGRAM, mode=0o755)]),
            layers=root.layers,
        )  # fmt: skip
        if len(message) > MESSAGE_MAX:
            raise SandboxError(f"a root of {len(root.layers)} layers is too long to be made")
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._theirs = theirs
        self._ours.setblocking(False)
        self._ours.send(message)
        self.place = folder / "root"
        self.descriptor = theirs.fileno()
        self.words = [str(agent), "ground", str(self.descriptor), MountChoice().packed().rstrip("i"),
                      str(folder / "hidden"), str(self.place), "fresh" if fresh else "copy"]  # fmt: skip

    def upper(self) -> int:
        """When the command has run: the folder of what the box writes, as a descriptor."""
        try:
            _, descriptors, _, _ = socket.recv_fds(self._ours, 16, 1)
        except OSError as error:
            raise SandboxError(f"nobody told where the box's files are: {error}") from error
        return descriptors[0]

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


class Copies:
    """Folders of ours with the files of boxes. Each user of one holds it."""

    def __init__(self) -> None:
        self._users: Counter[Path] = Counter()

    async def make(self, upper: int, target: Path) -> Layer:
        """The files under the descriptor ``upper``, held once. Raises OSError (no room); nothing is left then."""
        try:
            await asyncio.to_thread(copy_layer, Path(f"/proc/self/fd/{upper}"), target)
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, target, True)
            raise
        self._users[target] += 1
        return Layer(path=target)

    def owns(self, layer: Layer) -> bool:
        return layer.path in self._users

    def hold(self, layers: Iterable[Layer]) -> None:
        """Those of them that are ours."""
        for layer in layers:
            if layer.path in self._users:
                self._users[layer.path] += 1

    async def drop(self, layers: Iterable[Layer]) -> None:
        for layer in layers:
            if layer.path in self._users:
                self._users[layer.path] -= 1
                if not self._users[layer.path]:
                    del self._users[layer.path]
                    await asyncio.to_thread(shutil.rmtree, layer.path, True)

