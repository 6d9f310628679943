"""llama.cpp's own decode benchmark, run and read."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 900


@dataclass(frozen=True)
class LlamaBench:
    """``llama-batched-bench`` and a model file."""

    binary: Path
    gguf: Path

    @classmethod
    def find(cls, binary: Path | None, gguf: Path | None) -> LlamaBench | None:
        """None, and a line that says so, where one of both is not there."""
        if binary is None and gguf is None:
            return None
        for name, file in (("--llama", binary), ("--gguf", gguf)):
            if file is None or not file.is_file():
                print(f"no llama.cpp: {name} is {file}")
                return None
        assert binary is not None and gguf is not None
        return cls(binary, gguf)

    def decode(self, counts: Sequence[int], prompt: int, new: int, threads: int) -> dict[int, tuple[float, float]]:
        """Seconds to the first token and to the end, by number of sequences.

        Raises:
            RuntimeError: it failed; with what it said.
        """
        command = [
            str(self.binary), "-m", str(self.gguf), "-npp", str(prompt), "-ntg", str(new),
            "-npl", ",".join(map(str, counts)), "-c", str(max(counts) * (prompt + new)),
            "-t", str(threads), "-tb", str(threads), "--output-format", "jsonl",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode:
            raise RuntimeError(f"{self.binary} failed:\n{done.stderr[-4000:]}")
        found = {}
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                row = json.loads(line)
                # Its t_tg is all ``new`` tokens after the prompt; ours counts one of them to the prompt.
                found[row["pl"]] = row["t_pp"], row["t_pp"] + row["t_tg"] * (new - 1) / new
        return found
