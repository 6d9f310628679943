"""From a registry to a command in a box, builds and all, on the smallest backend that runs them."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from chroot_backend import ChrootBackend
from image_pieces import Image, Registry, make_tar, member, serving, system_layer

from tandem.core.boxes import SandboxSpec
from tandem.core.errors import BuildFailed, ConfigError, SandboxError, SandboxUnavailable
from tandem.sandbox.abilities import Ability
from tandem.sandbox.backend import Call
from tandem.sandbox.backends.namespace import NamespaceBackend
from tandem.sandbox.images.library import BuildRequest, ImageLibrary, Lease
from tandem.sandbox.images.steps import decode_steps
from tandem.sandbox.images.templates import Template
from tandem.sandbox.images.view import View

SYSTEM = system_layer("cat", "ls", "mkdir", "rm", "id", "stat")


@pytest.fixture
def library(tmp_path: Path) -> ImageLibrary:
    library = ImageLibrary(tmp_path / "images")
    layout = Image([SYSTEM], compress=bytes, config={"Env": ["BASE=1"]}).write_layout(tmp_path / "layout")
    asyncio.run(library.load(layout, name="base:1"))
    return library


@pytest.fixture
def backend() -> Iterator[ChrootBackend]:
    if os.geteuid() != 0:
        pytest.skip("building without a sandbox backend needs root for chroot")
    trial = subprocess.run(["unshare", "-m", "true"], capture_output=True)
    if trial.returncode:
        pytest.skip(f"no mount namespaces here: {trial.stderr.decode()}")
    yield ChrootBackend()


def build(library: ImageLibrary, backend: ChrootBackend, file: str, **options: object) -> tuple[Template, list[str]]:
    lines: list[str] = []
    request = BuildRequest(**{"names": ["made"], "file": file, **options})  # type: ignore[arg-type]
    return asyncio.run(library.build(request, backend, on_line=lines.append)), lines  # type: ignore[arg-type]


def content(library: ImageLibrary, name: str = "made") -> dict[str, str]:
    """What the build added, by path."""
    lease = library.lease(name)
    try:
        with View(lease.root.layers, host_base=False) as view:
            found: dict[str, str] = {}
            waiting = [""]
            while waiting:
                folder = waiting.pop()
                for entry in view.names(folder):
                    path = f"{folder}/{entry}".lstrip("/")
                    file = view.find(path)
                    assert file is not None
                    mode = file.status.st_mode
                    kind = f"{mode & 0o7777:o} {file.status.st_uid}:{file.status.st_gid}"
                    if file.is_folder:
                        waiting.append(path)
                        found[path] = f"folder {kind}"
                    else:
                        plain = not file.is_link and not path.startswith("bin/")
                        found[path] = f"{kind} {view.read(file)[:40]}" if plain else kind
            return found
    finally:
        lease.release()


def test_an_image_of_a_registry_becomes_a_template(tmp_path):
    library = ImageLibrary(tmp_path / "images", allow=("127.0.0.1:*",))
    with serving(Registry({"team/app": Image([SYSTEM])})) as address:
        template = asyncio.run(library.pull(f"{address}/team/app:3"))
        for name in (f"{address}/team/app:3", f"{address}/team/app", template.build_id):
            assert library.index.get(name) == template, name
        with pytest.raises(SandboxUnavailable, match="not allowed"):
            asyncio.run(library.pull("docker.io/library/x"))
    lease = asyncio.run(library.lend(f"{address}/team/app:3"))
    assert lease is not None
    root = lease.root
    assert not root.host_base and root.environment["PATH"] == "/bin"
    assert (root.user, root.folder) == ("1:2", "/srv") and len(root.layers) == 1
    assert asyncio.run(library.lend("host")) is None
    assert not library.remove("nobody")
    assert library.remove(f"{address}/team/app:3")
    assert root.layers[0].path.exists()  # in use
    asyncio.run(library.tidy())
    assert root.layers[0].path.exists()
    lease.release()
    asyncio.run(library.tidy())
    assert not root.layers[0].path.exists()
    with pytest.raises(SandboxUnavailable, match="no template"):
        library.lease(template.build_id)


def test_a_dockerfile_from_end_to_end(library, backend, tmp_path):
    context = tmp_path / "context"
    (context / "src/sub").mkdir(parents=True)
    (context / "src/a.txt").write_text("a")
    (context / "src/sub/b.txt").write_text("b")
    (context / "src/junk.log").write_text("no")
    (context / ".dockerignore").write_text("**/*.log")
    (context / "one.cfg").write_text("one")
    file = """
