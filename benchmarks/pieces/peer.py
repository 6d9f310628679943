"""The interpreter of another project's environment, asked in a process of its own."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PEERS = Path(__file__).resolve().parents[1] / "peers"
TIMEOUT_S = 900
_PR_SET_PDEATHSIG = 1
# What tandem.engine.memory sets for our own process: without it a peer spends half of its time in page faults.
KEPT_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**62)}


def _die_with_parent() -> None:
    """A benchmark that is killed leaves no peer behind, which would slow down the next one."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@dataclass(frozen=True)
class Peer:
    """An environment that can import what is compared with; ``version`` names that."""

    python: str
    version: str

    @classmethod
    def find(cls, python: str, package: str) -> Peer | None:
        """The peer behind an interpreter; None, and a line that says so, where there is none."""
        if not python:
            return None
        code = f"import importlib.metadata as m; print(m.version({package!r}), m.version('torch'))"
        done = subprocess.run([python, "-c", code], capture_output=True, text=True)
        if done.returncode:
            print(f"no peer: {python} has no {package}\n{done.stderr.strip()}")
            return None
        version, torch = done.stdout.split()
        return cls(python, f"{package} {version} (torch {torch})")

    def ask(self, script: str, question: dict[str, Any], *, keep_memory: bool = True) -> dict[str, Any]:
        """Run one of ``peers/`` with a question on its input; its last line of output is the answer. With
        ``keep_memory`` its C library keeps freed memory, as ours does.

        Raises:
            RuntimeError: it failed; with what it said.
        """
        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [self.python, str(PEERS / script)],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            preexec_fn=_die_with_parent,
            env=os.environ | quiet | (KEPT_MEMORY if keep_memory else {}),
        )
        if done.returncode:
            raise RuntimeError(f"{script} failed:\n{done.stderr[-4000:]}")
        return json.loads(done.stdout.strip().splitlines()[-1])
