"""``tandem serve``."""

from __future__ import annotations

import typer

from tandem.cli import words


def add(app: typer.Typer) -> None:
    app.command("serve", context_settings=words.FREE, epilog=words.FLAGS_HELP)(serve)


def serve(
    context: typer.Context,
    model: str = typer.Argument(
        help="A run (its exported model), or a model: a folder, a .gguf file, smollm2, gemma3, tiny."
    ),
    host: str = typer.Option("127.0.0.1", help="Address to listen on."),
    port: int = typer.Option(8000, min=0, max=65535, help="Port to listen on; 0: any free one."),
    api_key: list[str] = typer.Option([], envvar="TANDEM_API_KEY", help="Let in who has this key (may be repeated)."),
) -> None:
    """Serve a model over the OpenAI chat and completions API.

    \b
    tandem serve last
    tandem serve smollm2 --port 9000 --engine.infer.max-num-seqs 16

    \b
    A client whose base URL is /sessions/NAME/v1 is recorded token by token: GET /sessions/NAME/ shows it.
    """
    from tandem.app.serve import serve as start

    recipe, path = words.recipe_and_model(context, model)
    raise typer.Exit(start(recipe, model_path=path, host=host, port=port, keys=tuple(api_key)))
