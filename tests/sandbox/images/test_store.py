from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from image_pieces import make_tar, member, sha256

from tandem.core.errors import SandboxError
from tandem.sandbox.backend import LayerKind
from tandem.sandbox.images import store as store_module
from tandem.sandbox.images.erofs_mount import can_mount_index, mount_erofs
from tandem.sandbox.images.store import LayerStore


def layers(count: int) -> list[bytes]:
    return [make_tar([member(f"f{number}", os.urandom(100_000))]) for number in range(count)]


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path / "store", indexed=False)


def test_an_indexed_layer_is_mounted_from_its_tar(tmp_path):
    store = LayerStore(tmp_path / "store")
    if problem := can_mount_index(tmp_path):
        assert store.kind is LayerKind.FOLDER and store.why_unpacked == can_mount_index(tmp_path / "store" / "layers")
        pytest.skip(problem)
    layer = store.add("", [make_tar([member("f", b"yes")])])
    assert layer.kind is LayerKind.EROFS_TAR and layer.digest.startswith("sha256:")
    place = mount_erofs(layer.path, device=layer.device)
    try:
        with open(os.open("f", os.O_RDONLY, dir_fd=place), "rb") as file:
            assert file.read() == b"yes"
    finally:
        os.close(place)


def test_a_layer_is_kept_once_for_all_who_ask(store):
    data = layers(1)[0]
    calls = []

    def pieces():
        calls.append(1)
        yield data

    threads = [threading.Thread(target=lambda: store.add(sha256(data), pieces())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(calls) == 1 and store.find(sha256(data)) is not None


def test_a_wrong_or_broken_stream_leaves_nothing(store):
    def broken():
        yield b"x"
        raise RuntimeError("gone")

    with pytest.raises(SandboxError, match="not what its digest names"):
        store.add("sha256:" + "0" * 64, [b"x"])
    with pytest.raises(SandboxError, match="gone"):
        store.add("sha256:" + "1" * 64, broken())
    with pytest.raises(SandboxError):
        store.add("", broken())
    assert [path.name for path in (store.folder / "layers").iterdir() if path.is_dir()] == []


def test_room_is_made_from_the_longest_unused(tmp_path):
    store = LayerStore(tmp_path / "store", max_bytes=250_000, indexed=False)
    digests = [store.add("", [data]).digest for data in layers(4)]
    for age, digest in enumerate(digests):
        os.utime(store.folder / "layers" / f"{digest.replace(':', '-')}-files", (age, age))
    store.find(digests[0])  # used just now
    assert set(store.evict()) == {digests[1], digests[2]}
    assert store.find(digests[0]) and store.find(digests[3])


def test_what_is_in_use_stays_also_for_another_process(tmp_path):
    store = LayerStore(tmp_path / "store", max_bytes=0, indexed=False)
    used, kept, unused = (store.add("", [data]).digest for data in layers(3))
    program = (
        "import sys; from pathlib import Path; from tandem.sandbox.images.store import LayerStore\n"
        f"with LayerStore(Path({str(store.folder)!r}), indexed=False).using([{used!r}]):\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        store.evict(keep=[kept])
        assert store.find(used) and store.find(kept) and store.find(unused) is None
        assert not store.remove(used)
    finally:
        holder.kill()  # its hold dies with it
        holder.communicate(timeout=30)
    assert store.remove(used) and store.find(used) is None
    with pytest.raises(SandboxError, match="not here any more"), store.using([used]):
        pass


def test_a_layer_that_a_crash_of_the_machine_may_have_spoilt_is_not_used(store):
    safe, doubtful = (store.add("", [data]).digest for data in layers(2))
    for digest, boot in ((safe, store_module.BOOT.read_text().strip()), (doubtful, "an earlier boot")):
        folder = store.folder / "layers" / f"{digest.replace(':', '-')}-files"
        (folder / "boot").write_text(boot)
    assert store.find(safe) is not None
    assert store.find(doubtful) is None and len(store._folders()) == 1


@pytest.mark.parametrize("digest", ["", "sha256:../../x", "plain", "sha256:"])
def test_only_digests_are_places(digest, store):
    with pytest.raises(SandboxError, match="no digest"):
        store.find(digest)
