"""File verbs by the box's agent, in a box whose image holds a shell and a few programs: no interpreter."""

import asyncio
import contextlib
import errno
import io
import tarfile

import pytest
from box_pieces import SPEC, backend, said
from image_pieces import system_layer

from tandem.core.errors import SandboxError, SandboxUnavailable
from tandem.sandbox.backend import Layer, Root, Start
from tandem.serve.e2b.box_streams import StreamFiles


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    root = tmp_path_factory.mktemp("bare")
    with tarfile.open(fileobj=io.BytesIO(system_layer("mkdir", "mkfifo", "ln", "rm", "mv", "chmod", "sleep"))) as tar:
        tar.extractall(root, filter="fully_trusted")
    (root / "tmp").chmod(0o1777)
    root.chmod(0o755)
    for parent in (root.parent, root.parent.parent):  # the box's own ids must pass
        parent.chmod(0o755)
    return Root(layers=(Layer(path=root),), host_base=False)


@contextlib.asynccontextmanager
async def opened(bare, made):
    try:
        box = await made.create(SPEC, root=bare, timeout_s=20)
    except SandboxUnavailable as error:
        pytest.skip(error.message)
    try:
        assert await said(box, "if command -v python3; then exit 1; fi; echo bare") == "bare"
        yield box, StreamFiles("bare", box.start)
    finally:
        await box.kill()


def within(bare, scenario):
    async def main():
        async with backend() as made, opened(bare, made) as (box, files), asyncio.timeout(30):
            await scenario(box, files)

    asyncio.run(main())


async def parts(*data):
    for one in data:
        yield one


async def whole(files, path, user="agent"):
    return b"".join([part async for part in await files.read(path, user=user)])


def test_a_large_file_goes_in_and_out_in_parts(bare):
    async def scenario(box, files):
        block = bytes(range(256)) * 1024
        await files.write("/tmp/deep/large", parts(*[block] * 40), user="agent")
        stream, seen = await files.read("/tmp/deep/large", user="root"), 0
        async for part in stream:
            assert part == (block * 2)[seen % 256 : seen % 256 + len(part)] or part in block * 3
            seen += len(part)
        assert seen == 40 * len(block)
        assert await whole(files, "/tmp/deep/large") == block * 40
        await files.write("/tmp/empty", parts(), user="agent")
        assert await whole(files, "/tmp/empty") == b""

    within(bare, scenario)


def test_a_slow_reader_gets_all_and_one_that_leaves_ends_its_process(bare):
    async def scenario(box, files):
        block = bytes(range(256)) * 1024
        await files.write("/tmp/large", parts(*[block] * 48), user="agent")
        stream = await files.read("/tmp/large", user="agent")
        taken = [await anext(stream)]
        await asyncio.sleep(0.3)  # what is on its way arrives; the rest waits in the box
        taken += [part async for part in stream]
        assert b"".join(taken) == block * 48
        left = await files.read("/tmp/large", user="agent")
        await anext(left)
        await left.aclose()
        while box.channel.processes:
            await asyncio.sleep(0.01)

    within(bare, scenario)


def test_verbs_and_their_errors(bare):
    async def scenario(box, files):
        await files.make_folder("/tmp/a/b", user="agent")
        with pytest.raises(FileExistsError):
            await files.make_folder("/tmp/a/b", user="agent")
        await files.write("/tmp/a/f", parts(b"12345"), user="root")
        told = await files.stat("/tmp/a/f", user="agent")
        assert (told.size, told.owner, told.group) == (5, "root", "root")
        await said(box, "ln -s /etc/passwd /tmp/a/l; mkfifo /tmp/a/pipe")
        flat = [one.path for one in await files.entries("/tmp/a", depth=1, user="agent")]
        assert flat == ["/tmp/a/b", "/tmp/a/f", "/tmp/a/l", "/tmp/a/pipe"]
        assert (await files.stat("/tmp/a/l", user="agent")).target == "/etc/passwd"
        await files.move("/tmp/a/b", "/tmp/new/c", user="agent")
        for verb in (lambda: files.read("/tmp/none", user="agent"), lambda: files.stat("/tmp/a/b", user="agent"),
                     lambda: files.watch("/tmp/a/b", recursive=True, user="agent")):
            with pytest.raises(FileNotFoundError):
                await verb()
        with pytest.raises(OSError) as caught:  # a pipe is refused, and nobody waits for its other end
            await files.read("/tmp/a/pipe", user="agent")
        assert caught.value.errno == errno.EINVAL
        with pytest.raises(OSError):
            await files.write("/tmp/a/pipe", parts(b"x"), user="agent")
        with pytest.raises(NotADirectoryError):
            await files.watch("/tmp/a/f", recursive=False, user="agent")
        with pytest.raises(PermissionError):
            await files.write("/etc/mine", parts(b"x" * 1000_000), user="agent")
        with pytest.raises(OSError) as full:
            await files.write("/tmp/full", parts(*[b"x" * 2**20] * 64), user="agent")
        assert full.value.errno == errno.ENOSPC
        await files.remove("/tmp/a", user="root")
        with pytest.raises(FileNotFoundError):
            await files.stat("/tmp/a", user="agent")

    within(bare, scenario)


async def until(changes, name, kind):
    seen = []
    async for change in changes:
        seen.append((change.name, change.kind))
        if seen[-1] == (name, kind):
            return seen
    raise AssertionError(seen)


