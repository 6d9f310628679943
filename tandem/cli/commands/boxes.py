"""``tandem sandbox ls``, ``start``, ``exec`` and the other commands that talk to a sandbox server.

Owns: their words and how answers are printed. Refuses: work; the server does it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import typer

from tandem.cli.box_client import BoxClient
from tandem.core.errors import ConfigError, SandboxError

TIMED_OUT = 124
URL = typer.Option("", "--url", help="Address of the server; default: the one last started here.")
KEY = typer.Option("", "--key", help="Its API key; default: as above.")
BOX = typer.Argument(help="Id of a box: tandem sandbox ls.")
JSON = typer.Option(False, "--json", help="Print JSON.")


def add(app: typer.Typer) -> None:
    for command in (start, ls, kill, pause, resume, fork, snapshot, timeout, upload, download, top):
        name = {"kill": "rm"}.get(command.__name__, command.__name__)
        app.command(name)(command)


def start(
    template: str = typer.Argument("base", help="Template, template:tag, or a snapshot."),
    lifetime_s: int = typer.Option(300, "--lifetime", help="Seconds until it ends (or pauses)."),
    pause: bool = typer.Option(False, "--pause", help="At its end it is paused, not killed; using it resumes it."),
    env: list[str] = typer.Option([], "--env", help="NAME=VALUE for every command; may be repeated."),
    label: list[str] = typer.Option([], "--label", help="NAME=VALUE to find it by; may be repeated."),
    allow: list[str] = typer.Option([], "--allow", help="Address, block or domain it may reach; may be repeated."),
    url: str = URL,
    key: str = KEY,
) -> None:
    """Start a box and print its id.

    \b
    tandem sandbox start
    tandem sandbox start python --lifetime 3600 --label job=7 --allow pypi.org
    """
    body: dict[str, Any] = {
        "templateID": template, "timeout": lifetime_s, "autoPause": pause, "autoResume": {"enabled": pause},
        "envVars": pairs(env, "--env"), "metadata": pairs(label, "--label"), "network": {"allowOut": allow},
        "allowInternetAccess": False,
    }  # fmt: skip
    with BoxClient(url, key) as client:
        print(client.ask("POST", "/v2/sandboxes", body)["sandboxID"])


def ls(
    label: list[str] = typer.Option([], "--label", help="Only boxes with NAME=VALUE; may be repeated."),
    state: str = typer.Option("", help="running or paused; default: both."),
    as_json: bool = JSON,
    url: str = URL,
    key: str = KEY,
) -> None:
    """List boxes, the newest first."""
    from urllib.parse import urlencode

    words = {"metadata": urlencode(pairs(label, "--label"))} if label else {}
    with BoxClient(url, key) as client:
        boxes = client.all_boxes(words | ({"state": state} if state else {}))
    if as_json:
        print(json.dumps(boxes, indent=2))
        return
    print_table(
        ["id", "state", "template", "started", "ends", "labels"],
        [[box["sandboxID"], box["state"], box["alias"], box["startedAt"][:19], box["endAt"][:19],
          ",".join(f"{name}={value}" for name, value in box["metadata"].items())] for box in boxes],
    )  # fmt: skip


def kill(boxes: list[str] = typer.Argument(help="Ids."), url: str = URL, key: str = KEY) -> None:
    """End boxes. What is in them is lost; snapshots of them stay."""
    with BoxClient(url, key) as client:
        for box in boxes:
            client.ask("DELETE", f"/sandboxes/{box}")


def pause(
    box: str = BOX,
    files: bool = typer.Option(False, "--files", help="Keep its files only, no processes."),
    cold: bool = typer.Option(False, "--cold", help="Give its memory back, too (needs swap); of a paused box as well."),
    url: str = URL,
    key: str = KEY,
) -> None:
    """Stop a box where it is; it costs no CPU until it is resumed."""
    if files and cold:
        raise ConfigError("--files and --cold: with its files only a box keeps no memory to give back",
                          hint="leave one of them out")  # fmt: skip
    with BoxClient(url, key) as client:
        client.ask("POST", f"/sandboxes/{box}/pause", {"memory": not files, "cold": cold})


def resume(
    box: str = BOX,
    lifetime_s: int = typer.Option(300, "--lifetime", help="Seconds it then has at least."),
    url: str = URL,
    key: str = KEY,
) -> None:
    """Let a paused box go on."""
    with BoxClient(url, key) as client:
        client.ask("POST", f"/v2/sandboxes/{box}/connect", {"timeout": lifetime_s})


def fork(
    box: str = BOX,
    count: int = typer.Option(1, min=1, max=100, help="How many."),
    lifetime_s: int = typer.Option(300, "--lifetime", help="Seconds each lives."),
    live: bool = typer.Option(False, "--live", help="With its running interpreter or shell, not only its files."),
    url: str = URL,
    key: str = KEY,
) -> None:
    """Make copies of a box as it is now; print their ids. Ends with 1 if one of them failed."""
    with BoxClient(url, key) as client:
        made = client.ask("POST", f"/sandboxes/{box}/fork", {"count": count, "timeout": lifetime_s, "live": live})
    failed = [child["error"]["message"] for child in made if "error" in child]
    for child in made:
        if "sandbox" in child:
            print(child["sandbox"]["sandboxID"])
    if failed:
        raise SandboxError(f"{len(failed)} of {count} were not made: {failed[0]}")


def snapshot(
    box: str = typer.Argument("", help="Id of a box; empty: list snapshots."),
    name: str = typer.Option("", "--name", help="Name to start boxes from it by."),
    delete: str = typer.Option("", "--rm", help="Delete this snapshot instead."),
    url: str = URL,
    key: str = KEY,
) -> None:
    """Keep the files of a box as they are now; the box goes on. Start boxes from it: tandem sandbox start NAME."""
    with BoxClient(url, key) as client:
        if delete:
            client.ask("DELETE", f"/templates/{delete}")
        elif box:
            print(client.ask("POST", f"/sandboxes/{box}/snapshots", {"name": name} if name else {})["snapshotID"])
        else:
            found = client.ask("GET", "/snapshots")
            print_table(["id", "names"], [[one["snapshotID"], ",".join(one["names"])] for one in found])


def timeout(box: str = BOX, seconds: int = typer.Argument(min=0, help="From now."), url: str = URL,
            key: str = KEY) -> None:  # fmt: skip
    """Set when a box ends."""
    with BoxClient(url, key) as client:
        client.ask("POST", f"/sandboxes/{box}/timeout", {"timeout": seconds})


def upload(
    box: str = BOX,
    source: Path = typer.Argument(help="A file here; - is stdin."),
    target: str = typer.Argument("", help="Path in the box; default: its home folder and the file's name."),
    user: str = typer.Option("", help="agent or root."),
    url: str = URL,
    key: str = KEY,
) -> None:
    """Copy a file into a box."""
    if str(source) == "-" and not target:
        raise ConfigError("stdin has no name", hint=f"tandem sandbox upload {box} - PATH")
    if str(source) != "-" and not source.is_file():
        raise ConfigError(f"no file {source}")
    data = sys.stdin.buffer.read() if str(source) == "-" else source.read_bytes()
    with BoxClient(url, key) as client:
        client.upload(box, target or source.name, data, user=user)


def download(
    box: str = BOX,
    source: str = typer.Argument(help="Path in the box."),
    target: Path = typer.Argument(Path("-"), help="A file here; - is stdout."),
    user: str = typer.Option("", help="agent or root."),
    url: str = URL,
    key: str = KEY,
) -> None:
    """Copy a file out of a box."""
    with BoxClient(url, key) as client:
        data = client.download(box, source, user=user)
    if str(target) == "-":
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    else:
        (target / Path(source).name if target.is_dir() else target).write_bytes(data)


def top(
    every_s: float = typer.Option(0.0, "--every", help="Seconds between two looks; 0: one look."),
    url: str = URL,
    key: str = KEY,
) -> None:
    """Show what each running box costs."""
    with BoxClient(url, key) as client:
        while True:
            boxes = client.all_boxes({"state": "running"})
            rows = []
            for box in boxes:
                try:
                    told = (client.ask("GET", f"/sandboxes/{box['sandboxID']}/metrics") or [{}])[-1]
                except SandboxError:  # it ended meanwhile
                    continue
                rows.append([box["sandboxID"], box["alias"], _number(told.get("cpuUsedPct"), "%"),
                             _mebi(told.get("memUsed")), _mebi(told.get("diskUsed"))])  # fmt: skip
            print_table(["id", "template", "cpu", "memory", "disk"], rows)
            if not every_s:
                return
            time.sleep(every_s)
            print()


def pairs(words: list[str], flag: str) -> dict[str, str]:
    if bad := [word for word in words if "=" not in word]:
        raise ConfigError(f"{flag} {bad[0]}: no value", hint=f"{flag} NAME=VALUE")
    return {word.partition("=")[0]: word.partition("=")[2] for word in words}


def print_table(head: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    for row in [head, *rows]:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _number(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.0f}{unit}"


def _mebi(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**20:.1f} MiB"

