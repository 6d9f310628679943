"""The program in the other process: how it is called, what it inherits, how it ends.

Owns: the command, its environment, the socket between the two. Refuses: what is said on it.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tandem.core.errors import EngineError

END_S = 5.0
PACKAGE = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What runs in the other process: a command that takes the number of its socket as its last word."""

    command: tuple[str, ...]
    settings: str  # JSON for the program
    transport: str = "shared_memory"
    names: tuple[tuple[str, str, int, int], ...] = ()
    takes_packed: bool = False
    """It computes on our projections' own layout, which is then what is sent."""
    environment: Mapping[str, str] | None = None

    def begun(self, files: tuple[int, ...]) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """The process, which inherits the descriptors ``files``, and our end of its socket.

        Raises:
            EngineError: the command cannot be run.
        """
        ours, theirs = socket.socketpair()
        try:
            process = subprocess.Popen(
                [*self.command, str(theirs.fileno())],
                pass_fds=(theirs.fileno(), *files),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process, which ends that one
                env=self._environment(),
            )
        except OSError as error:
            ours.close()
            raise EngineError(f"the engine's process cannot be started: {error}") from error
        finally:
            theirs.close()
        return process, ours

    def _environment(self) -> dict[str, str]:
        """This process's, in which the other one finds this package whatever interpreter it has."""
        made = {**os.environ, **(self.environment or {})}
        before = made.get("PYTHONPATH")
        return made | {"PYTHONPATH": f"{PACKAGE}{os.pathsep}{before}" if before else str(PACKAGE)}


def ended(process: subprocess.Popen[bytes]) -> int:
    """Reap the process, by force after ``END_S``; returns its exit status. Blocks."""
    try:
        return process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