@pytest.mark.parametrize("recursive", [False, True])
def test_a_watch(bare, recursive):
    async def scenario(box, files):
        await said(box, "mkdir -p /tmp/w/sub /tmp/out")
        changes = await files.watch("/tmp/w", recursive=recursive, user="agent")
        await said(box, "cd /tmp/w; echo x > sub/inner; echo x > f; chmod 600 f; mv f g; rm g")
        seen = await until(changes, "g", "remove")
        assert [one for one in seen if one[0] in "fg"] == [
            ("f", "create"), ("f", "write"), ("f", "chmod"), ("f", "rename"), ("g", "create"), ("g", "remove")
        ]
        assert (("sub/inner", "create") in seen) is recursive
        if recursive:
            await said(box, "cd /tmp/w; mkdir -p n/m; echo x > n/m/late")
            await until(changes, "n/m/late", "create")
            await said(box, "mv /tmp/w/n /tmp/out/n; echo x > /tmp/out/n/m/outside; mv /tmp/out/n /tmp/w/z; "
                            "echo x >/tmp/w/z/m/in")
            seen = await until(changes, "z/m/in", "create")
            assert not [one for one in seen if "outside" in one[0] and one[0].startswith("n")]
        await said(box, "rm -r /tmp/w")
        assert [one async for one in changes][-1] is not None  # it ends: there is nothing left to watch

    within(bare, scenario)


def test_a_watch_sees_through_no_link_and_goes_on_after_a_snapshot(bare):
    async def scenario(box, files):
        await said(box, "mkdir -p /tmp/w /tmp/other; ln -s /tmp/other /tmp/w/link")
        changes = await files.watch("/tmp/w", recursive=True, user="agent")
        for round in range(3):
            frozen = await box.snapshot()
            await said(box, f"echo x > /tmp/other/unseen{round}; sleep 0.1; echo x > /tmp/w/seen{round}")
            seen = await until(changes, f"seen{round}", "create")
            assert not [one for one in seen if "unseen" in one[0]]
            await frozen.release()
        await changes.aclose()

    within(bare, scenario)


@pytest.mark.parametrize("recursive", [False, True])
def test_a_watch_misses_nothing_that_comes_before_it_finds_the_new_root(bare, recursive):
    async def scenario(box, files):
        await said(box, "cd /tmp; mkdir -p w/sub w/gone w/swap; cd w; for f in kept wrote rights removed; do "
                        "echo x > $f; done; echo x > sub/inner; echo x > gone/deep")
        changes = await files.watch("/tmp/w", recursive=recursive, user="agent")
        (process,) = box.channel.processes
        await said(box, f"kill -STOP {process.pid}; echo x > /tmp/w/early")  # on the old root, told by its own event
        frozen = [await box.snapshot(), await box.snapshot()]
        await said(box, "cd /tmp/w; echo x > made; echo y >> wrote; chmod 600 rights; rm removed; rm -r gone swap;"
                        "echo x > swap; echo z > sub/inner; mkdir -p new/n; echo x > new/n/file")
        await said(box, f"kill -CONT {process.pid}; sleep 0.2; echo x > /tmp/w/last")
        seen = await until(changes, "last", "create")
        expected = {("early", "create"), ("made", "create"), ("wrote", "write"), ("rights", "chmod"),
                    ("removed", "remove"), ("gone", "remove"), ("swap", "remove"), ("swap", "create"),
                    ("new", "create"), ("last", "create")}
        if recursive:
            expected |= {("sub/inner", "write"), ("gone/deep", "remove"), ("new/n", "create"), ("new/n/file", "create")}
        assert expected <= set(seen), expected - set(seen)
        assert not [one for one in seen if one[0] in ("kept", "sub")]
        await said(box, "cd /tmp/w/sub; echo x > ../sub/late; cd ..; rm kept")  # and it goes on
        later = await until(changes, "kept", "remove")
        assert (("sub/late", "create") in later) is recursive
        for one in frozen:
            await one.release()
        await changes.aclose()

    within(bare, scenario)


def test_a_watch_that_is_killed_in_the_box_is_an_error_not_an_end(bare):
    async def scenario(box, files):
        changes = await files.watch("/tmp", recursive=False, user="agent")
        (process,) = box.channel.processes
        await said(box, f"kill -9 {process.pid}")
        with pytest.raises(SandboxError):
            async for _ in changes:
                pass

    within(bare, scenario)


def test_a_watch_is_not_the_command_of_a_live_fork(bare):
    async def scenario(box, files):
        changes = await files.watch("/tmp", recursive=False, user="agent")
        shell = await box.start(Start(arguments=["/bin/sh"], stdin=True))
        await shell.send_stdin(b"x=41; echo ready\n")
        await anext(aiter(shell.output(from_start=True)))
        (child,) = await box.fork([SPEC], timeout_s=20)
        if isinstance(child, SandboxUnavailable) and "it needs" in str(child):
            pytest.skip(child.message)
        assert not isinstance(child, Exception), child
        carried = child.carried
        await carried.send_stdin(b"echo $((x + 1))\n")
        async for piece in carried.output(from_start=True):
            if b"42" in piece.data:
                break
        await child.kill()
        await said(box, "echo x > /tmp/after")
        await until(changes, "after", "create")

    within(bare, scenario)
