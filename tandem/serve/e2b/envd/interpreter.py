"""The code interpreter: cells of code in kernels that keep their state, one kernel a context.

Owns: contexts, the order of cells in one context, the events that go to the client. A kernel is a process of the box
(``kernel_driver``). Invariant: cells of one context run one after the other; a client that leaves interrupts its cell;
a kernel that died is started anew by the next cell and the client of the dying one hears it.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import secrets
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tandem.core.errors import SandboxGone
from tandem.sandbox.backend import HOME, Process, Start
from tandem.serve.e2b.boxes import Entry
from tandem.serve.e2b.faults import Fault, json_response

START_S = 20.0
INTERRUPT_S = 5.0  # a cell that ignores its interruption this long loses its kernel
MAX_CONTEXTS = 32  # of one box
MAX_LINES = 20_000  # said and not yet taken by the client
LANGUAGES = {"python": "python", "python3": "python", "bash": "bash"}
Event = dict[str, Any]
Lines = asyncio.Queue[bytes | None]


class Kernel:
    """One context: a process in the box that runs one cell at a time."""

    def __init__(self, entry: Entry, context_id: str, language: str, folder: str) -> None:
        self.id, self.language, self.folder = context_id, language, folder
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
        async with self._turn:
            process, lines = await self._started()
            if self.language == "bash":
                code = f"import subprocess as _s; _r = _s.run(['/bin/bash', '-c', {code!r}]).returncode\n" + (
                    "if _r: raise RuntimeError(f'exit status {_r}')"
                )
            asked = {"code": code, "env_vars": environment}
            await process.send_stdin(msgspec.json.encode(asked) + b"\n")
            ended = False
            try:
                while (line := await lines.get()) is not None:
                    event = msgspec.json.decode(line, type=Event)
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
                await asyncio.shield(asyncio.ensure_future(self._interrupt(process, lines)))
                raise

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
            driver = importlib.resources.files("tandem.serve.e2b.envd").joinpath("kernel_driver.py").read_text()
            process = await self._entry.start(
                Start(arguments=["python3", "-u", "-c", driver], folder=self.folder, stdin=True,
                      environment={"E2B_SANDBOX": "true", "E2B_SANDBOX_ID": self._entry.id})
            )  # fmt: skip
            lines: Lines = asyncio.Queue()
            # Read apart from who listens: a listener that is cancelled must not take the stream with it.
            self._reading = asyncio.ensure_future(_read_lines(process, lines))
            async with asyncio.timeout(START_S):
                first = await lines.get()
            if first is None:
                outcome = await process.wait()
                raise Fault(400, f"no kernel in this sandbox: python3 ended with code {outcome.code}")
            self._process, self._lines = process, lines
        return self._process, self._lines

    async def _interrupt(self, process: Process, lines: Lines) -> None:
        """Stop the running cell; what it still says is dropped."""
        try:
            await process.signal(signal.SIGINT)
            async with asyncio.timeout(INTERRUPT_S):
                while (line := await lines.get()) is not None:
                    if msgspec.json.decode(line, type=Event).get("type") == "end":
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
        name = language.lower() or "python"
        if name not in self._default or self._default[name].id not in self._known:
            self._default[name] = self.add(name, HOME)
        return self._default[name]

    async def remove(self, context_id: str) -> None:
        kernel = self.get(context_id)
        del self._known[context_id]
        await kernel.close()

    async def close(self) -> None:
        while self._known:
            await self._known.popitem()[1].close()


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
