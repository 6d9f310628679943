"""Runs Python cells in a box. It is started with ``python3 -c`` inside it and imports the standard library only.

One JSON object a line on stdin: ``{"code", "env_vars", "box"}``; on stdout the events of each cell, one JSON object a
line, the last of type ``end``. What the cell and its children write to file descriptors 1 and 2 comes as events too.

Between cells it is one thread that reads its stdin, with no pipe of its own, so that a live fork can copy it; where a
cell left threads it stays as it is. ``box`` is the box that it runs in: a copy hears that it is one.
"""

import ast
import base64
import builtins
import codecs
import contextlib
import io
import json
import linecache
import os
import select
import signal
import sys
import threading
import time
import traceback

_MIMES = {
    "_repr_html_": "html", "_repr_markdown_": "markdown", "_repr_svg_": "svg", "_repr_png_": "png",
    "_repr_jpeg_": "jpeg", "_repr_latex_": "latex", "_repr_json_": "json", "_repr_javascript_": "javascript",
}  # fmt: skip


class _Out:
    """The events' way out: descriptor 1, and a copy of it while cells write to their own."""

    def __init__(self) -> None:
        self._number = 1
        self._lock = threading.Lock()

    def move(self, number: int) -> None:
        with self._lock:
            self._number = number

    def send(self, **event: object) -> None:
        data = memoryview(json.dumps(event).encode() + b"\n")
        with self._lock:
            while data:
                data = data[os.write(self._number, data) :]


