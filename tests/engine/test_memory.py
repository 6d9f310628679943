"""Freed memory stays with the process."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import resource
from tandem.engine.memory import keep_freed_memory
kept = keep_freed_memory()
def fault() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = bytearray(b"x") * (64 << 20)
    del block
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
first, *others = [fault() for _ in range(5)]
print(int(kept), first, sum(others))
"""


def test_a_large_block_is_faulted_in_once() -> None:
    answer = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=True)
    kept, first, others = map(int, answer.stdout.split())
    assert not kept or others < first / 10
