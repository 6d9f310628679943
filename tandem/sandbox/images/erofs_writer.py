"""Writes an EROFS image of 512-byte blocks whose files' bytes stay where they are: in the raw tar beside it.

Owns: the on-disk format as far as it is needed: extended inodes, sorted folders, inline links and attributes, one
chunk index a file that points into the second device (the tar). Nothing is compressed and nothing is copied, so an
image of half a gigabyte gets its index in a fraction of a second. Invariant: equal trees give equal bytes.
Limits of the format at this block size: 2 TiB a tar, names of 255 bytes.

Source: Linux fs/erofs/erofs_fs.h and Documentation/filesystems/erofs.rst.
"""

from __future__ import annotations

import stat
import struct
from dataclasses import dataclass, field

from tandem.core.errors import SandboxError
from tandem.sandbox.images.tree import Node

BLOCK_BITS = 9
BLOCK = 1 << BLOCK_BITS
SLOT = 32  # a node id counts these
MAGIC = 0xE0F5E1E2
SUPER_OFFSET, SUPER_SIZE = 1024, 128
DEVICE_SLOT = 128
META_OFFSET = 1536
CHUNKED_FILE, DEVICE_TABLE = 0x4, 0x8
FLAT_PLAIN, FLAT_INLINE, CHUNK_BASED = 0, 2, 4
CHUNK_INDEXES, MAX_CHUNK_BITS = 0x20, 31
INODE_SIZE = 64
NO_XATTRS = b""
FILE_TYPES = {
    stat.S_IFREG: 1, stat.S_IFDIR: 2, stat.S_IFCHR: 3, stat.S_IFBLK: 4, stat.S_IFIFO: 5, stat.S_IFSOCK: 6,
    stat.S_IFLNK: 7,
}  # fmt: skip
XATTR_PREFIXES = (  # the longest that fits goes first
    (b"system.posix_acl_access", 2), (b"system.posix_acl_default", 3), (b"user.", 1), (b"trusted.", 4),
    (b"security.", 6),
)  # fmt: skip
SUPER = struct.Struct("<IIIBBHQQIIII16s16sIHHHBBIQB23x")
INODE = struct.Struct("<HHHHQIIIIQII16x")
DIRENT = struct.Struct("<QHBx")
CHUNK = struct.Struct("<HHI")


@dataclass(slots=True, eq=False)
class _Place:
    """Where an inode goes and what follows it."""

    node: Node
    parent: _Place | None
    nid: int = 0
    xattrs: bytes = NO_XATTRS
    layout: int = FLAT_PLAIN
    size: int = 0
    body: bytes = b""  # data of links and of files that carry their own
    first_block: int = 0
    num_blocks: int = 0
    entries: list[tuple[bytes, _Place]] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=list)  # of a folder: [first entry, end, bytes]


