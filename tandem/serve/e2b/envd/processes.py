"""``process.Process``: commands that run in a box while clients come and go.

Owns: the table of a box's commands as clients see them (pid, tag, what was asked), the ended ones for a while, and
the messages of the service. Invariant: a command is started once; nobody listening neither stops nor blocks it; its
time limit (the deadline of the call that started it) is the life of its whole process group.
"""

from __future__ import annotations

import asyncio
import base64
import signal
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass

from tandem.core.errors import SandboxGone
from tandem.sandbox.backend import HOME, Carrier, Outcome, Process, Start, Terminal
from tandem.serve.e2b.boxes import Entry
from tandem.serve.e2b.envd.connect import Call, Message, Service, with_keepalive
from tandem.serve.e2b.faults import Code, Fault

KEPT_ENDED = 64  # ended commands that a late client can still ask about
KEEPALIVE: Message = {"event": {"keepalive": {}}}


@dataclass(slots=True)
class Running:
    """A command in the table. ``asked`` is the ``ProcessConfig`` of its start."""

    process: Process
    asked: Message
    tag: str
    terminal: bool
    ending: asyncio.Task[Outcome]


class ProcessTable:
    """The commands that clients started in one box, by pid."""

    def __init__(self) -> None:
        self._running: dict[int, Running] = {}
        self._ended: OrderedDict[int, Running] = OrderedDict()

    def add(self, process: Process, asked: Message, tag: str, *, terminal: bool) -> Running:
        ending = asyncio.ensure_future(process.wait())
        running = Running(process, asked, tag, terminal, ending)
        self._running[process.pid] = running
        self._ended.pop(process.pid, None)
        ending.add_done_callback(lambda _: self._end(running))
        return running

    def running(self) -> list[Running]:
        return list(self._running.values())

    def find(self, selector: Message, *, ended: bool = False) -> Running:
        """By ``pid`` or ``tag``. Raises: Fault (not found)."""
        known = [*self._running.values(), *(reversed(self._ended.values()) if ended else ())]
        for one in known:
            if ("pid" in selector and one.process.pid == int(selector["pid"])) or (
                "tag" in selector and one.tag == selector["tag"]
            ):
                return one
        raise Fault(404, f"no process {selector.get('pid', selector.get('tag'))} in this sandbox", code=Code.NOT_FOUND)

    def _end(self, running: Running) -> None:
        if not running.ending.cancelled():
            running.ending.exception()  # whoever listens hears it from the process; nobody else asks
        self._running.pop(running.process.pid, None)
        self._ended[running.process.pid] = running
        while len(self._ended) > KEPT_ENDED:
            self._ended.popitem(last=False)


def service_of(entry: Entry) -> Service:
    """The service of one box."""
    methods = _Methods(entry, entry.keep("processes", lambda: _table(entry)))
    return Service(
        unary={"List": methods.listed, "Update": methods.update, "SendInput": methods.send_input,
               "SendSignal": methods.send_signal, "CloseStdin": methods.close_stdin},
        server_stream={"Start": methods.start, "Connect": methods.connect},
        client_stream={"StreamInput": methods.stream_input},
    )  # fmt: skip


def _table(entry: Entry) -> ProcessTable:
    """A box of a live fork has a command that nobody started."""
    table = ProcessTable()
    box = entry.session.box
    if isinstance(box, Carrier) and box.carried is not None and (start := box.carried_start) is not None:
        command, *arguments = start.arguments
        asked: Message = {"cmd": command, "args": arguments, "cwd": start.folder, "envs": dict(start.environment)}
        table.add(box.carried, asked, "", terminal=start.terminal is not None)
    return table


class _Methods:
    def __init__(self, entry: Entry, table: ProcessTable) -> None:
        self._entry, self._table = entry, table

    async def start(self, call: Call, message: Message) -> AsyncIterator[Message]:
        process, asked = await _start(self._entry, call, message)
        running = self._table.add(process, asked, str(message.get("tag", "")), terminal="pty" in message)
        async for event in with_keepalive(_events(self._entry, running), call.keepalive_s, KEEPALIVE):
            yield event

    async def connect(self, call: Call, message: Message) -> AsyncIterator[Message]:
        running = self._table.find(_selector(message), ended=True)
        async with asyncio.timeout(call.timeout_s):
            async for event in with_keepalive(_events(self._entry, running), call.keepalive_s, KEEPALIVE):
                yield event

    async def listed(self, call: Call, message: Message) -> Message:
        return {"processes": [_shown(running) for running in self._table.running()]}

    async def update(self, call: Call, message: Message) -> Message:
        await self._table.find(_selector(message)).process.resize(_terminal(message.get("pty") or {}))
        return {}

    async def send_input(self, call: Call, message: Message) -> Message:
        await _feed(self._table.find(_selector(message)), message.get("input") or {})
        return {}

    async def stream_input(self, call: Call, messages: AsyncIterator[Message]) -> Message:
        running: Running | None = None
        async for message in messages:
            if "start" in message:
                running = self._table.find(_selector(message["start"]))
            elif "data" in message:
                if running is None:
                    raise Fault(400, "data before start")
                await _feed(running, message["data"].get("input") or {})
        return {}

    async def close_stdin(self, call: Call, message: Message) -> Message:
        await self._table.find(_selector(message)).process.close_stdin()
        return {}

    async def send_signal(self, call: Call, message: Message) -> Message:
        await self._table.find(_selector(message)).process.signal(_signal(message.get("signal")))
        return {}


