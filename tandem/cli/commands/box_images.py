"""``tandem sandbox pull`` and ``build``: what boxes can start from, without a server.

Owns: their words. Refuses: work.
"""

from __future__ import annotations

from pathlib import Path

import typer

from tandem.cli import words
from tandem.cli.commands.boxes import pairs
from tandem.config.load import load


def add(app: typer.Typer) -> None:
    app.command("pull")(pull)
    app.command("build", context_settings=words.FREE)(build)


def pull(
    image: str = typer.Argument(help="Name of an image, or an OCI layout or docker-save file."),
    name: str = typer.Option("", help="What boxes are started from it by; default: the image's own name."),
    allow: list[str] = typer.Option(["*"], help="Pattern of registries that may be asked; may be repeated."),
) -> None:
    """Bring an image here and print its build id. It is not unpacked where the kernel can mount it as it is.

    \b
    tandem sandbox pull python:3.12-slim
    tandem sandbox pull ./image.tar --name mine
    """
    from tandem.app.images import pull_image

    print(pull_image(image, name=name, allow=tuple(allow)))


def build(
    context: typer.Context,
    folder: Path = typer.Argument(Path("."), help="What COPY copies from."),
    name: list[str] = typer.Option(..., "--name", "-t", help="name or name:tag; may be repeated."),
    file: Path | None = typer.Option(None, "--file", "-f", help="Dockerfile; default: the folder's."),
    argument: list[str] = typer.Option([], "--build-arg", help="NAME=VALUE of an ARG; may be repeated."),
    target: str = typer.Option("", help="Stage to stop at."),
    warm: list[str] = typer.Option([], help="Python module that boxes of a server have imported; may be repeated."),
    fresh: bool = typer.Option(False, help="Run every step, whatever was built before."),
) -> None:
    """Build a template from a Dockerfile and print its build id.

    \b
    tandem sandbox build . --name tools:v1
    tandem sandbox start tools:v1
    """
    from tandem.app.images import build_template

    words.refuse_misspelt(context)
    recipe, _ = load(flags=list(context.args))
    print(build_template(recipe.sandbox, folder, names=name, file=file or folder / "Dockerfile",
                         arguments=pairs(argument, "--build-arg"), target=target, fresh=fresh, warm=warm))  # fmt: skip