def write_erofs(root: Node, *, device_bytes: int) -> bytes:
    """The image of a tree. ``device_bytes`` is the size of the tar that files' offsets point into (0: there is none,
    every file carries its ``data``).

    Raises:
        SandboxError: a name, attribute or offset that the format cannot hold.
    """
    places = _number_all(root)
    position = META_OFFSET
    for place in places:
        position = _allocate(place, position)
    next_block = -(-position // BLOCK)
    for place in places:
        if place.num_blocks:
            place.first_block = next_block
            next_block += place.num_blocks
    image = bytearray(next_block * BLOCK)
    for place in places:
        _write_inode(image, place)
    image[SUPER_OFFSET : SUPER_OFFSET + SUPER_SIZE] = SUPER.pack(
        MAGIC, 0, 0, BLOCK_BITS, 0, places[0].nid, len(places), 0, 0, next_block, 0, 0, bytes(16), bytes(16),
        CHUNKED_FILE | DEVICE_TABLE if device_bytes else 0, 0, 1 if device_bytes else 0,
        (SUPER_OFFSET + SUPER_SIZE) // DEVICE_SLOT if device_bytes else 0, 0, 0, 0, 0, 0,
    )  # fmt: skip
    if device_bytes:
        struct.pack_into("<64xII56x", image, SUPER_OFFSET + SUPER_SIZE, -(-device_bytes // BLOCK), 0)
    return bytes(image)


def _number_all(root: Node) -> list[_Place]:
    """Every inode once, folder by folder, so that what is looked up together lies together."""
    top = _Place(root, None)
    places, seen = [top], {id(root): top}
    queue = [top]
    while queue:
        place = queue.pop()
        assert place.node.children is not None
        inner: list[_Place] = []
        for name in sorted(place.node.children):
            node = place.node.children[name]
            if not 0 < len(name) <= 255 or b"/" in name or b"\0" in name:
                raise SandboxError(f"{name!r} is no name for a file")
            child = seen.get(id(node))
            if child is None:
                child = seen[id(node)] = _Place(node, place)
                places.append(child)
                if node.children is not None:
                    inner.append(child)
            place.entries.append((name, child))
        queue += reversed(inner)
    return places


def _allocate(place: _Place, position: int) -> int:
    """Choose layout and node id; returns where the next inode may start."""
    node = place.node
    if node.xattrs:
        place.xattrs = _pack_xattrs(node.xattrs)
    head = INODE_SIZE + len(place.xattrs)
    tail = 0
    if node.children is not None:
        place.entries = sorted(
            [(b".", place), (b"..", place.parent or place), *place.entries], key=lambda entry: entry[0]
        )
        place.blocks = _split(place.entries)
        place.size = (len(place.blocks) - 1) * BLOCK + place.blocks[-1][2]
    elif node.data is not None:
        place.body, place.size = node.data, len(node.data)
    elif stat.S_ISREG(node.mode):
        place.size = node.size
        if node.size:
            place.layout = CHUNK_BASED
            head = -(-head // 8) * 8
            tail = CHUNK.size
    if place.layout != CHUNK_BASED and place.size:
        tail = place.size % BLOCK
        if tail and head + tail <= BLOCK:
            place.layout, place.num_blocks = FLAT_INLINE, place.size // BLOCK
        else:
            tail, place.num_blocks = 0, -(-place.size // BLOCK)
    total = head + tail
    left = BLOCK - position % BLOCK
    if total > left and (place.layout == FLAT_INLINE or left < INODE_SIZE):  # no inode and no tail crosses a block
        position += left
    place.nid = position // SLOT
    return -(-(position + total) // SLOT) * SLOT


def _split(entries: list[tuple[bytes, _Place]]) -> list[list[int]]:
    blocks: list[list[int]] = [[0, 0, 0]]
    for index, (name, _) in enumerate(entries):
        needed = DIRENT.size + len(name)
        if blocks[-1][2] + needed > BLOCK:
            blocks.append([index, index, 0])
        blocks[-1][1] = index + 1
        blocks[-1][2] += needed
    return blocks


def _pack_folder(place: _Place) -> bytes:
    out = bytearray()
    for first, end, _ in place.blocks:
        if out:
            out += bytes(-len(out) % BLOCK)
        names = bytearray()
        offset = (end - first) * DIRENT.size
        for name, child in place.entries[first:end]:
            out += DIRENT.pack(child.nid, offset + len(names), FILE_TYPES[stat.S_IFMT(child.node.mode)])
            names += name
        out += names
    return bytes(out)


def _pack_xattrs(xattrs: dict[bytes, bytes]) -> bytes:
    out = bytearray(12)  # a header without shared attributes
    for name in sorted(xattrs):
        value = xattrs[name]
        found = next(((prefix, index) for prefix, index in XATTR_PREFIXES if name.startswith(prefix)), None)
        if found is None:
            continue  # a name space that Linux does not have
        rest, index = name[len(found[0]) :], found[1]
        if len(rest) > 255 or len(value) > 65535:
            raise SandboxError(f"the extended attribute {name!r} is too large")
        out += struct.pack("<BBH", len(rest), index, len(value)) + rest + value
        out += bytes(-len(out) % 4)
    return bytes(out) if len(out) > 12 else NO_XATTRS


def _write_inode(image: bytearray, place: _Place) -> None:
    node = place.node
    position = place.nid * SLOT
    union = place.first_block
    if place.layout == CHUNK_BASED:
        bits = max((node.size - 1).bit_length() - BLOCK_BITS, 0)
        if bits > MAX_CHUNK_BITS or node.offset % BLOCK or node.offset >> BLOCK_BITS >= 0xFFFFFFFF:
            raise SandboxError(f"a file of {node.size} bytes at byte {node.offset} of its tar cannot be indexed")
        union = CHUNK_INDEXES | bits
    elif stat.S_ISCHR(node.mode) or stat.S_ISBLK(node.mode):
        major, minor = node.device
        union = minor & 0xFF | major << 8 | (minor & ~0xFF) << 12
    seconds = int(node.mtime // 1)
    links = node.num_links
    if node.children is not None:
        links = 2 + sum(child.is_folder for child in node.children.values())
    INODE.pack_into(
        image, position, 1 | place.layout << 1, (len(place.xattrs) - 12) // 4 + 1 if place.xattrs else 0, node.mode,
        0, place.size, union, place.nid & 0xFFFFFFFF, node.uid & 0xFFFFFFFF, node.gid & 0xFFFFFFFF,
        seconds & 0xFFFFFFFFFFFFFFFF, int((node.mtime - seconds) * 1e9), links,
    )  # fmt: skip
    position += INODE_SIZE
    if place.xattrs:
        image[position : position + len(place.xattrs)] = place.xattrs
        position += len(place.xattrs)
    if place.layout == CHUNK_BASED:
        CHUNK.pack_into(image, -(-position // 8) * 8, 0, 1, node.offset >> BLOCK_BITS)
        return
    body = _pack_folder(place) if node.children is not None else place.body
    full = place.num_blocks * BLOCK
    start = place.first_block * BLOCK
    if place.layout == FLAT_INLINE:
        image[start : start + full] = body[:full]
        image[position : position + len(body) - full] = body[full:]
    else:
        image[start : start + len(body)] = body
