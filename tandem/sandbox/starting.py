"""What a template starts in a box that was just made of it.

Owns: the start command, and the wait until the ready command ends well. Invariant: a box whose template was not ready
within the deadline is nobody's: the caller ends it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from tandem.core.errors import SandboxError
from tandem.sandbox.backend import HOME, Root, Start
from tandem.sandbox.session import Session

READY_S, READY_EVERY_S = 60.0, 0.25


@dataclass(frozen=True, slots=True)
class Starting:
    """Two shell commands, '' for none: the first goes on for as long as the box, the second says by its success when
    that is done."""

    start_command: str = ""
    ready_command: str = ""

    async def run(self, session: Session, root: Root) -> None:
        """Start, and wait until it is ready; in the image's own environment and folder.

        Raises:
            SandboxError: it was not ready in ``READY_S``.
        """
        if not self.start_command and not self.ready_command:
            return
        box = await session.use()

        def asked(command: str, timeout_s: float | None) -> Start:
            return Start(
                arguments=["/bin/sh", "-c", command], environment=root.environment, folder=root.folder or HOME,
                timeout_s=timeout_s,
            )  # fmt: skip

        if self.start_command:
            await box.start(asked(self.start_command, None))
        if self.ready_command:
            deadline = time.monotonic() + READY_S
            while (await (await box.start(asked(self.ready_command, READY_S))).wait()).code != 0:
                if time.monotonic() > deadline:
                    raise SandboxError(f"the template was not ready in {READY_S:g} s: {self.ready_command[:200]}")
                await asyncio.sleep(READY_EVERY_S)