async def _start(entry: Entry, call: Call, message: Message) -> tuple[Process, Message]:
    asked = message.get("process") or {}
    if not asked.get("cmd"):
        raise Fault(400, "process.cmd is missing")
    environment = {str(key): str(value) for key, value in (asked.get("envs") or {}).items()}
    folder = asked.get("cwd") or HOME
    process = await entry.start(Start(
        arguments=[asked["cmd"], *(asked.get("args") or [])],
        folder=folder if folder.startswith("/") else f"{HOME}/{folder}",
        environment={"E2B_SANDBOX": "true", "E2B_SANDBOX_ID": entry.id} | environment,
        user=call.user,
        timeout_s=call.timeout_s,
        terminal=_terminal(message["pty"]) if message.get("pty") is not None else None,
        stdin=bool(message.get("stdin", False)),
    ))  # fmt: skip
    return process, asked


async def _events(entry: Entry, running: Running) -> AsyncIterator[Message]:
    """From the start: what is kept of the output comes first, so that a late client misses nothing it need not."""
    yield {"event": {"start": {"pid": running.process.pid}}}
    try:
        async for piece in running.process.output(from_start=True):
            if piece.lost_bytes:
                gap = f"[{piece.lost_bytes} bytes of output were dropped here: nobody took them in time]\n"
                stream = "pty" if running.terminal else "stderr"
                yield {"event": {"data": {stream: base64.b64encode(gap.encode()).decode()}}}
            yield {"event": {"data": {piece.stream: base64.b64encode(piece.data).decode()}}}
        outcome = await asyncio.shield(running.ending)
    except SandboxGone as error:
        raise Fault(
            503, f"the connection to sandbox {entry.id} ended before the stream completed: {error.message}"
        ) from error
    if outcome.timed_out:
        raise Fault(504, f"killed with its process group at its time limit, after {outcome.duration_s:.1f} s")
    yield {"event": {"end": _ended(outcome)}}


def _ended(outcome: Outcome) -> Message:
    code = 137 if outcome.code is None else outcome.code
    if code > 128:
        status = f"signal: {_signal_name(code - 128)}"
        return {"exitCode": code, "exited": False, "status": status} | (
            {"error": "out of memory"} if outcome.oom_killed else {}
        )
    return {"exitCode": code, "exited": True, "status": f"exit status {code}"}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _shown(running: Running) -> Message:
    shown: Message = {"pid": running.process.pid, "config": running.asked}
    return shown | ({"tag": running.tag} if running.tag else {})


def _selector(message: Message) -> Message:
    selector = message.get("process") or {}
    if "pid" not in selector and "tag" not in selector:
        raise Fault(400, "process.pid or process.tag is missing")
    return selector


def _terminal(pty: Message) -> Terminal:
    size = pty.get("size") or {}
    return Terminal(columns=int(size.get("cols") or 80), rows=int(size.get("rows") or 24))


async def _feed(running: Running, given: Message) -> None:
    stream = "pty" if "pty" in given else "stdin"
    if (stream == "pty") != running.terminal:
        wanted = "pty" if running.terminal else "stdin"
        raise Fault(400, f"process {running.process.pid} takes {wanted}", code=Code.FAILED_PRECONDITION)
    await running.process.send_stdin(base64.b64decode(given.get(stream) or ""))


def _signal(given: object) -> int:
    """By the names that Connect writes, or a number."""
    if isinstance(given, str) and given.startswith("SIGNAL_"):
        try:
            return signal.Signals[given.removeprefix("SIGNAL_")].value
        except KeyError:
            raise Fault(400, f"no signal {given}") from None
    if isinstance(given, int) and 0 < given < 65:
        return given
    raise Fault(400, f"no signal {given!r}")
