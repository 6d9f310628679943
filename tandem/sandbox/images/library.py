"""The images and templates of this machine, as the rest of Tandem sees them: pull, load, build, list, lease, remove.

Owns: one folder with layers and their index, its bound, and which template a name means. A leased template's layers
stay until the lease ends. Blocking work goes to threads; the methods belong to no event loop in particular.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.core.boxes import SandboxSpec
from tandem.core.cache import cache_folder
from tandem.core.errors import ConfigError, SandboxError
from tandem.sandbox.backend import Layer, Root, SandboxBackend
from tandem.sandbox.images import copying
from tandem.sandbox.images.archive import ArchiveImage
from tandem.sandbox.images.builder import Builder, BuildOptions
from tandem.sandbox.images.copying import Context
from tandem.sandbox.images.dockerfile import Dockerfile, parse
from tandem.sandbox.images.lazy_parts import export_layout
from tandem.sandbox.images.manifest import ImageConfig
from tandem.sandbox.images.pull import Source, pull
from tandem.sandbox.images.reference import ImageReference
from tandem.sandbox.images.registry import RegistryImage
from tandem.sandbox.images.stage import Stage
from tandem.sandbox.images.steps import Step, read_steps
from tandem.sandbox.images.store import Hold, LayerStore
from tandem.sandbox.images.templates import HOST, Listed, Template, TemplateIndex, split_name
from tandem.sandbox.starting import Starting

Say = Callable[[str], None]
MAX_BYTES = 50 * 2**30
PULL_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Lease:
    """A template in use: the root that boxes start from, until ``release`` (idempotent)."""

    template: Template
    root: Root
    hold: Hold

    @property
    def starting(self) -> Starting:
        return Starting(self.template.start_command, self.template.ready_command)

    def release(self) -> None:
        self.hold.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """What to build. ``file`` is a Dockerfile's text, or steps (``from_steps``); ``context`` the folder of COPY.
    ``spec`` bounds the boxes of RUN: their network is closed unless it says otherwise."""

    names: Sequence[str]
    file: str = ""
    steps: Sequence[Step] = ()
    base: str = ""  # of steps: an image or a template
    uploads: Callable[[str], Path] | None = None  # of steps: the tar of a hash
    context: Path | None = None
    arguments: Mapping[str, str] | None = None
    target: str = ""
    fresh: bool = False
    spec: SandboxSpec = SandboxSpec()
    step_timeout_s: float = 1800.0
    start_command: str = ""
    ready_command: str = ""
    warm: Sequence[str] = ()


class ImageLibrary:
    def __init__(
        self,
        folder: Path | None = None,
        *,
        max_bytes: int = MAX_BYTES,
        allow: Sequence[str] = ("*",),
        credentials: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        """``folder`` None: the user's cache. ``allow``: patterns of the registries that may be asked.
        ``credentials``: registry to name and password."""
        self.folder = folder or cache_folder("images")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.store = LayerStore(self.folder, max_bytes=max_bytes)
        self.index = TemplateIndex(self.folder / "index.sqlite")
        self._allow = allow
        self._credentials = credentials
        self._doomed: set[str] = set()  # of names that were taken away while boxes used them

    async def pull(
        self, image: str, *, name: str = "", platform: str = "", lazily: bool = True, on_line: Say | None = None
    ) -> Template:
        """Bring an image of a registry here, under its own name or ``name``. ``lazily``: boxes may start before its
        layers are here, where kernel and registry allow it.

        Raises:
            ConfigError: no image name. SandboxUnavailable, SandboxTimeout, SandboxError: as ``registry`` says.
        """
        reference = ImageReference.parse(image)
        own = f"{reference.name}:{reference.tag}" if reference.tag else reference.name

        def work() -> Template:
            with RegistryImage(
                reference, allow=self._allow, credentials=self._credentials, timeout_s=PULL_TIMEOUT_S
            ) as source:
                return self._take(source, str(reference), [name or own], platform, on_line, lazily=lazily)

        return await asyncio.to_thread(work)

    async def load(self, path: Path, *, name: str, tag: str = "", on_line: Say | None = None) -> Template:
        """Bring an image of a file or folder here (an OCI layout, or what ``docker save`` writes)."""

        def work() -> Template:
            with ArchiveImage(path, tag=tag) as source:
                return self._take(source, str(path), [name], "", on_line)

        return await asyncio.to_thread(work)

    async def build(
        self, request: BuildRequest, backend: SandboxBackend, *, build_id: str = "", on_line: Say | None = None
    ) -> Template:
        """Build a Dockerfile or a list of steps. Commands run in boxes of ``backend``.

        Raises:
            ConfigError: what is asked for makes no sense, by line. BuildFailed: a command failed, with its last lines.
        """
        for name in request.names:
            split_name(name)
        say = on_line or (lambda line: None)
        for module in request.warm:
            if not all(part.isidentifier() for part in module.split(".")):
                raise ConfigError(f"warm: {module[:60]!r} is no name of a Python module", hint="as numpy.linalg")
        files: Mapping[int, Path] = {}
        if request.file:
            file: Dockerfile = parse(request.file)
        else:
            uploads = request.uploads or (lambda digest: self.folder / "nothing")
            steps = read_steps(request.steps, base=request.base or HOST, files=uploads)
            file, files = steps.file, steps.files
        with contextlib.ExitStack() as held:
            options = BuildOptions(
                bases=lambda base, platform: self._base(base, platform, say, held),
                files=lambda: _context(request.context), arguments=request.arguments or {}, target=request.target,
                fresh=request.fresh or any(step.force for step in request.steps), spec=request.spec,
                step_timeout_s=request.step_timeout_s, own_files=files, held=held,
            )
            stage = await Builder(self.store, self.index, backend, options, say).build(file)
            template = Template(
                build_id=build_id or uuid.uuid4().hex, layers=[layer.digest for layer in stage.layers],
                host_base=stage.host_base, config=stage.config, start_command=request.start_command,
                ready_command=request.ready_command, warm=list(request.warm),
                source="steps" if not request.file else "Dockerfile", created_s=time.time(),
            )
            await asyncio.to_thread(self.index.put, template, *request.names)
        await asyncio.to_thread(self.evict)
        return template

    def lease(self, name: str) -> Lease:
        """A template's root; its layers stay while it is held.

        Raises:
            SandboxUnavailable: there is no such template. SandboxError: a layer of it is gone.
        """
        template = self.index.get(name)
        hold = self.store.hold(template.layers)
        return Lease(template, root_of(template, hold.layers), hold)

    async def lend(self, name: str) -> Lease | None:
        """As the manager asks: None is the backend's own template."""
        return None if name == HOST else await asyncio.to_thread(self.lease, name)

    async def tidy(self) -> None:
        """Some layer is used no more: take what went over the bound, and what lost its name, while it was in use."""
        await asyncio.to_thread(self._tidy)

    def _tidy(self) -> None:
        needed = self.index.layers()
        self._doomed = {digest for digest in self._doomed if digest not in needed and not self.store.remove(digest)}
        self.evict()

    def list(self) -> list[Listed]:
        return self.index.list()

    def size(self, template: Template) -> int:
        """Bytes of its layers, shared ones included."""
        return sum(self.store.size(digest) for digest in template.layers)

    def tag(self, name: str, *others: str) -> Template:
        """Give a build more names."""
        template = self.index.get(name)
        self.index.put(template, *others)
        return template

    def remove(self, name: str) -> bool:
        """Take a name away; layers that nothing needs and nobody uses go with it."""
        before = self.index.layers()
        gone = self.index.remove(name)
        if gone:
            self.evict(unneeded=True)
            self._doomed |= before - self.index.layers()
        return gone

    def evict(self, *, unneeded: bool = False) -> None:
        """Keep within the bound: layers that no template needs first, then the longest unused templates.
        ``unneeded``: take all of the former."""
        self.store.evict(keep=self.index.layers(), max_bytes=0 if unneeded else None)
        for template in self.index.oldest():
            if self.store.total() <= self.store.max_bytes:
                return
            others = {
                digest for item in self.index.list() if item.template.build_id != template.build_id
                for digest in item.template.layers
            }  # fmt: skip
            own = [digest for digest in template.layers if digest not in others]
            # One that shares all its layers frees nothing itself, but its going lets the next one free them.
            if self.store.remove_all(own) if own else not self.store.in_use(template.layers):
                self.index.remove_build(template.build_id)

    async def export(self, name: str, folder: Path, *, tag: str = "latest") -> None:
        """Write a template as an OCI layout whose layers another machine can load lazily from a registry.

        Raises:
            SandboxError: it stands on the host's files, or layers are unpacked here.
        """
        template = self.index.get(name)
        if template.host_base:
            raise SandboxError(f"{name} stands on this machine's files and is no whole image")
        await asyncio.to_thread(export_layout, self.store, template.config, template.layers, folder, tag=tag)

    def _take(
        self, source: Source, what: str, names: Sequence[str], platform: str, on_line: Say | None, *,
        lazily: bool = False,
    ) -> Template:
        for name in names:
            split_name(name)
        config = pull(source, self.store, what=what, platform=platform, lazily=lazily, on_line=on_line)
        template = Template(
            build_id=uuid.uuid4().hex, layers=list(dict.fromkeys(config.diff_ids)), config=config, source=what,
            created_s=time.time(),
        )
        self.index.put(template, *names)
        self.evict()
        return template

    async def _base(self, name: str, platform: str, say: Say, held: contextlib.ExitStack) -> Stage:
        """What FROM names: a template here, else an image that is pulled; held until the build ends."""
        template = self.index.find(name)
        if template is None:
            template = await self.pull(name, platform=platform, on_line=say)
        hold = self.store.hold(template.layers)
        held.callback(hold.release)
        return Stage(list(hold.layers), template.host_base, template.config)


def root_of(template: Template, layers: Sequence[Layer]) -> Root:
    """A template's record as a root. An image says nothing of the user: then it is root, as for every runtime of
    images; on the host's base it is the box's own user."""
    config: ImageConfig = template.config
    return Root(
        layers=tuple(layers[::-1]), host_base=template.host_base, environment=config.environment,
        user=config.user or ("" if template.host_base else "root"),
        folder=config.folder or ("" if template.host_base else "/"),
    )


@contextlib.contextmanager
def _context(folder: Path | None) -> Iterator[Context]:
    if folder is None:
        raise ConfigError("there is no folder to copy from", hint="build with a context folder")
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder to copy from")
    with copying.folder_context(folder) as context:
        yield context

