"""Runs Python cells in a box. It is started with ``python3 -c`` inside it and imports the standard library only.

One JSON object a line on stdin: ``{"code", "env_vars", "path"}``; on stdout the events of each cell, one JSON object a
line, the last of type ``end``. What the cell and its children write to file descriptors 1 and 2 comes as events too.
"""

import ast
import base64
import builtins
import codecs
import io
import json
import linecache
import os
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
    """The events' own way out, apart from the streams that cells write to."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
        self._lock = threading.Lock()

    def send(self, **event: object) -> None:
        with self._lock:
            self._file.write(json.dumps(event) + "\n")
            self._file.flush()


class _Catch:
    """One of the two streams: a pipe in the place of the descriptor, and a thread that turns it into events."""

    def __init__(self, out: _Out, number: int, kind: str) -> None:
        self._out, self._kind = out, kind
        reading, writing = os.pipe()
        os.dup2(writing, number)
        os.close(writing)
        self._reading = reading
        self._mark = b""
        self._marked = threading.Event()
        threading.Thread(target=self._pass, daemon=True).start()

    def settle(self, number: int) -> None:
        """Wait until all that was written so far has become events."""
        self._mark = b"\0" + os.urandom(16) + b"\0"
        self._marked.clear()
        os.write(number, self._mark)
        self._marked.wait(5.0)
        self._mark = b""

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

    def _say(self, text: str) -> None:
        if text:
            self._out.send(type=self._kind, text=text, timestamp=time.time_ns())


class _Shell:
    def __init__(self) -> None:
        self.out = _Out()
        self._catches = {1: _Catch(self.out, 1, "stdout"), 2: _Catch(self.out, 2, "stderr")}
        sys.stdout = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8", errors="replace")
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="replace")
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

    def settle(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, catch in self._catches.items():
            catch.settle(number)

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
        self.settle()
        self.out.send(**event)

    def _pictures(self) -> None:
        """Open figures of matplotlib, if the cell (or one before) imported it."""
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is None:
            return
        for number in pyplot.get_fignums():
            figure, buffer = pyplot.figure(number), io.BytesIO()
            figure.savefig(buffer, format="png", bbox_inches="tight")
            self.settle()
            self.out.send(type="result", is_main_result=False, text=repr(figure),
                          png=base64.b64encode(buffer.getvalue()).decode())  # fmt: skip
            pyplot.close(figure)


def main() -> None:
    os.environ.setdefault("MPLBACKEND", "Agg")
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # a cell that asks for input hears the end of it
    shell = _Shell()
    shell.out.send(type="ready")
    while True:
        line = requests.readline()
        if not line:
            return
        asked = json.loads(line)
        shell.run(asked["code"], asked.get("env_vars") or {})
        shell.settle()
        shell.out.send(type="end")


if __name__ == "__main__":
    sys.path.insert(0, "")
    main()
