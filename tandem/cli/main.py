"""``tandem``: the commands, and every error as one clear message and an exit code.

Owns: exit codes (0 done, 1 failed, 2 used or configured wrongly, 130 interrupted). Refuses: work; a command parses its
words, calls ``app`` and prints. Invariant: the help of every command imports neither models nor PyTorch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import cast

import typer

import tandem
from tandem.cli.commands import config, doctor, evaluate, export, new, plugins, runs, sandbox, serve, train, verify
from tandem.core.errors import ConfigError, PluginError, TandemError

FAILED, WRONG_USE, INTERRUPTED = 1, 2, 130
USAGE_ERROR = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])  # its home differs by version of typer

app = typer.Typer(
    name="tandem",
    help="Post-training of language-model agents: a model learns, by reinforcement, to work with tools in real boxes.",
    epilog="Start with: tandem doctor, then: tandem train recipes/demo.toml",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
train.add(app)
evaluate.add(app)
serve.add(app)
verify.add(app)
export.add(app)
app.add_typer(runs.app, name="runs")
app.add_typer(config.app, name="config")
app.add_typer(plugins.app, name="plugins")
doctor.add(app)
app.add_typer(new.app, name="new")
app.add_typer(sandbox.app, name="sandbox")


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    if version:
        print(f"tandem {tandem.__version__}")
        raise typer.Exit


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code."""
    try:
        code = app(args=list(arguments), prog_name="tandem", standalone_mode=False)
    except USAGE_ERROR as error:
        error.show()
        return WRONG_USE
    except TandemError as error:
        tell(error)
        return WRONG_USE if isinstance(error, (ConfigError, PluginError)) else FAILED
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return code if isinstance(code, int) else 0


def tell(error: TandemError) -> None:
    """Print an error and what to do about it."""
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)


def main() -> None:
    """Entry point of the ``tandem`` program."""
    code = run(sys.argv[1:])
    if code == INTERRUPTED:  # who stops a command does not wait a second for the interpreter to tidy up
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
