"""The code interpreter: cells of code in kernels that keep their state, one kernel a context.

Owns: contexts, the order of cells in one context, the events that go to the client. A kernel is a process of the box
(``kernel_driver``). Invariant: cells of one context run one after the other; a client that leaves interrupts its cell;
a kernel that died is started anew by the next cell and the client of the dying one hears it. A live fork of a box whose
one kernel waits has that kernel too, under the same context.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import secrets
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tandem.core.errors import SandboxError, SandboxGone
from tandem.sandbox.backend import HOME, Box, Carrier, Process, Start
from tandem.sandbox.warm import ONE_THREAD
from tandem.serve.e2b.boxes import Entry
from tandem.serve.e2b.faults import Fault, json_response

START_S = 20.0
INTERRUPT_S = 5.0  # a cell that ignores its interruption this long loses its kernel
MAX_CONTEXTS = 32  # of one box
MAX_LINES = 20_000  # said and not yet taken by the client
LANGUAGES = {"python": "python", "python3": "python", "bash": "bash"}
DRIVER = ["python3", "-u", "-c"]
Event = dict[str, Any]
Lines = asyncio.Queue[bytes | None]


class Kernel:
    """One context: a process in the box that runs one cell at a time."""

    def __init__(self, entry: Entry, context_id: str, language: str, folder: str) -> None:
        self.id, self.language, self.folder, self.is_default = context_id, language, folder, False
        self._entry = entry
        self._turn = asyncio.Lock()
        self._process: Process | None = None
        self._lines: Lines = asyncio.Queue()
        self._reading: asyncio.Task[None] | None = None

    @property
    def shown(self) -> Event:
        return {"id": self.id, "language": self.language, "cwd": self.folder}

    async def run(self, code: str, environment: dict[str, str]) -> AsyncIterator[Event]:
        """The events of one cell."""
        await self._turn.acquire()
        leaving: asyncio.Future[None] | None = None
        try:
            process, lines = await self._started()
            if self.language == "bash":
                code = f"import subprocess as _s; _r = _s.run(['/bin/bash', '-c', {code!r}]).returncode\n" + (
                    "if _r: raise RuntimeError(f'exit status {_r}')"
                )
            asked = {"code": code, "env_vars": environment, "box": self._entry.id}
            await process.send_stdin(msgspec.json.encode(asked) + b"\n")
            ended = False
            try:
                while (line := await lines.get()) is not None:
                    event = _event(line)
                    if event.get("type") == "end":
                        ended = True
                        break
                    yield event
                if not ended:
                    self._process = None
                    outcome = await process.wait()
                    why = "out of memory" if outcome.oom_killed else f"code {outcome.code}"
                    yield {"type": "error", "name": "KernelDied", "value": f"the kernel ended ({why})",
                           "traceback": ""}  # fmt: skip
            except (GeneratorExit, asyncio.CancelledError):
                # Who left may be cancelled over and over: the turn ends with the interruption, not with its waiting.
                leaving = asyncio.ensure_future(self._interrupt(process, lines))
                leaving.add_done_callback(lambda _: self._turn.release())
                await asyncio.shield(leaving)
                raise
        finally:
            if leaving is None:
                self._turn.release()

    async def restart(self) -> None:
        async with self._turn:
            await self.close()

    async def close(self) -> None:
        process, self._process = self._process, None
        if self._reading is not None:
            self._reading.cancel()
        if process is not None:
            with suppress(Exception):  # it may be gone already, and its box too
                await process.signal(signal.SIGKILL)

    async def _started(self) -> tuple[Process, Lines]:
        if self._process is None:
            environment = {"E2B_SANDBOX": "true", "E2B_SANDBOX_ID": self._entry.id}
            if self._entry.session.spec.limits.cpus <= 1:  # more threads would only keep it from a live fork
                environment |= ONE_THREAD
            process = await self._entry.start(
                Start(arguments=[*DRIVER, _driver(), self.id, self.language, "default" if self.is_default else "",
                                 self._entry.id], folder=self.folder, stdin=True, environment=environment)
            )  # fmt: skip
            lines = self._listen(process)
            async with asyncio.timeout(START_S):
                first = await lines.get()
            if first is None:
                outcome = await process.wait()
                raise Fault(400, f"no kernel in this sandbox: python3 ended with code {outcome.code}")
            self._process, self._lines = process, lines
        return self._process, self._lines

    def adopt(self, process: Process) -> None:
        """It runs already and waits for a cell."""
        self._process, self._lines = process, self._listen(process)

    def _listen(self, process: Process) -> Lines:
        lines: Lines = asyncio.Queue()
        # Read apart from who listens: a listener that is cancelled must not take the stream with it.
        self._reading = asyncio.ensure_future(_read_lines(process, lines))
        return lines

    async def _interrupt(self, process: Process, lines: Lines) -> None:
        """Stop the running cell; what it still says is dropped."""
        try:
            await process.signal(signal.SIGINT)
            async with asyncio.timeout(INTERRUPT_S):
                while (line := await lines.get()) is not None:
                    if _event(line).get("type") == "end":
                        return
        except Exception:  # deaf, dead or gone: the next cell gets a new kernel
            pass
        await self.close()


class Kernels:
    """The contexts of one box."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._known: dict[str, Kernel] = {}
        self._default: dict[str, Kernel] = {}
        self._take_over(entry.session.box)

    def _take_over(self, box: Box | None) -> None:
        """The kernel that a live fork copied into this box."""
        start = box.carried_start if isinstance(box, Carrier) else None
        if not isinstance(box, Carrier) or box.carried is None or start is None or start.arguments[3:4] != [_driver()]:
            return
        context_id, language, default, _ = start.arguments[4:]
        kernel = Kernel(self._entry, context_id, language, start.folder)
        kernel.adopt(box.carried)
        self._known[context_id] = kernel
        if default:
            self._put_default(kernel)

    def _put_default(self, kernel: Kernel) -> None:
        kernel.is_default = True
        self._default[kernel.language] = kernel

    def all(self) -> list[Kernel]:
        return list(self._known.values())

    def add(self, language: str, folder: str) -> Kernel:
        known = LANGUAGES.get(language.lower() or "python")
        if known is None:
            raise Fault(400, f"no kernel for {language[:30]!r}: {', '.join(sorted(set(LANGUAGES.values())))}")
        if len(self._known) >= MAX_CONTEXTS:
            raise Fault(429, f"{MAX_CONTEXTS} contexts are open in this sandbox: remove one")
        kernel = Kernel(self._entry, secrets.token_hex(8), known, folder or HOME)
        self._known[kernel.id] = kernel
        return kernel

    def get(self, context_id: str) -> Kernel:
        if context_id not in self._known:
            raise Fault(404, f"no context {context_id}")
        return self._known[context_id]

    def default(self, language: str) -> Kernel:
        name = LANGUAGES.get(language.lower() or "python", language)
        if name not in self._default or self._default[name].id not in self._known:
            self._put_default(self.add(name, HOME))
        return self._default[name]

    async def remove(self, context_id: str) -> None:
        kernel = self.get(context_id)
        del self._known[context_id]
        await kernel.close()

    async def close(self) -> None:
        while self._known:
            await self._known.popitem()[1].close()


