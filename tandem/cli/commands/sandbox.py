"""``tandem sandbox``: boxes by hand."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import typer

from tandem.cli import words
from tandem.cli.commands import box_exec, box_images, box_server, boxes
from tandem.config.load import load
from tandem.config.sections.sandbox import SandboxSection
from tandem.core.boxes import ExecResult
from tandem.core.errors import ConfigError
from tandem.record.sinks.nowhere import NowhereSink

app = typer.Typer(
    help="Boxes: one command in a box of its own (run), or a server of boxes (serve) and what can be done with them.",
    epilog="Start with: tandem sandbox run -- id. Or: tandem sandbox serve, and then: tandem sandbox start",
    no_args_is_help=True,
    rich_markup_mode=None,
)
TIMED_OUT = 124


@app.callback()
def _group() -> None:
    """A group: ``tandem sandbox run``."""


box_server.add(app)
box_images.add(app)
boxes.add(app)
box_exec.add(app)


@app.command(
    context_settings={**words.FREE, "allow_interspersed_args": False},
    options_metavar="[OPTIONS] -- COMMAND...",
    epilog="The box's options are flags: --sandbox.memory-mb 128. See them: tandem config reference sandbox.",
)
def run(
    context: typer.Context,
    file: list[Path] = typer.Option([], help="Copy this file into the box first (its home folder)."),
    timeout_s: float = typer.Option(10.0, "--timeout", help="Seconds the command may take."),
) -> None:
    """Run one command in a fresh box and end with its exit code.

    \b
    tandem sandbox run -- id
    tandem sandbox run --file script.py --sandbox.memory-mb 128 -- python3 script.py
    """
    flags, command = _split(context.args)
    recipe, _ = load(flags=flags)
    result = asyncio.run(_run(recipe.sandbox, command, file, timeout_s))
    if result.timed_out:
        print(f"killed after {timeout_s:g} s", file=sys.stderr)
    if result.oom_killed:
        print("out of memory", file=sys.stderr)
    if result.truncated:
        print(f"{result.dropped_bytes} bytes of output were dropped", file=sys.stderr)
    raise typer.Exit(TIMED_OUT if result.exit_code is None else result.exit_code)


def _split(args: list[str]) -> tuple[list[str], list[str]]:
    """Flags first, then the command: from the first word that is no flag and no flag's value."""
    place = 0
    while place < len(args) and args[place].startswith("--") and args[place] != "--":
        place += 1 if "=" in args[place] else 2
    command = args[place + 1 :] if args[place : place + 1] == ["--"] else args[place:]
    if not command:
        raise ConfigError("no command to run", hint="tandem sandbox run -- id")
    return args[:place], command


async def _run(section: SandboxSection, command: list[str], files: list[Path], timeout_s: float) -> ExecResult:
    from tandem.sandbox.images.library import ImageLibrary
    from tandem.sandbox.manager import SandboxManager, spec_of

    data = {}
    for path in files:
        if not path.is_file():
            raise ConfigError(f"no file {path}")
        data[path.name] = path.read_bytes()
    boxes = SandboxManager(section, NowhereSink(), templates=ImageLibrary())
    try:
        box = await boxes.create(spec_of(section))
        for name, content in data.items():
            await box.files.write(name, content)
        return await box.commands.run(
            command,
            timeout_s=timeout_s,
            on_stdout=lambda chunk: _pass(sys.stdout, chunk),
            on_stderr=lambda chunk: _pass(sys.stderr, chunk),
        )
    finally:
        await boxes.close()


def _pass(stream, chunk: bytes) -> None:
    stream.buffer.write(chunk)
    stream.flush()
