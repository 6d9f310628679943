"""``tandem sandbox serve``, ``template``, ``build`` and ``audit``: the server and what it keeps.

Owns: their words. Refuses: work.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import typer

from tandem.cli import words
from tandem.cli.box_client import BoxClient, server_file
from tandem.cli.commands.boxes import KEY, URL, print_table
from tandem.config.load import load
from tandem.core.cache import cache_folder
from tandem.core.errors import ConfigError, SandboxError
from tandem.record.log import Head

STATE = typer.Option(None, "--state", help="Folder of what outlives the server; default: in this user's cache.")


def add(app: typer.Typer) -> None:
    app.command("serve", context_settings=words.FREE,
                epilog="The boxes' options are flags: --sandbox.memory-mb 1024. See them: tandem config reference "
                       "sandbox.")(serve)  # fmt: skip
    app.command("template")(template)
    app.command("audit")(audit)


def serve(
    context: typer.Context,
    host: str = typer.Option("127.0.0.1", help="Address to listen on."),
    port: int = typer.Option(3000, min=0, max=65535, help="Port to listen on; 0: any free one."),
    domain: str = typer.Option("", help="Boxes are also reached at PORT-ID.DOMAIN (a wildcard name of this server)."),
    api_key: list[str] = typer.Option([], "--api-key", help="Key that clients must have; default: one is made."),
    internet: bool = typer.Option(False, help="Boxes may have the open internet if their client asks for it."),
    state: Path | None = STATE,
) -> None:
    """Serve boxes over an E2B-compatible HTTP API, until Ctrl-C.

    \b
    tandem sandbox serve
    tandem sandbox serve --port 0 --sandbox.memory-mb 1024 --sandbox.warm 8
    """
    from tandem.app.sandbox_server import ServerOptions, serve_sandboxes

    words.refuse_misspelt(context)
    recipe, _ = load(flags=list(context.args))
    options = ServerOptions(
        state=_state(state), host=host, port=port, domain=domain, keys=tuple(api_key), internet=internet,
        note=server_file(),
    )  # fmt: skip
    raise typer.Exit(serve_sandboxes(recipe.sandbox, options))


def template(
    name: str = typer.Argument("", help="Show this one; empty: list all."),
    tag: list[str] = typer.Option([], "--tag", help="Give name:tag this tag too; may be repeated."),
    untag: list[str] = typer.Option([], "--untag", help="Take this tag away; may be repeated."),
    remove: bool = typer.Option(False, "--rm", help="Delete it; boxes made from it go on."),
    url: str = URL,
    key: str = KEY,
) -> None:
    """List, show, tag and delete templates. Build them with E2B's SDK (Template.build)."""
    with BoxClient(url, key) as client:
        if not name:
            found = client.ask("GET", "/templates")
            print_table(["name", "state", "builds", "boxes made"],
                        [[one["names"][0], one["buildStatus"], str(one["buildCount"]), str(one["spawnCount"])]
                         for one in found])  # fmt: skip
            return
        if remove:
            client.ask("DELETE", f"/templates/{name}")
        elif tag:
            client.ask("POST", "/templates/tags", {"target": name, "tags": tag})
        elif untag:
            client.ask("DELETE", "/templates/tags", {"name": name, "tags": untag})
        else:
            shown: dict[str, Any] = client.ask("GET", f"/templates/{name}")
            tags = client.ask("GET", f"/templates/{name}/tags")
            for one in shown["builds"]:
                named = ",".join(each["tag"] for each in tags if each["buildID"] == one["buildID"])
                print(f"{one['buildID']}  {one['status']}  {one['createdAt'][:19]}  {named}".rstrip())


def audit(
    action: str = typer.Argument("show", help="show or verify."),
    last: int = typer.Option(20, min=1, help="Records to show."),
    head: str = typer.Option("", help="NUMBER:DIGEST kept elsewhere, which the log must lead to."),
    state: Path | None = STATE,
) -> None:
    """Read the log of every action and every connection that boxes tried. ``verify`` names the first bad record and
    ends with 1 if there is one."""
    from tandem.sandbox import audit as log

    folder = _state(state) / "audit"
    if not folder.is_dir():
        raise ConfigError(f"no audit log in {folder}", hint="it begins with the first: tandem sandbox serve")
    if action == "verify":
        verdict = log.verify(folder, head=_head(head))
        if verdict.bad is not None:
            raise SandboxError(f"record {verdict.bad} of the audit log is bad: {verdict.problem}")
        print(f"{verdict.num_records} records, all as they were written; head {verdict.num_records}:{verdict.head}")
        return
    if action != "show":
        raise ConfigError(f"no action {action!r}", hint="show or verify")
    for line in list(log.read(folder))[-last:]:
        told = " ".join(f"{name}={value}" for name, value in line.detail.items())
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(line.time))
        print(f"{line.sequence} {moment} {line.action} {line.subject} {json.dumps(line.actor)} {told}".rstrip())


def _head(text: str) -> Head | None:
    if not text:
        return None
    number, _, digest = text.partition(":")
    if not number.isdecimal() or not digest:
        raise ConfigError(f"--head {text[:40]!r} is not NUMBER:DIGEST", hint="as an earlier verify printed it")
    return Head(int(number), digest)


def _state(given: Path | None) -> Path:
    return given or cache_folder("sandboxes", "state")
