"""``tandem sandbox exec`` and ``connect``: commands and terminals in a box of a sandbox server.

Owns: the local side of a command's streams: standard input, signals, the terminal's mode and size. Invariant: the local
terminal is put back as it was, however the command ends.
"""

from __future__ import annotations

import base64
import os
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from tandem.cli.box_client import BoxClient
from tandem.cli.commands.boxes import BOX, KEY, TIMED_OUT, URL
from tandem.core.errors import ConfigError, SandboxError, SandboxTimeout

PART_BYTES = 32768
Message = dict[str, Any]


def add(app: typer.Typer) -> None:
    app.command("exec", context_settings={"allow_interspersed_args": False},
                options_metavar="[OPTIONS]")(execute)  # fmt: skip
    app.command("connect")(connect)


def execute(
    box: str = BOX,
    command: list[str] = typer.Argument(help="Command and its words; one word goes through the shell."),
    timeout_s: float = typer.Option(60.0, "--timeout", help="Seconds it may take, all that it started too; 0: no end."),
    stdin: bool = typer.Option(False, "--stdin", "-i", help="Pass our standard input on."),
    folder: str = typer.Option("", "--cwd", help="Folder in the box."),
    user: str = typer.Option("", help="agent or root."),
    url: str = URL,
    key: str = KEY,
) -> None:
    """Run a command in a box and end with its exit code (124: killed at its time limit).

    \b
    tandem sandbox exec ID -- python3 -c 'print(1)'
    tandem sandbox exec --timeout 5 ID 'make test | tail'
    """
    command = command[1:] if command[0] == "--" else command
    words = ["/bin/sh", "-c", command[0]] if len(command) == 1 else command
    asked: Message = {"process": {"cmd": words[0], "args": words[1:]} | ({"cwd": folder} if folder else {}),
                      "stdin": stdin}  # fmt: skip
    with BoxClient(url, key) as client:
        events = client.stream(box, "process.Process/Start", asked, timeout_s=timeout_s or None, user=user)
        raise typer.Exit(_follow(client, box, events, stdin=stdin))


def connect(
    box: str = BOX,
    pid: int = typer.Option(0, help="A running command to join instead of a new shell."),
    shell: str = typer.Option("/bin/bash", help="What to run."),
    user: str = typer.Option("", help="agent or root."),
    url: str = URL,
    key: str = KEY,
) -> None:
    """Open a terminal in a box. End it with exit or Ctrl-D; what runs in it ends too."""
    if not sys.stdin.isatty() and not pid:
        raise ConfigError("standard input is no terminal", hint=f"tandem sandbox exec -i {box} -- COMMAND")
    with BoxClient(url, key) as client:
        if pid:
            asked: Message = {"process": {"pid": pid}}
            events = client.stream(box, "process.Process/Connect", asked, timeout_s=None)
            raise typer.Exit(_follow(client, box, events, stdin=False))
        asked = {"process": {"cmd": shell, "args": ["-i", "-l"], "envs": {"TERM": "xterm-256color"}},
                 "pty": {"size": _size()}}  # fmt: skip
        events = client.stream(box, "process.Process/Start", asked, timeout_s=None, user=user)
        with _raw_terminal():
            raise typer.Exit(_follow(client, box, events, stdin=True, terminal=True))


def _follow(client: BoxClient, box: str, events: Iterator[Message], *, stdin: bool, terminal: bool = False) -> int:
    try:
        for message in events:
            event = message.get("event", {})
            if "start" in event:
                pid = event["start"]["pid"]
                if stdin:
                    _pass_stdin(client, box, pid, terminal)
                if terminal:
                    _follow_size(client, box, pid)
            elif "data" in event:
                for stream, data in event["data"].items():
                    out = sys.stderr if stream == "stderr" else sys.stdout
                    out.buffer.write(base64.b64decode(data))
                    out.flush()
            elif "end" in event:
                return int(event["end"].get("exitCode", 0))
    except SandboxTimeout as error:
        print(f"error: {error.message}", file=sys.stderr)
        return TIMED_OUT
    raise SandboxError("the command's end was not told")


def _pass_stdin(client: BoxClient, box: str, pid: int, terminal: bool) -> None:
    def read() -> None:
        process = {"pid": pid}
        try:
            while data := os.read(0, PART_BYTES):
                given = {"pty" if terminal else "stdin": base64.b64encode(data).decode()}
                client.call(box, "process.Process/SendInput", {"process": process, "input": given})
            if not terminal:
                client.call(box, "process.Process/CloseStdin", {"process": process})
        except (SandboxError, OSError):  # the command has ended: its stream says so
            pass

    threading.Thread(target=read, daemon=True).start()


def _follow_size(client: BoxClient, box: str, pid: int) -> None:
    def resized(*_: object) -> None:
        message = {"process": {"pid": pid}, "pty": {"size": _size()}}
        threading.Thread(target=client.call, args=(box, "process.Process/Update", message), daemon=True).start()

    signal.signal(signal.SIGWINCH, resized)


def _size() -> Message:
    size = os.get_terminal_size(0)
    return {"cols": size.columns, "rows": size.lines}


@contextmanager
def _raw_terminal() -> Iterator[None]:
    before = termios.tcgetattr(0)
    try:
        tty.setraw(0)
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
