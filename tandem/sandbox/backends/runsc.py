"""gVisor's ``runsc``: which one, how old, and its commands.

Owns: the options that every command gets, deadlines, and what it said when it fails. Refuses: versions that cannot
checkpoint a running box on today's kernels.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.core.errors import SandboxError, SandboxTimeout, SandboxUnavailable

OLDEST = 20240701  # older ones hang at a checkpoint of a box that goes on
INSTALL = "install gVisor's runsc, https://gvisor.dev/docs/user_guide/install/ (Debian: package runsc of backports)"
OPTIONS = ("--platform=systrap", "--network=none", "--ignore-cgroups", "--host-uds=none",
           "--overlay2=none", "--file-access=shared")  # what a box writes is on the host at once
TIMEOUT_S = 60.0
SAID = 400
# Version 1: a thread that moves itself waits for no lock over all processes (see ``native/birth.c``).
JOIN = """n=$1; shift
while [ "$n" -gt 0 ]; do
if [ -e "$1/tasks" ]; then echo 0 > "$1/tasks"; else echo $$ > "$1/cgroup.procs"; fi || exit 9; shift; n=$((n-1)); done
exec "$@\""""


@dataclass(frozen=True, slots=True)
class Runsc:
    """``program`` is its path, ``version`` its day as a number."""

    program: str
    version: int

    @classmethod
    def find(cls) -> Runsc:
        """The one on the PATH. Raises SandboxUnavailable: none, too old, not executable by this user."""
        program = shutil.which("runsc")
        if program is None:
            raise SandboxUnavailable("there is no runsc on the PATH", hint=INSTALL)
        try:
            told = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10).stdout
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SandboxUnavailable(f"{program} does not run: {error}", hint=INSTALL) from error
        day = re.search(r"\b(20\d{6})\b", told)
        if day is None or int(day[1]) < OLDEST:
            raise SandboxUnavailable(
                f"{program} is of {day[1] if day else 'an unknown day'}; {OLDEST} or later is needed", hint=INSTALL
            )
        if os.geteuid() != 0:
            raise SandboxUnavailable("runsc makes boxes of ours as root only", hint="run as root")
        return cls(program, int(day[1]))

    async def run(
        self,
        state: Path,
        words: Sequence[str],
        *,
        stdin: int | None = None,
        groups: Sequence[Path] = (),
        before: Sequence[str] = (),
        descriptors: Sequence[int] = (),
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """One command; what it starts is in the control groups ``groups``. ``before``: what starts it, with
        ``descriptors`` open.

        Raises:
            SandboxError: with what it said. SandboxTimeout.
        """
        command = [*before, self.program, f"--root={state}", *OPTIONS, *words]
        if groups:  # what it makes inherits them
            command = ["/bin/sh", "-c", JOIN, "sh", str(len(groups)), *map(str, groups), *command]
        log = state / f"log-{os.urandom(6).hex()}"
        try:
            with open(log, "wb") as said:  # a file: the box holds it as long as it lives, and a pipe would not end
                process = await asyncio.create_subprocess_exec(
                    *command, stdin=asyncio.subprocess.DEVNULL if stdin is None else stdin, stdout=said, stderr=said,
                    start_new_session=True, pass_fds=descriptors,
                )  # fmt: skip
            try:
                code = await asyncio.wait_for(process.wait(), timeout_s)
            except BaseException as error:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
                if isinstance(error, TimeoutError):
                    raise SandboxTimeout(f"runsc {words[0]} did not end in {timeout_s:g} s") from error
                raise
            if code != 0:
                text = log.read_text(errors="replace").strip()
                if len(text) > 2 * SAID:  # what failed comes first, a trace of gVisor's own calls after it
                    text = f"{text[:SAID]} [...] {text[-SAID:]}"
                raise SandboxError(f"runsc {words[0]} ended with {code}: {text}",
                                   hint="`tandem doctor` shows what this machine can do")  # fmt: skip
        finally:
            log.unlink(missing_ok=True)
