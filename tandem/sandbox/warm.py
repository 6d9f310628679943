"""Python commands without their imports: a process of the box imports the heavy modules once, and runs each command as
a fork of itself.

Owns: the requests to that process and their answers. Refuses: to hide that it is gone. Together with a live fork the
imports are done once for many boxes: the copy goes on in each child, with the modules' memory shared.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.resources
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tandem.core.boxes import ExecResult
from tandem.core.errors import SandboxError, SandboxGone, SandboxTimeout
from tandem.sandbox.backend import HOME, Process
from tandem.sandbox.session import Commands

START_TIMEOUT_S = 120.0
GRACE_S = 10.0  # past a command's own deadline
OUTPUT_BYTES = 1 << 20
# More than one thread could not be copied by a live fork, and forks of threaded programs are fragile.
ONE_THREAD = {name: "1" for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")}


class _Run:
    def __init__(self) -> None:
        self.parts = {"stdout": bytearray(), "stderr": bytearray()}
        self.end: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()


class WarmPython:
    """Made by ``start`` in a box, or by ``copied`` in a box that was born of its live fork."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._numbers = itertools.count(1)
        self._runs: dict[int, _Run] = {}
        self._ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._listening = asyncio.ensure_future(self._listen())

    @classmethod
    async def start(
        cls, commands: Commands, modules: Sequence[str], *, timeout_s: float = START_TIMEOUT_S
    ) -> WarmPython:
        """Returns when the modules are imported.

        Raises:
            SandboxError: one of them cannot be imported; the message has the traceback's end. SandboxTimeout.
        """
        source = importlib.resources.files("tandem.sandbox").joinpath("warm_program.py").read_text()
        process = await commands.start(["python3", "-u", "-c", source, *modules], environment=ONE_THREAD)
        warm = cls(process)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(warm._ready)
        except TimeoutError as error:
            await warm.close()
            raise SandboxTimeout(f"{', '.join(modules)} were not imported in {timeout_s:g} s") from error
        except SandboxError:
            await warm.close()
            raise
        return warm

    @classmethod
    def copied(cls, commands: Commands) -> WarmPython:
        """In a box that a live fork made of one where it was idle. Raises SandboxError: the box has no such command."""
        if commands.carried is None:
            hint = "fork a box that has one, with live=True"
            raise SandboxError("no warm Python was copied into this box", hint=hint)
        return cls(commands.carried)

    async def run(
        self,
        arguments: Sequence[str],
        *,
        timeout_s: float,
        cwd: str = HOME,
        environment: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        output_bytes: int = OUTPUT_BYTES,
    ) -> ExecResult:
        """What ``python3 *arguments`` (``-c CODE``, ``-m MODULE`` or a file, then its words) does, without the imports.
        Commands may run at once. At the deadline its process group dies.

        Raises:
            ValueError: no arguments. SandboxGone: the box ended. SandboxError: the warm process ended.
        """
        if not arguments or (arguments[0] in ("-c", "-m") and len(arguments) < 2):
            raise ValueError("give -c CODE, -m MODULE, or a file")
        number, run = next(self._numbers), _Run()
        self._runs[number] = run
        asked = {
            "id": number, "argv": list(arguments), "cwd": cwd, "env": dict(environment or {}), "cap": output_bytes,
            "stdin": base64.b64encode(stdin).decode(), "timeout_s": timeout_s,
        }
        try:
            if self._listening.done():
                raise SandboxError("the warm Python has ended", hint="start another")
            await self.process.send_stdin(msgspec.json.encode(asked) + b"\n")
            async with asyncio.timeout(timeout_s + GRACE_S):
                end = await run.end
        except TimeoutError as error:
            raise SandboxTimeout(f"the warm Python did not end a command {GRACE_S:g} s after its deadline") from error
        finally:
            self._runs.pop(number, None)
        return ExecResult(
            exit_code=end["code"], stdout=run.parts["stdout"].decode("utf-8", "replace"),
            stderr=run.parts["stderr"].decode("utf-8", "replace"), truncated=end["dropped"] > 0,
            dropped_bytes=end["dropped"], timed_out=end["timed_out"], duration_s=end["took_s"],
        )

    async def close(self) -> None:
        """End the process; what its commands left behind goes on."""
        await self.process.signal(9)
        self._listening.cancel()

    async def _listen(self) -> None:
        held, said = bytearray(), b""
        why: SandboxError
        try:
            async for piece in self.process.output(from_start=True):
                if piece.stream == "stderr":
                    said = (said + piece.data)[-2000:]
                    continue
                held += piece.data
                while (end := held.find(b"\n")) >= 0:
                    self._hear(msgspec.json.decode(bytes(held[:end]), type=dict[str, Any]))
                    del held[: end + 1]
            why = SandboxError(f"the warm Python ended: {said.decode('utf-8', 'replace').strip()[-600:]}")
        except SandboxGone as gone:
            why = gone
        except msgspec.DecodeError as error:
            why = SandboxError(f"the warm Python makes no sense: {error}", hint="start another")
        for future in (self._ready, *(run.end for run in self._runs.values())):
            if not future.done():
                future.set_exception(why)
                future.exception()  # asked for, so that nobody must

    def _hear(self, event: dict[str, Any]) -> None:
        if event["kind"] == "ready" and not self._ready.done():
            self._ready.set_result(event)
        run = self._runs.get(event.get("id", 0))
        if run is None:
            return
        if event["kind"] == "out":
            run.parts[event["stream"]] += base64.b64decode(event["data"])
        elif event["kind"] == "end" and not run.end.done():
            run.end.set_result(event)
