"""Builds an image from instructions: stage by stage, step by step, each step's layer found again by its key.

Owns: what each instruction does, variables and their scope, and the cache keys: a step's key says what is below it,
what it does and with which files and variables, so equal builds share layers and a change rebuilds from there.
Source: Dockerfile reference.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from tandem.core.boxes import SandboxSpec
from tandem.core.errors import ConfigError
from tandem.sandbox.backend import Layer, SandboxBackend
from tandem.sandbox.images import copying
from tandem.sandbox.images.copying import Context, Owner
from tandem.sandbox.images.dockerfile import Dockerfile, Document, Instruction
from tandem.sandbox.images.runner import run_step
from tandem.sandbox.images.stage import Stage, bare, expand_lines, number_of, platform_arguments, with_documents
from tandem.sandbox.images.store import LayerStore
from tandem.sandbox.images.templates import TemplateIndex
from tandem.sandbox.images.view import View
from tandem.sandbox.images.words import expand, split

WITHOUT_EFFECT = ("MAINTAINER", "STOPSIGNAL", "HEALTHCHECK", "ONBUILD")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """``bases`` gives what FROM names. ``files`` opens the files of COPY and ADD; an instruction may bring its own.
    ``arguments`` are values for ARG; ``fresh`` runs steps even if their layers are known."""

    bases: Callable[[str, str], Awaitable[Stage]]
    files: Callable[[], AbstractContextManager[Context]]
    arguments: Mapping[str, str] = field(default_factory=dict)
    target: str = ""
    fresh: bool = False
    spec: SandboxSpec = field(default_factory=SandboxSpec)
    step_timeout_s: float = 1800.0
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # the build's layers, until it is kept
    own_files: Mapping[int, Path] = field(default_factory=dict)  # line of an instruction: a tar of its files


class Builder:
    """One build. Belongs to one event loop; blocking work goes to threads."""

    def __init__(
        self, store: LayerStore, index: TemplateIndex, backend: SandboxBackend, options: BuildOptions,
        say: Callable[[str], None],
    ) -> None:
        self._store = store
        self._index = index
        self._backend = backend
        self._options = options
        self._say = say
        self._stages: list[Stage] = []
        self._global: dict[str, str] = {}
        self._escape = "\\"

    async def build(self, file: Dockerfile) -> Stage:
        """The last stage, or the target.

        Raises:
            ConfigError: an instruction that makes no sense. BuildFailed: a command failed. SandboxError: the rest.
        """
        self._escape = file.escape
        wanted = self._wanted(file)
        total = len(wanted)
        for number, instruction in enumerate(wanted, 1):
            self._say(f"[{number}/{total}] {instruction}")
            try:
                await self._step(instruction)
            except ConfigError as error:
                where = f"line {instruction.line}: " if instruction.line else ""
                raise ConfigError(f"{where}{instruction.kind}: {error.message}", hint=error.hint) from error
        return self._stages[-1]

    def _wanted(self, file: Dockerfile) -> list[Instruction]:
        """All up to the end of the target stage."""
        if not self._options.target:
            return list(file.instructions)
        kept: list[Instruction] = []
        inside = False
        number = -1
        for item in file.instructions:
            if item.kind == "FROM":
                if inside:
                    return kept
                number += 1
                words = split(item.text)
                names = {str(number), words[2].lower() if len(words) == 3 else ""}
                inside = self._options.target.lower() in names
            kept.append(item)
        if not inside:
            raise ConfigError(f"there is no stage {self._options.target!r}")
        return kept

    async def _step(self, item: Instruction) -> None:
        if item.kind in WITHOUT_EFFECT:
            self._say(f"{item.kind} has no effect on a box")
        elif item.kind == "ARG" and not self._stages:
            for word in split(item.text, escape=self._escape):
                name, _, value = word.partition("=")
                self._global[name] = self._options.arguments.get(name, expand(value, self._global, escape=self._escape))
        elif item.kind == "FROM":
            await self._from(item)
        elif item.kind == "RUN":
            await self._run(item)
        elif item.kind in ("COPY", "ADD"):
            await self._copy(item)
        elif item.kind == "WORKDIR":
            await self._workdir(item)
        else:
            self._describe(item)

    @property
    def _stage(self) -> Stage:
        return self._stages[-1]

    async def _from(self, item: Instruction) -> None:
        words = [expand(word, self._global, escape=self._escape) for word in split(item.text, escape=self._escape)]
        if len(words) not in (1, 3) or (len(words) == 3 and words[1].lower() != "as"):
            raise ConfigError("write it as FROM image [AS name]")
        earlier = self._earlier(words[0])
        if earlier is not None:
            base = Stage(list(earlier.layers), earlier.host_base, earlier.config)
        elif words[0] == "scratch":
            base = Stage()
        else:
            platform = expand(item.flags.get("platform", [""])[0], {**platform_arguments(), **self._global})
            base = await self._options.bases(words[0], platform)
        base.name = words[2].lower() if len(words) == 3 else ""
        self._stages.append(base)

    def _earlier(self, name: str) -> Stage | None:
        for number, stage in enumerate(self._stages):
            if name == str(number) or (stage.name and stage.name == name.lower()):
                return stage
        return None

    def _describe(self, item: Instruction) -> None:
        """Instructions that change what the image says, and no file."""
        stage = self._stage
        config = stage.config
        if item.kind == "ENV":
            stage.change(environment={**config.environment, **self._pairs(item)})
        elif item.kind == "LABEL":
            stage.change(labels={**config.labels, **self._pairs(item)})
        elif item.kind == "ARG":
            self._argument(item)
        elif item.kind == "USER":
            stage.change(user=self._word(item.text))
        elif item.kind == "EXPOSE":
            ports = [self._word(word) for word in split(item.text)]
            stage.change(ports=[*config.ports, *(port for port in ports if port not in config.ports)])
        elif item.kind == "VOLUME":
            words = list(item.words or (self._word(word) for word in split(item.text)))
            stage.change(volumes=[*config.volumes, *(word for word in words if word not in config.volumes)])
        elif item.kind == "SHELL":
            if not item.words:
                raise ConfigError('write it as SHELL ["program", "argument"]')
            stage.change(shell=list(item.words))
        else:
            words = list(item.words) if item.words is not None else [*config.shell, item.text]
            stage.change(**({"entrypoint": words, "command": []} if item.kind == "ENTRYPOINT" else {"command": words}))

    def _argument(self, item: Instruction) -> None:
        stage = self._stage
        for word in split(item.text, escape=self._escape):
            name, equals, value = word.partition("=")
            given = self._options.arguments.get(name)
            if given is None and equals:
                given = self._word(value)
            if given is None:
                given = self._global.get(name, platform_arguments().get(name))
            if given is not None:
                stage.arguments[name] = given

    def _word(self, text: str) -> str:
        return expand(text, self._stage.variables, escape=self._escape)

    def _pairs(self, item: Instruction) -> dict[str, str]:
        words = split(item.text, escape=self._escape)
        if words and "=" not in words[0]:  # the old form: all after the name is the value
            name, _, value = item.text.strip().partition(" ")
            if not value:
                raise ConfigError("write it as name=value")
            return {self._word(name): self._word(value.strip())}
        pairs: dict[str, str] = {}
        for word in words:
            name, equals, value = word.partition("=")
            if not name or not equals:
                raise ConfigError(f"{word!r} is no name=value")
            pairs[self._word(name)] = self._word(value)
        return pairs

    # ---- steps that make layers

    async def _run(self, item: Instruction) -> None:
        stage = self._stage
        for mount in item.flags.get("mount", []):
            if "type=cache" not in mount.split(","):
                raise ConfigError(f"--mount={mount}: only caches are known", hint="COPY what the command needs")
            self._say(f"--mount={mount} has no effect: the step's own layer is what is cached")
        user = item.flags.get("user", [stage.config.user])[0]
        if item.words is not None:
            arguments = list(item.words)
        elif item.documents:
            arguments = [*stage.config.shell, with_documents(item)]
        else:
            arguments = [*stage.config.shell, item.text]
        environment = stage.variables
        key = self._key("RUN", arguments, environment, user, stage.config.folder, self._options.spec.network.allow,
                        self._options.spec.network.internet)
        if await self._known(key):
            return
        new = await run_step(
            self._backend, self._store, stage.root(), arguments, spec=self._options.spec, environment=environment,
            user=user, timeout_s=self._options.step_timeout_s, say=self._say,
        )
        self._add(key, new)

    async def _copy(self, item: Instruction) -> None:
        words = list(item.words or split(item.text, escape=self._escape))
        words = [word if item.words else self._word(word) for word in words]
        documents = {f"<<{document.name}": document for document in item.documents}
        words = [bare(word) for word in words] if documents else words
        if len(words) < 2:
            raise ConfigError("it needs a source and a destination")
        *sources, destination = words
        if any("://" in source or source.startswith("git@") for source in sources):
            raise ConfigError("a build fetches no files from the network", hint="fetch them with RUN, or COPY them")
        with contextlib.ExitStack() as stack:
            view = stack.enter_context(self._stage.view())
            if documents:
                context = stack.enter_context(self._document_context(documents, stack))
                sources = [source.removeprefix("<<") for source in sources]
            elif item.line in self._options.own_files:
                context = stack.enter_context(copying.tar_context(self._options.own_files[item.line]))
            elif "from" in item.flags:
                context = await self._stage_context(self._word(item.flags["from"][0]), stack)
            else:
                context = stack.enter_context(self._options.files())
            owner, mode = self._owner(item, view), self._mode(item)
            await asyncio.to_thread(self._plan_copy, item, context, sources, destination, view, owner, mode)

    def _plan_copy(
        self, item: Instruction, context: Context, sources: Sequence[str], destination: str, view: View,
        owner: Owner | None, mode: int | None,
    ) -> None:
        found = [path for source in sources for path in copying.matching(context, source)]
        target = self._stage.absolute(destination)
        with contextlib.ExitStack() as stack:
            plain = []
            for path in found:
                file = context.view.find(context.view.resolve(path))
                assert file is not None
                if item.kind == "ADD" and not file.is_folder and copying.is_archive(context.view, file):
                    with tempfile.TemporaryDirectory(dir=self._store.folder, prefix="add-") as scratch:
                        archive = Path(scratch, "archive")
                        archive.write_bytes(context.view.read(file))
                        unpacked = stack.enter_context(copying.tar_context(archive))
                        inner = Context(unpacked.view, keeps_owners=True)
                        self._write_copy(copying.plan(inner, [""], target, view, owner=owner, mode=mode))
                else:
                    plain.append(path)
            if plain:
                if len(found) > 1 and not target.endswith("/"):
                    target += "/"
                self._write_copy(copying.plan(context, plain, target, view, owner=owner, mode=mode))

    def _write_copy(self, planned: Sequence[copying.Planned]) -> None:
        key = self._key("COPY", copying.digest(planned))
        kept = self._index.step(key)
        found = self._store.find(json.loads(kept)[0]) if kept else None
        if found is None:
            with tempfile.TemporaryDirectory(dir=self._store.folder, prefix="copy-") as scratch:
                copying.write(planned, Path(scratch, "tar"))
                found = self._store.add_file(Path(scratch, "tar"))
        self._add(key, [found])

    async def _workdir(self, item: Instruction) -> None:
        path = self._stage.absolute(self._word(item.text))
        with self._stage.view() as view:
            clean = view.resolve(path)
            there = view.find(clean)
            if there is None or not there.is_folder:
                made = copying.plan_folder(clean, view)
                await asyncio.to_thread(self._write_copy, made)
        self._stage.change(folder=path)

    async def _stage_context(self, name: str, stack: contextlib.ExitStack) -> Context:
        stage = self._earlier(name) or await self._options.bases(name, "")
        return Context(stack.enter_context(stage.view()), keeps_owners=True)

    def _document_context(
        self, documents: Mapping[str, Document], stack: contextlib.ExitStack
    ) -> AbstractContextManager[Context]:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(dir=self._store.folder, prefix="documents-"))
        for document in documents.values():
            text = document.text if document.literal else expand_lines(document.text, self._stage.variables)
            Path(scratch, document.name).write_text(text)
            Path(scratch, document.name).chmod(0o644)
        return copying.folder_context(Path(scratch))

    def _owner(self, item: Instruction, view: View) -> Owner | None:
        if "chown" not in item.flags:
            return None
        user, _, group = self._word(item.flags["chown"][0]).partition(":")
        uid, own_gid = number_of(view, "etc/passwd", user)
        gid = number_of(view, "etc/group", group)[0] if group else own_gid
        return Owner(uid=uid, gid=gid)

    def _mode(self, item: Instruction) -> int | None:
        if "chmod" not in item.flags:
            return None
        text = self._word(item.flags["chmod"][0])
        try:
            mode = int(text, 8)
        except ValueError:
            mode = -1
        if not 0 <= mode <= 0o7777:
            raise ConfigError(f"--chmod={text} is no octal mode")
        return mode

    def _key(self, *parts: object) -> str:
        below = [self._stage.host_base, *(layer.digest for layer in self._stage.layers)]
        return hashlib.sha256(json.dumps([below, parts], default=list, sort_keys=True).encode()).hexdigest()

    async def _known(self, key: str) -> bool:
        if self._options.fresh:
            return False
        kept = await asyncio.to_thread(self._index.step, key)
        layers = [self._store.find(digest) for digest in json.loads(kept)] if kept else []
        found = [layer for layer in layers if layer is not None]
        if kept is None or len(found) != len(layers):
            return False
        self._hold(found)
        self._say("cached")
        self._stage.layers += found
        return True

    def _hold(self, layers: Sequence[Layer]) -> None:
        self._options.held.callback(self._store.hold([layer.digest for layer in layers]).release)

    def _add(self, key: str, layers: Sequence[Layer]) -> None:
        self._hold(layers)
        self._stage.layers += layers
        self._index.keep_step(key, json.dumps([layer.digest for layer in layers]))
