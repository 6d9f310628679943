"""Images and templates of this machine, for the commands that fill the library without a server.

Owns: the joining of library and backend for one pull or build. A server on the same folder sees the result at once.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tandem.config.sections.sandbox import SandboxSection
from tandem.core.errors import ConfigError
from tandem.record.sinks.nowhere import NowhereSink
from tandem.sandbox.images.library import BuildRequest, ImageLibrary
from tandem.sandbox.manager import SandboxManager, spec_of


def pull_image(image: str, *, name: str, allow: tuple[str, ...]) -> str:
    """Bring an image of a registry (or of a file or folder) here; returns its build id."""
    library = ImageLibrary(allow=allow)
    if Path(image).exists():
        if not name:
            raise ConfigError(f"{image} needs a name here", hint=f"tandem sandbox pull {image} --name NAME")
        return asyncio.run(library.load(Path(image), name=name, on_line=_say)).build_id
    return asyncio.run(library.pull(image, name=name, on_line=_say)).build_id


def build_template(
    section: SandboxSection, folder: Path, *, names: list[str], file: Path, arguments: dict[str, str], target: str,
    fresh: bool, warm: list[str],
) -> str:  # fmt: skip
    """Build a Dockerfile; returns the build id."""
    if not file.is_file():
        raise ConfigError(f"no file {file}", hint="tandem sandbox build FOLDER --file DOCKERFILE --name NAME")
    request = BuildRequest(
        names=names, file=file.read_text(), context=folder, arguments=arguments, target=target, fresh=fresh,
        spec=spec_of(section), warm=warm,
    )  # fmt: skip
    return asyncio.run(_build(section, request))


async def _build(section: SandboxSection, request: BuildRequest) -> str:
    library = ImageLibrary()
    manager = SandboxManager(section, NowhereSink(), templates=library)
    try:
        return (await library.build(request, manager.backend, on_line=_say)).build_id
    finally:
        await manager.close()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
