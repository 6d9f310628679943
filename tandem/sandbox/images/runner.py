"""RUN: one command of a build in a box of its own, and the layer that it leaves.

Owns: the box from its making to its end, the stream of its output, and the way from a snapshot to a layer of the
store. A command that fails fails the build with its last lines.
"""

from __future__ import annotations

import asyncio
import collections
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tandem.core.boxes import SandboxSpec
from tandem.core.errors import BuildFailed, SandboxTimeout
from tandem.sandbox.abilities import Ability, refuse
from tandem.sandbox.backend import Box, Layer, Root, SandboxBackend, Start
from tandem.sandbox.images.layer_tar import layer_to_tar
from tandem.sandbox.images.store import LayerStore
from tandem.sandbox.images.view import open_layer
from tandem.sandbox.users import AGENTS, ROOTS, NoSuchUser, as_user

KEPT_LINES = 30
CREATE_TIMEOUT_S = 30.0
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


async def run_step(
    backend: SandboxBackend,
    store: LayerStore,
    root: Root,
    arguments: Sequence[str],
    *,
    spec: SandboxSpec,
    environment: Mapping[str, str],
    user: str,
    timeout_s: float,
    say: Callable[[str], None],
) -> list[Layer]:
    """Run a command on ``root``; the new layers above it, lowest first (none where it changed nothing).

    Raises:
        BuildFailed: the command's own failure. SandboxUnavailable: the backend cannot do what a build needs.
        SandboxError and its kin: the box's.
    """
    for ability in (Ability.IMAGES, Ability.PROCESSES, Ability.SNAPSHOT):
        if ability not in backend.abilities:
            raise refuse(backend.name, ability)
    if user not in ("", *ROOTS, *AGENTS) and Ability.FILE_STREAMS not in backend.abilities:
        what = f"RUN as user {user!r}: boxes of the {backend.name} backend run commands as root or as agent (1000)"
        raise BuildFailed(what, hint="write USER root before RUN")
    box = await backend.create(spec, root=root, timeout_s=CREATE_TIMEOUT_S)
    try:
        await _run(box, arguments, environment=environment, user=user, folder=root.folder, timeout_s=timeout_s, say=say)
        frozen = await box.snapshot()
        try:
            with tempfile.TemporaryDirectory(dir=store.folder, prefix="step-") as scratch:
                saved = await frozen.save(Path(scratch))
                known = {layer.path for layer in root.layers}
                new = [layer for layer in saved.layers if layer.path not in known]
                return await asyncio.to_thread(_keep, store, new, Path(scratch))
        finally:
            await frozen.release()
    finally:
        await box.kill()


async def _run(
    box: Box, arguments: Sequence[str], *, environment: Mapping[str, str], user: str, folder: str, timeout_s: float,
    say: Callable[[str], None],
) -> None:
    start = Start(
        arguments=arguments, folder=folder or "/", environment={"PATH": SYSTEM_PATH, **environment},
        user=user or "root", timeout_s=timeout_s,
    )
    what = " ".join(arguments)[:200]
    try:
        process = await box.start(await as_user(box.start, start))
    except NoSuchUser as error:
        raise BuildFailed(f"RUN as user {user!r}: {error.message}", hint="make it first: RUN useradd ...") from error
    except OSError as error:
        raise BuildFailed(f"{what!r} cannot be started: {error}", hint="has the image a shell?") from error
    last: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
    rest = {"stdout": "", "stderr": ""}
    async for piece in process.output(from_start=True):
        *lines, rest[piece.stream] = (rest.get(piece.stream, "") + piece.data.decode("utf-8", "replace")).split("\n")
        for line in lines:
            last.append(line)
            say(line)
    for line in filter(None, rest.values()):
        last.append(line)
        say(line)
    outcome = await process.wait()
    if outcome.timed_out:
        raise SandboxTimeout(f"{what!r} was not done after {timeout_s:g} s")
    if outcome.code != 0:
        tail = "\n".join(last)
        raise BuildFailed(f"{what!r} ended with code {outcome.code}:\n{tail}")


def _keep(store: LayerStore, new: Sequence[Layer], scratch: Path) -> list[Layer]:
    kept: list[Layer] = []
    for layer in reversed(new):
        place = open_layer(layer)
        try:
            tar = scratch / "kept.tar"
            num_members = layer_to_tar(place, tar)
        finally:
            os.close(place)
        if num_members > 1:  # more than its top folder
            kept.append(store.add_file(tar))
        tar.unlink(missing_ok=True)
    return kept