class _Catch:
    """One of the two streams: a pipe in the place of the descriptor, and a thread that turns it into events."""

    def __init__(self, out: _Out, number: int, kind: str) -> None:
        self._out, self._kind = out, kind
        reading, writing = os.pipe()
        os.dup2(writing, number)
        os.close(writing)
        self._reading, self._watched = reading, os.dup(reading)
        self._mark = b""
        self._marked = threading.Event()
        self.thread = threading.Thread(target=self._pass, daemon=True)
        self.thread.start()

    def settle(self, number: int) -> None:
        """Wait until all that was written so far has become events."""
        self._mark = b"\0" + os.urandom(16) + b"\0"
        self._marked.clear()
        os.write(number, self._mark)
        self._marked.wait(5.0)
        self._mark = b""

    def leave(self) -> None:
        """The descriptor is another now. A child of a cell may hold the pipe: it is read until that one ends."""
        look = select.poll()
        look.register(self._watched, 0)
        if look.poll(0):  # POLLHUP: nobody writes any more
            self.thread.join()
        os.close(self._watched)

    def _pass(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        held = b""
        while data := os.read(self._reading, 65536):
            held += data
            mark = self._mark
            if mark and mark in held:
                before, _, held = held.partition(mark)
                self._say(decoder.decode(before))
                self._marked.set()
            elif not mark or len(held) > len(mark):
                kept = len(mark) - 1 if mark else 0
                part, held = (held[:-kept], held[-kept:]) if kept else (held, b"")
                self._say(decoder.decode(part))
        os.close(self._reading)

    def _say(self, text: str) -> None:
        if text:
            self._out.send(type=self._kind, text=text, timestamp=time.time_ns())


class _Streams:
    """The three standard streams: the server's between cells, a cell's own while it runs."""

    def __init__(self, out: _Out) -> None:
        self._out = out
        self._kept: list[int] = []
        self._catches: dict[int, _Catch] = {}
        self._threads: list[threading.Thread] = []
        self._held = b""

    def take(self) -> None:
        if self._kept:
            return
        self._kept = [os.dup(number) for number in range(3)]
        self._out.move(self._kept[1])
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)  # a cell that asks for input hears the end of it
        os.close(nothing)
        self._catches = {1: _Catch(self._out, 1, "stdout"), 2: _Catch(self._out, 2, "stderr")}
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads += [catch.thread for catch in self._catches.values()]

    def give_back(self) -> None:
        """Not while a thread of a cell may write: it would write to the server."""
        if not self._kept or self._others():
            return
        for number, kept in enumerate(self._kept):
            os.dup2(kept, number)
        self._out.move(1)
        for kept in self._kept:
            os.close(kept)
        self._kept = []
        for catch in self._catches.values():
            catch.leave()
        self._catches = {}

    def settle(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # a cell may have put anything in its place
                stream.flush()
        for number, catch in self._catches.items():
            catch.settle(number)

    def read_line(self) -> bytes:
        """The next request; empty when there are no more."""
        while b"\n" not in self._held:
            data = os.read(self._kept[0] if self._kept else 0, 65536)
            if not data:
                return b""
            self._held += data
        line, _, self._held = self._held.partition(b"\n")
        return line

    def _others(self) -> bool:
        ours = sum(thread.is_alive() for thread in self._threads)
        try:
            return len(os.listdir("/proc/self/task")) > 1 + ours
        except OSError:
            return threading.active_count() > 1 + ours


class _Shell:
    def __init__(self) -> None:
        self.out = _Out()
        self.streams = _Streams(self.out)
        sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
        self._scope = {"__name__": "__main__", "__builtins__": builtins, "display": self.display}
        self._count = 0
        self._running = False
        signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, *_: object) -> None:
        """Ends the cell; between two cells there is nothing to interrupt."""
        if self._running:
            self._running = False
            raise KeyboardInterrupt

    def display(self, *values: object) -> None:
        for value in values:
            self._show(value, main=False)

    def run(self, code: str, environment: dict) -> None:
        self._count += 1
        known = dict(os.environ)
        before = {key: known.get(key) for key in environment}
        os.environ.update(environment)
        self.out.send(type="number_of_executions", execution_count=self._count)
        try:
            self._running = True
            self._execute(code)
            self._running = False
        except KeyboardInterrupt:
            self.out.send(type="error", name="KeyboardInterrupt", value="", traceback="interrupted")
        except BaseException as error:  # a cell may raise anything, SystemExit too: it ends the cell, not the kernel
            frames = traceback.TracebackException.from_exception(error, capture_locals=False)
            frames.stack = traceback.StackSummary.from_list(
                [frame for frame in frames.stack if frame.filename.startswith("<cell")] or frames.stack
            )
            self.out.send(
                type="error", name=type(error).__name__, value=str(error), traceback="".join(frames.format())
            )
        finally:
            self._running = False
            for key, value in before.items():
                os.environ.pop(key, None) if value is None else os.environ.__setitem__(key, value)

    def _execute(self, code: str) -> None:
        name = f"<cell {self._count}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        tree = ast.parse(code, name)
        ending = tree.body[-1] if tree.body else None
        last = ending if isinstance(ending, ast.Expr) else None
        if last is not None:
            tree.body.pop()
        exec(compile(tree, name, "exec"), self._scope)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval"), self._scope)
            if value is not None:
                self._scope["_"] = value
                self._show(value, main=True)
        self._pictures()

    def _show(self, value: object, *, main: bool) -> None:
        event: dict = {"type": "result", "is_main_result": main, "text": repr(value)}
        for method, kind in _MIMES.items():
            made = getattr(type(value), method, None)
            try:
                data = made(value) if made is not None else None
            except Exception:  # a broken picture is no reason to lose the text
                continue
            if data is not None:
                event[kind] = base64.b64encode(data).decode() if isinstance(data, bytes) else data
        if isinstance(value, (dict, list)):
            try:
                json.dumps(value)
            except (TypeError, ValueError):
                pass
            else:
                event["json"] = value
        self.streams.settle()
        self.out.send(**event)

    def _pictures(self) -> None:
        """Open figures of matplotlib, if the cell (or one before) imported it."""
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is None:
            return
        for number in pyplot.get_fignums():
            figure, buffer = pyplot.figure(number), io.BytesIO()
            figure.savefig(buffer, format="png", bbox_inches="tight")
            self.streams.settle()
            self.out.send(type="result", is_main_result=False, text=repr(figure),
                          png=base64.b64encode(buffer.getvalue()).decode())  # fmt: skip
            pyplot.close(figure)


def _draw_anew() -> None:
    """Of a copy in another box: it draws other random numbers."""
    if "random" in sys.modules:
        sys.modules["random"].seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def main() -> None:
    os.environ.setdefault("MPLBACKEND", "Agg")
    shell = _Shell()
    shell.out.send(type="ready")
    known = sys.argv[-1]  # with "-c": the last of what its server tells about it
    while line := shell.streams.read_line():
        asked = json.loads(line)
        box = asked.get("box", "")
        if box and box != known:
            _draw_anew()
            os.environ.update(E2B_SANDBOX_ID=box)
        known = box
        shell.streams.take()
        shell.run(asked["code"], asked.get("env_vars") or {})
        shell.streams.settle()
        shell.streams.give_back()
        shell.out.send(type="end")


if __name__ == "__main__":
    sys.path.insert(0, "")
    main()