async def warm_up(entry: Entry, modules: Sequence[str]) -> None:
    """Import modules in the box's default Python kernel; no name of them is left among a cell's own.

    Raises:
        SandboxError: one of them cannot be imported.
    """
    kernels: Kernels = entry.keep("kernels", lambda: Kernels(entry))
    code = f"[__import__(name) for name in {list(modules)!r}] and None"
    async for event in kernels.default("python").run(code, {}):
        if event.get("type") == "error":
            why = f"{event.get('name')}: {event.get('value')}"
            raise SandboxError(f"warm modules of the template: {why}", hint="build it with them, or without warm")


async def answer_interpreter(entry: Entry, request: Request) -> Response:
    """One request to the interpreter's port.

    Raises:
        Fault: an unknown path, context or language.
    """
    kernels: Kernels = entry.keep("kernels", lambda: Kernels(entry))
    match request.method, request.url.path.strip("/").split("/"):
        case "GET", ["health"]:
            return Response("OK")
        case "POST", ["execute"]:
            asked = await _asked(request)
            kernel = (
                kernels.get(str(asked["context_id"])) if asked.get("context_id")
                else kernels.default(str(asked.get("language") or ""))
            )  # fmt: skip
            environment = {str(key): str(value) for key, value in (asked.get("env_vars") or {}).items()}
            events = kernel.run(str(asked.get("code") or ""), environment)
            first = await anext(events)  # a kernel that does not start is an error with a status of its own
            return StreamingResponse(_encoded(first, events), media_type="application/json")
        case "GET", ["contexts"]:
            return json_response([kernel.shown for kernel in kernels.all()])
        case "POST", ["contexts"]:
            asked = await _asked(request)
            return json_response(kernels.add(str(asked.get("language") or ""), str(asked.get("cwd") or "")).shown)
        case "DELETE", ["contexts", context_id]:
            await kernels.remove(context_id)
            return Response(status_code=204)
        case "POST", ["contexts", context_id, "restart"]:
            await kernels.get(context_id).restart()
            return Response(status_code=204)
        case method, _:
            raise Fault(404, f"{method} {request.url.path}: no such thing at the interpreter")


def _driver() -> str:
    return importlib.resources.files("tandem.serve.e2b.envd").joinpath("kernel_driver.py").read_text()


def _event(line: bytes) -> Event:
    """A line of a kernel; one that is no event came from code of a cell that found the way out."""
    try:
        return msgspec.json.decode(line, type=Event)
    except msgspec.DecodeError:
        return {"type": "stdout", "text": line.decode(errors="replace") + "\n", "timestamp": time.time_ns()}


async def _encoded(first: Event, events: AsyncIterator[Event]) -> AsyncIterator[bytes]:
    try:
        yield msgspec.json.encode(first) + b"\n"
        async for event in events:
            yield msgspec.json.encode(event) + b"\n"
    finally:
        await events.aclose()  # type: ignore[attr-defined]


async def _read_lines(process: Process, lines: Lines) -> None:
    """What the kernel says, line by line; None when it has ended or its box is gone."""
    held = bytearray()
    try:
        async for piece in process.output(from_start=True):
            if piece.stream != "stdout":
                continue
            held += piece.data
            while (end := held.find(b"\n")) >= 0:
                if lines.qsize() >= MAX_LINES:  # its client takes nothing: the kernel ends before our memory does
                    await process.signal(signal.SIGKILL)
                    return
                lines.put_nowait(bytes(held[:end]))
                del held[: end + 1]
    except SandboxGone:
        pass  # ``wait`` says so to who listens
    finally:
        lines.put_nowait(None)


async def _asked(request: Request) -> dict[str, Any]:
    try:
        return msgspec.json.decode(await request.body() or b"{}", type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise Fault(400, f"the body is no JSON object: {error}") from error
