"""A layer as a tree of files, with what the image format says about removal turned into what overlayfs reads.

Owns: whiteouts (``.wh.NAME`` becomes a character device 0/0), opaque folders, hard links, and what an image may not
bring: device nodes (left out and counted) and overlayfs's own attributes, with which a layer could reach into others.

Source: OCI image specification, "Image Layer Filesystem Changeset"; Linux Documentation/filesystems/overlayfs.rst.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from dataclasses import dataclass, field

from tandem.core.errors import SandboxError
from tandem.sandbox.images.tar_reader import Entry, inside

WHITEOUT = b".wh."
OPAQUE = b".wh..wh..opq"
OPAQUE_XATTR = b"trusted.overlay.opaque"
FOREIGN_XATTRS = (b"trusted.overlay.", b"user.overlay.")
MAX_LINKS = 40


@dataclass(slots=True, eq=False)
class Node:
    """One inode. A regular file's bytes are at ``offset`` of the tar, or ``data`` itself where that is set."""

    mode: int
    uid: int = 0
    gid: int = 0
    mtime: float = 0.0
    size: int = 0
    offset: int = 0
    data: bytes | None = None
    device: tuple[int, int] = (0, 0)
    num_links: int = 1
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    children: dict[bytes, Node] | None = None

    @property
    def is_folder(self) -> bool:
        return self.children is not None

    @property
    def is_whiteout(self) -> bool:
        return stat.S_ISCHR(self.mode) and self.device == (0, 0)


@dataclass(slots=True)
class Tree:
    root: Node
    num_skipped_devices: int = 0


def folder(mode: int = 0o755) -> Node:
    return Node(mode=stat.S_IFDIR | mode, children={})


def build_tree(entries: Iterable[Entry], *, name: str = "layer") -> Tree:
    """The tree of a layer's tar.

    Raises:
        SandboxError: a hard link to nothing, or a path through something that is no folder.
    """
    tree = Tree(folder())
    folders: dict[bytes, Node] = {b"": tree.root}
    links: list[tuple[Node, bytes, bytes]] = []
    for entry in entries:
        parent_path, _, base = entry.path.rpartition(b"/")
        if not entry.path:
            if stat.S_ISDIR(entry.mode):
                _describe(tree.root, entry)
            continue
        parent = folders.get(parent_path)
        if parent is None or parent.children is None:
            parent = folders[parent_path] = _folder_at(tree.root, parent_path, name)
        assert parent.children is not None
        if base.startswith(WHITEOUT):
            _remove(parent, base)
        elif not stat.S_IFMT(entry.mode):
            links.append((parent, base, inside(entry.link, name=name)))
        elif stat.S_ISCHR(entry.mode) or stat.S_ISBLK(entry.mode):
            tree.num_skipped_devices += 1
        else:
            node = _put(parent, base, entry)
            if node.children is not None:
                folders[entry.path] = node
            elif entry.path in folders:  # a folder was replaced by a file
                folders = {b"": tree.root}
    _link(tree.root, links, name)
    return tree


def _link(root: Node, links: list[tuple[Node, bytes, bytes]], name: str) -> None:
    for parent, base, target in links:
        found = _find(root, target)
        if found is None or found.children is not None:
            raise SandboxError(f"{name}: {base!r} is a hard link to {target!r}, which is no file of this layer")
        assert parent.children is not None
        if parent.children.get(base) is not found:
            parent.children[base] = found
            found.num_links += 1


def _put(parent: Node, base: bytes, entry: Entry) -> Node:
    assert parent.children is not None
    there = parent.children.get(base)
    is_folder = stat.S_ISDIR(entry.mode)
    if there is not None and there.children is not None and is_folder:
        _describe(there, entry)
        return there
    node = Node(mode=entry.mode, children={} if is_folder else None)
    _describe(node, entry)
    if is_folder and there is not None and there.is_whiteout:
        node.xattrs[OPAQUE_XATTR] = b"y"
    parent.children[base] = node
    return node


def _describe(node: Node, entry: Entry) -> None:
    node.mode, node.uid, node.gid, node.mtime = entry.mode, entry.uid, entry.gid, entry.mtime
    node.size, node.offset = entry.size, entry.offset
    if stat.S_ISLNK(entry.mode):
        node.data, node.size = entry.link, len(entry.link)
    if entry.xattrs:
        kept = {key: value for key, value in entry.xattrs.items() if not key.startswith(FOREIGN_XATTRS)}
        node.xattrs = {**({OPAQUE_XATTR: b"y"} if OPAQUE_XATTR in node.xattrs else {}), **kept}


def _remove(parent: Node, base: bytes) -> None:
    assert parent.children is not None
    if base == OPAQUE:
        parent.xattrs[OPAQUE_XATTR] = b"y"
        return
    gone = base[len(WHITEOUT) :]
    if not gone or gone.startswith(WHITEOUT):  # the union file system's own bookkeeping
        return
    there = parent.children.get(gone)
    if there is None:
        parent.children[gone] = Node(mode=stat.S_IFCHR)
    elif there.children is not None:  # removed below, made anew here
        there.xattrs[OPAQUE_XATTR] = b"y"


def _folder_at(root: Node, path: bytes, name: str) -> Node:
    """The folder a path leads to, made where it is missing; links inside the layer are followed."""
    node = root
    trail = [root]
    rest = path.split(b"/")[::-1]
    followed = 0
    while rest:
        part = rest.pop()
        if part in (b"", b"."):
            continue
        if part == b"..":
            if len(trail) > 1:
                trail.pop()
            node = trail[-1]
            continue
        assert node.children is not None
        child = node.children.get(part)
        if child is None or child.is_whiteout:
            opaque = child is not None
            child = node.children[part] = folder()
            if opaque:
                child.xattrs[OPAQUE_XATTR] = b"y"
        if stat.S_ISLNK(child.mode):
            followed += 1
            target = child.data or b""
            if followed > MAX_LINKS:
                raise SandboxError(f"{name}: the links on the way to {path!r} never end")
            if target.startswith(b"/"):
                trail = [root]
                node = root
            rest += target.split(b"/")[::-1]
            continue
        if child.children is None:
            raise SandboxError(f"{name}: {part!r} in {path!r} is no folder")
        node = child
        trail.append(child)
    return node


def _find(root: Node, path: bytes) -> Node | None:
    node = root
    for part in path.split(b"/"):
        if stat.S_ISLNK(node.mode) or node.children is None or (found := node.children.get(part)) is None:
            return None
        node = found
    return node
