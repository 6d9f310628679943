"""A model behind the OpenAI chat API.

Owns: the joining of model, engine and web application for the life of the command.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tandem.app.build import engine_of
from tandem.app.preflight import ModelFiles, prepare_model
from tandem.app.supervise import FAILED, FINISHED, supervise
from tandem.config.tree import Recipe
from tandem.serve.generation import Served
from tandem.serve.openai import make_app
from tandem.serve.server import serve_forever


def serve(
    recipe: Recipe, *, model_path: Path | None = None, host: str, port: int, keys: tuple[str, ...] = ()
) -> int:
    """Serve ``model_path`` (default: the recipe's model) until a signal, to who has one of ``keys`` (none: to
    everybody); returns the exit code.

    Raises:
        TandemError: the model is missing or unknown.
    """
    files = prepare_model(recipe, model_path=model_path)
    code, detail = supervise(
        lambda: _serve(recipe, files, _name(model_path or Path(recipe.model.path)), host, port, keys),
        lambda: None,
        stopping="answers in hand get two seconds",
        interrupted=FINISHED,  # a server is stopped by a signal: that is its good end
    )
    if code == FAILED:
        print(f"error: {detail}", file=sys.stderr)
    return code


async def _serve(recipe: Recipe, files: ModelFiles, name: str, host: str, port: int, keys: tuple[str, ...]) -> None:
    print(f"loading {files.path} ...", file=sys.stderr, flush=True)
    async with engine_of(recipe, files, is_alone=True) as live:
        served = Served(
            engine=live.engine,
            renderer=files.renderer,
            names=(name,),
            max_context_tokens=files.max_context_tokens,
            keys=keys,
        )
        await serve_forever(make_app(served), host=host, port=port, on_ready=lambda url: _tell(url, name))


def _name(path: Path) -> str:
    """What clients call the model: as it was asked for, without the folders before it, or the run which exported it."""
    path = path.expanduser().absolute()
    return path.parent.name if path.name == "model" else path.name.removesuffix(".gguf")


def _tell(url: str, name: str) -> None:
    print(
        f"serving {name} at {url}/v1 (Ctrl-C ends it); try:\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"""    -d '{{"model": "{name}", "messages": [{{"role": "user", "content": "What is 12 * 34?"}}]}}'""",
        flush=True,
    )
