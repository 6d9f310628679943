"""The program as a child process: started, watched through its event log, ended, and looked after for what it left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from tandem.cli.main import run

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = Path(__file__).parent / "environments_for_tests.py"
TINY = str(ROOT / "recipes" / "tiny.toml")
PROGRAM = (sys.executable, "-m", "tandem.cli.main")
GENEROUS_S = 300.0  # no child takes so long; a hang must not hang the tests

Fact = Mapping[str, object]


def flags_of(values: Mapping[str, object]) -> list[str]:
    """Options as words of a command."""
    return [word for key, value in values.items() for word in (f"--{key}", str(value))]


def small(folder: Path, name: str, *, steps: int = 3) -> list[str]:
    """The tiny recipe as a run of a few seconds, made in ``folder/name``. One thread: two runs share two cores."""
    flags = {
        "warmup.steps": 3, "warmup.batch-size": 4, "rollout.groups-per-step": 2, "rollout.group-size": 4,
        "rollout.max-turns": 2, "trainer.steps": steps, "trainer.checkpoint-every": 1, "environment.num-eval-tasks": 4,
        "engine.threads": 1, "rollout.reward-processes": 1, "record.folder": folder, "record.name": name,
    }  # fmt: skip
    return [TINY, *flags_of(flags)]


def deterministic(folder: Path, name: str) -> list[str]:
    """A small run that repeats bit by bit, on an environment in which every episode teaches something."""
    name_of = f"{ENVIRONMENTS}:dense"
    return [*small(folder, name), "--trainer.deterministic", "true", "--environment.name", name_of]


class Child:
    """One ``tandem`` process in a temporary folder of its own. Its output goes to files."""

    def __init__(
        self, words: Sequence[str], place: Path, *, environment: Mapping[str, str] | None = None,
        under: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.folder = Path(tempfile.mkdtemp(prefix="child-", dir=place))
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        self._mark = f"TANDEM_TEST_CHILD={self.folder}"
        self._mounts = _mounts()
        self._offspring: set[tuple[int, str]] = set()
        mine = {
            "TMPDIR": str(self.temporary),
            "TANDEM_TEST_CHILD": str(self.folder),
            "TORCHINDUCTOR_CACHE_DIR": str(place / "torchinductor"),  # PyTorch makes it unasked
            "COLUMNS": "200",
        }
        with (self.folder / "out").open("wb") as out, (self.folder / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [*under, *PROGRAM, *words], stdout=out, stderr=err, stdin=subprocess.DEVNULL, cwd=place,
                env={**os.environ, **mine, **(environment or {})},
            )  # fmt: skip
        self._owner = f"-{self.process.pid}-{_stat(self.process.pid)[19]}-"  # in its control groups' names: pid, start

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    @property
    def said(self) -> str:
        return f"{self.out}\n{self.err}"

    def wait(self, code: int | None = 0) -> Child:
        """Until it has ended, with ``code``."""
        try:
            got = self.process.wait(GENEROUS_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"still running after {GENEROUS_S} s:\n{self.said}") from None
        assert code is None or got == code, f"exit code {got}, not {code}:\n{self.said}"
        return self

    def until(self, happened: Callable[[], bool]) -> None:
        """Wait for something, in a hurry: it is about to be killed just then."""
        deadline = time.monotonic() + GENEROUS_S
        while not happened():
            assert self.process.poll() is None, f"ended too early:\n{self.said}"
            if time.monotonic() > deadline:
                self.process.kill()
                raise AssertionError(f"what was waited for did not happen:\n{self.said}")
            time.sleep(0.001)

    def signal(self, number: int) -> None:
        self._offspring |= {(pid, _born(pid)) for pid in _descendants(self.process.pid)}
        os.kill(self.process.pid, number)

    def assert_nothing_left(self) -> None:
        """No process, box, cgroup, mount or temporary file of it is there, once the keeper had its moment."""
        deadline = time.monotonic() + 30
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left, left

    def _left(self) -> list[str]:
        left = [f"process {pid}" for pid, born in self._offspring if born and _born(pid) == born]
        for pid in _pids():
            words = _read(f"/proc/{pid}/cmdline").split("\0")
            is_keeper = words[1:2] == ["keeper"] and words[3:4] == [str(self.process.pid)]
            groups = _read(f"/proc/{pid}/cgroup").splitlines()
            in_box = any("tandem-" in line and self._owner in line for line in groups)
            if is_keeper or in_box or self._mark in _read(f"/proc/{pid}/environ").split("\0"):
                left.append(f"process {pid}: {' '.join(words)[:200]}")
        left += [f"cgroup {path}" for path in _cgroups() if self._owner in path]
        left += [f"mount {line}" for line in _mounts() - self._mounts]
        return left + [f"temporary file {path}" for path in self.temporary.iterdir()]


def tandem(
    *words: str, place: Path, code: int = 0, environment: Mapping[str, str] | None = None, under: Sequence[str] = ()
) -> Child:
    """Run one command to its end."""
    return Child(words, place, environment=environment, under=under).wait(code)


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """What a command says in this process, which has PyTorch already. For those that end by themselves."""
    capsys.readouterr()
    got = run(words)
    out, err = capsys.readouterr()
    assert got == code, f"exit code {got}, not {code}:\n{out}\n{err}"
    return out + err


@dataclass
class Events:
    """The log of a run from here on: ``happened(test)`` reads on until an event passes the test."""

    folder: Path
    _position: int = 0

    def skip(self) -> Events:
        """From the present end on."""
        for _ in self._new():
            pass
        return self

    def happened(self, test: Callable[[Fact], bool], *, times: int = 1) -> Callable[[], bool]:
        """Whether ``times`` events passed the test by now."""
        left = times

        def by_now() -> bool:
            nonlocal left
            left -= sum(map(test, self._new()))
            return left <= 0

        return by_now

    def _new(self) -> Iterator[Fact]:
        try:
            with (self.folder / "events.jsonl").open("rb") as file:
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data.rfind(b"\n") + 1
        self._position += whole
        for line in data[:whole].splitlines():
            yield cast(Fact, json.loads(line)["event"])


def event(kind: str, **fields: object) -> Callable[[Fact], bool]:
    """A test of one event: its type and some of its fields."""
    return lambda fact: fact["type"] == kind and all(fact[name] == value for name, value in fields.items())


# ---- what the kernel says
def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _read(path: str) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""


def _stat(pid: int) -> list[str]:
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _born(pid: int) -> str:
    """A process's start time: its number may be somebody else's later. Empty for a dead one."""
    fields = _stat(pid)
    return fields[19] if fields and fields[0] not in "ZX" else ""


def _descendants(pid: int) -> set[int]:
    parents = {each: int(fields[1]) for each in _pids() if (fields := _stat(each))}
    found: set[int] = set()
    new = {pid}
    while new:
        new = {each for each, parent in parents.items() if parent in new} - found
        found |= new
    return found


def _cgroups() -> list[str]:
    """Every folder of boxes. ``walk`` passes over what goes meanwhile: others have boxes too."""
    walked = os.walk("/sys/fs/cgroup")
    return [os.path.join(place, name) for place, names, _ in walked for name in names if name.startswith("tandem-")]


def _mounts() -> set[str]:
    return set(Path("/proc/self/mountinfo").read_text().splitlines())