ARG FROM_TAG=none
FROM base:${FROM_TAG} AS first
ARG word=default
ENV GREETING="hello $word" OTHER=x
WORKDIR /srv/deep
RUN echo "$GREETING from $PWD $BASE" > out && rm /etc/group && mkdir /made && id -u > /made/id
RUN ["/bin/sh", "-c", "echo exec > /made/exec"]
FROM base:1
LABEL a=b "c d"="e f"
COPY --from=first /srv/deep/out /made/ /copied/
COPY --chown=web:staff --chmod=640 src /srv/app
COPY *.cfg /usr-link/
USER web
EXPOSE 80 443/udp
VOLUME /data
ENTRYPOINT ["/bin/cat"]
CMD ["/copied/out"]
"""
    template, lines = build(library, backend, file, context=context, arguments={"FROM_TAG": "1", "word": "there"},
                            start_command="sleep 1", ready_command="true")
    found = content(library)
    assert found["copied/out"] == "644 0:0 b'hello there from /srv/deep 1\\n'"
    assert found["copied/id"] == "644 0:0 b'0\\n'" and found["copied/exec"].endswith("b'exec\\n'")
    assert found["srv/app/a.txt"] == "640 33:50 b'a'" and found["srv/app/sub/b.txt"] == "640 33:50 b'b'"
    assert "srv/app/junk.log" not in found and found["usr/share/one.cfg"] == "644 0:0 b'one'"
    assert "usr-link" in found and not found["usr-link"].startswith("folder")
    config = template.config
    assert (config.user, config.entrypoint, config.command) == ("web", ["/bin/cat"], ["/copied/out"])
    assert config.ports == ["80", "443/udp"] and config.volumes == ["/data"]
    assert config.labels == {"a": "b", "c d": "e f"}
    assert config.environment == {"BASE": "1"}
    assert (template.start_command, template.ready_command) == ("sleep 1", "true")
    assert any(line.startswith("[1/") for line in lines) and len(backend.boxes) == 2
    os.utime(context / "one.cfg", (1, 1))  # a fresh checkout
    again, lines = build(library, backend, file, context=context, arguments={"FROM_TAG": "1", "word": "there"})
    assert again.layers == template.layers and len(backend.boxes) == 2 and lines.count("cached") == 2
    (context / "src/a.txt").write_text("changed")
    changed, _ = build(library, backend, file, context=context, arguments={"FROM_TAG": "1", "word": "there"})
    same = [left == right for left, right in zip(changed.layers, template.layers, strict=True)]
    assert same == [True, True, False, False] and len(backend.boxes) == 2


def test_removals_survive_the_way_through_a_tar(library, backend):
    build(library, backend, "FROM base:1\nRUN mkdir /d && echo 1 > /d/old && ln /d/old /d/two || cat /d/old > /d/two\n"
          "RUN rm -r /d /etc/group && mkdir /d && echo 2 > /d/new\n")
    found = content(library)
    assert "etc/group" not in found and "d/old" not in found and "d/two" not in found
    assert found["d/new"].endswith("b'2\\n'")


def test_a_command_that_fails_says_its_last_lines(library, backend):
    with pytest.raises(BuildFailed, match="code 3:\nbefore\nafter"):
        build(library, backend, "FROM base:1\nRUN echo before; echo after; exit 3")
    with pytest.raises(BuildFailed, match="cannot be started"):
        build(library, backend, "FROM scratch\nRUN true")
    with pytest.raises(SandboxUnavailable, match="no template"):
        library.index.get("made")
    assert all(not box._folder.exists() for box in backend.boxes)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("FROM base:1\nCOPY nothing /x", "line 2: COPY: no file nothing"), ("FROM base:1\nCOPY ../x /x", "leads out"),
        ("FROM base:1\nADD http://a/b /x", "from the network"),
        ("FROM base:1\nCOPY --chown=nobody a /x", "no 'nobody'"),
        ("FROM base:1\nENV a", "name=value"), ("FROM base:1\nRUN --mount=type=secret,id=x true", "only caches"),
        ("FROM base:1\nCOPY --chmod=u+x a /x", "octal"), ("FROM base:1\nUSER 77\nRUN true", "as root or as agent"),
        ("FROM base:1\nCOPY secret.log /x", "no file"),
    ],
)  # fmt: skip
def test_mistakes_of_a_dockerfile(file, said, library, tmp_path):
    (tmp_path / "context").mkdir()
    (tmp_path / "context/a").write_text("a")
    (tmp_path / "context/secret.log").write_text("a")
    (tmp_path / "context/.dockerignore").write_text("*.log")
    with pytest.raises((ConfigError, BuildFailed)) as caught:
        build(library, ChrootBackend(), file, context=tmp_path / "context")
    assert said in caught.value.message


def test_copy_without_commands_needs_no_box(library, tmp_path):
    """Also on machines that make none."""
    context = tmp_path / "context"
    context.mkdir()
    (context / "files.tar.gz").write_bytes(gzip.compress(make_tar([member("in/side", b"packed", uid=7)])))
    (context / "link").symlink_to("/etc/passwd")
    (context / "f").write_text("f")
    file = (
        "FROM base:1\nADD files.tar.gz /add/\nCOPY files.tar.gz /raw/\nCOPY f /plain\nCOPY f /into/\n"
        "COPY <<one <<'two' /docs/\n$BASE \"quoted\"\none\n$BASE\ntwo\n"
    )
    build(library, ChrootBackend(), file, context=context)
    found = content(library)
    assert found["add/in/side"] == "644 7:0 b'packed'" and found["plain"].endswith("b'f'")
    assert found["into/f"].endswith("b'f'") and "raw/files.tar.gz" in found
    assert found["docs/one"].endswith("b'1 \"quoted\"\\n'") and found["docs/two"].endswith("b'$BASE\\n'")
    with pytest.raises(ConfigError, match="no file link"):  # a link of the context leads nowhere outside it
        build(library, ChrootBackend(), "FROM base:1\nCOPY link /x", context=context)


def test_steps_of_an_sdk(library, backend, tmp_path):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        info = tarfile.TarInfo("app/main.py")
        info.size = 5
        tar.addfile(info, io.BytesIO(b"hello"))
    (tmp_path / "hash").write_bytes(out.getvalue())
    steps = decode_steps(json.dumps([
        {"type": "WORKDIR", "args": ["/srv/a b"]}, {"type": "ENV", "args": ["A", "it's $x", "B", ""]},
        {"type": "COPY", "args": ["app", "code/"], "filesHash": "hash"},
        {"type": "RUN", "args": ["echo \"$A\" > said", "root"]}, {"type": "USER", "args": ["web"]},
    ]).encode())  # fmt: skip
    template, _ = build(library, backend, "", steps=steps, base="base:1", uploads=lambda digest: tmp_path / digest)
    found = content(library)
    assert found["srv/a b/code/main.py"] == "644 0:0 b'hello'" and found["srv/a b/said"].endswith("\"it's $x\\n\"")
    assert template.config.user == "web" and template.config.environment == {"BASE": "1", "A": "it's $x", "B": ""}
    with pytest.raises(ConfigError, match="not uploaded"):
        build(library, backend, "", steps=steps, base="base:1", uploads=lambda digest: tmp_path / "none")
    with pytest.raises(ConfigError, match="no build steps"):
        decode_steps(b'{"type": 1}')


def test_a_box_of_the_namespace_backend_stands_on_an_image(library):
    async def run() -> tuple[bytes, bytes]:
        backend = NamespaceBackend()
        lease = library.lease("base:1")
        try:
            box = await backend.create(SandboxSpec(), root=lease.root, timeout_s=20)
            shell = ["/bin/sh", "-c", "echo $BASE; ls /bin; cat /etc/group; ls /etc/hosts"]
            call = Call(arguments=shell, folder="/", timeout_s=30, stdout_cap_bytes=5000, stderr_cap_bytes=5000)
            outcome = await box.call(call)
            return outcome.stdout, outcome.stderr
        finally:
            await backend.close()
            lease.release()

    if Ability.IMAGES not in NamespaceBackend().abilities:
        pytest.skip("boxes are made of no images here")
    out, _ = asyncio.run(run())
    assert out.startswith(b"1\ncat\nid\nls\nmkdir\nrm\nsh\nstat\nroot:x:0:\nstaff:x:50:\n")


def test_a_build_in_boxes_of_the_namespace_backend(library):
    backend = NamespaceBackend()
    if missing := {Ability.IMAGES, Ability.PROCESSES, Ability.SNAPSHOT} - backend.abilities:
        pytest.skip(f"the namespace backend lacks {', '.join(sorted(missing))} here")

    async def run() -> list[str]:
        lines: list[str] = []
        request = BuildRequest(names=["made"], file="FROM base:1\nRUN id -u > /who && rm /etc/group && echo said\n")
        try:
            await library.build(request, backend, on_line=lines.append)
        finally:
            await backend.close()
        return lines

    assert "said" in asyncio.run(run())
    found = content(library)
    assert found["who"] == "644 0:0 b'0\\n'" and "etc/group" not in found


def test_a_backend_that_cannot_build_is_refused_by_what_it_lacks(library):
    backend = ChrootBackend()
    backend.abilities = frozenset((Ability.IMAGES, Ability.SNAPSHOT))
    with pytest.raises(SandboxUnavailable, match="chroot backend cannot processes here"):
        build(library, backend, "FROM base:1\nRUN true")


def test_names_tags_and_builds(library):
    first = library.index.get("base:1")
    second = Template(build_id="b2", layers=first.layers)
    library.index.put(second, "base:2", "base")
    assert library.index.get("base").build_id == "b2" == library.index.get("base:default").build_id
    assert library.index.get("base:b2") == second and library.index.get(f"base:{first.build_id}") == first
    library.tag("base:2", "other:x")
    assert [(item.name, item.tag) for item in library.list()] == [
        ("base", "1"), ("base", "2"), ("base", "default"), ("other", "x")]
    assert library.remove("base") and library.index.get("other:x") == second
    for name in ("host", "host:1", "a b", ""):
        with pytest.raises(ConfigError):
            library.index.put(second, name)


def test_the_bound_takes_the_longest_unused_template_but_none_in_use(library):
    templates = []
    for number in range(4):
        layer = library.store.add("", [make_tar([member(f"f{number}", os.urandom(500_000))])])
        templates.append(Template(build_id=f"t{number}", layers=[layer.digest]))
        library.index.put(templates[-1], f"t{number}")
    lease: Lease = library.lease("t0")
    library.index.find("t2")
    used = library.store.size(templates[0].layers[0])
    library.store.max_bytes = used * 2 + used // 2
    library.evict()
    names = {item.name for item in library.list()}
    assert {"t0", "t2"} <= names and "t1" not in names and library.store.total() <= library.store.max_bytes
    lease.release()


def test_a_template_goes_whole_or_not_at_all(library):
    layers = [library.store.add("", [make_tar([member(f"g{number}", os.urandom(9000))])]) for number in range(2)]
    library.index.put(Template(build_id="both", layers=[layer.digest for layer in layers]), "both")
    library.remove("base:1")
    library.store.max_bytes = 1
    with library.store.using([layers[1].digest]):
        library.evict()
        library.lease("both").release()  # its other layer was not taken from under it
    library.evict()
    assert library.index.find("both") is None and library.store.total() == 0


def test_a_broken_root_is_an_error_not_an_empty_box(library):
    template = library.index.get("base:1")
    shutil.rmtree(next((library.folder / "layers").glob(f"*{template.layers[0][-64:]}*")))
    with pytest.raises(SandboxError, match="not here any more"):
        library.lease("base:1")
