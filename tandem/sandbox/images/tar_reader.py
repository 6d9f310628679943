"""Reads the headers of a raw tar without reading its data.

Owns: where each file's bytes lie in the tar (always a multiple of 512), and the dialects images are written in:
ustar, GNU long names, PAX records (paths, sizes, times, ids, extended attributes), base-256 numbers.
Refuses: sparse members, broken headers, paths that climb out. Python's ``tarfile`` reads the same; it takes several
times as long for the tens of thousands of members of an image.

Source: POSIX.1-2017 pax, "ustar Interchange Format" and "pax Extended Header"; GNU tar manual, "Basic Tar Format".
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from tandem.core.errors import SandboxError

BLOCK = 512
HEADER = struct.Struct("100s8s8s8s12s12s8sc100s8s32s32s8s8s155s12x")
KINDS = {
    b"0": stat.S_IFREG, b"\0": stat.S_IFREG, b"7": stat.S_IFREG, b"1": 0, b"2": stat.S_IFLNK, b"3": stat.S_IFCHR,
    b"4": stat.S_IFBLK, b"5": stat.S_IFDIR, b"6": stat.S_IFIFO,
}  # fmt: skip
XATTR = b"SCHILY.xattr."
RECORDS_MAX_BYTES = 1 << 20  # of one extended header


class Bytes(Protocol):
    """What is read: bytes, or a map of a file."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: slice, /) -> bytes: ...


@dataclass(slots=True)
class Entry:
    """One member. ``mode`` has the file type; a hard link has type 0 and its target in ``link``."""

    path: bytes  # without a leading slash; b"" is the root
    mode: int
    uid: int
    gid: int
    mtime: float
    size: int
    offset: int  # of the data in the tar
    link: bytes
    device: tuple[int, int]
    xattrs: Mapping[bytes, bytes]


def read_tar(data: Bytes, *, name: str = "tar") -> Iterator[Entry]:
    """All members in order.

    Raises:
        SandboxError: not a tar, a member of a kind that no image needs, or a path that leads out of the root.
    """
    position, end = 0, len(data)
    shared: dict[bytes, bytes] = {}
    extra: dict[bytes, bytes] = {}
    while position + BLOCK <= end:
        block = data[position : position + BLOCK]
        if not any(block):
            return
        fields = HEADER.unpack(block)
        checksum, kind = fields[6], fields[7]
        if _number(checksum) != sum(block) - sum(checksum) + 8 * 32:
            raise SandboxError(f"{name}: the header at byte {position} is broken or this is no tar")
        start = position + BLOCK
        if kind in b"xgLK":
            size = _number(fields[4])
            if size > RECORDS_MAX_BYTES or start + size > end:
                raise SandboxError(f"{name}: an extended header of {size} bytes at byte {position}")
            body = data[start : start + size]
            if kind == b"x":
                extra.update(_records(body))
            elif kind == b"g":
                shared.update(_records(body))
            else:
                extra[b"path" if kind == b"L" else b"linkpath"] = body.rstrip(b"\0")
        else:
            records = {**shared, **extra} if shared else extra
            extra = {}
            entry, size = _entry(fields, records, start, name)
            if start + size > end:
                raise SandboxError(f"{name}: cut off inside {entry.path!r}")
            yield entry
        position = start + -(-size // BLOCK) * BLOCK


def _entry(fields: tuple[bytes, ...], records: dict[bytes, bytes], start: int, name: str) -> tuple[Entry, int]:
    """A member, and how many bytes of data follow its header."""
    path, mode, uid, gid, size_field, mtime, _, kind, link, magic, _, _, major, minor, prefix = fields
    path = path.split(b"\0", 1)[0]
    if kind == b"S" or any(key.startswith(b"GNU.sparse.") for key in records):
        raise SandboxError(f"{name}: {path!r} is a sparse member, which no layer may have")
    if kind not in KINDS:
        raise SandboxError(f"{name}: {path!r} is of the unknown kind {kind!r}")
    if magic.startswith(b"ustar\0") and prefix[:1] != b"\0":
        path = prefix.split(b"\0", 1)[0] + b"/" + path
    path = records.get(b"path", path)
    kind_bits = KINDS[kind]
    if kind_bits == stat.S_IFREG and path.endswith(b"/"):  # how tar before POSIX wrote folders
        kind_bits = stat.S_IFDIR
    try:
        size = int(records[b"size"]) if b"size" in records else _number(size_field)
        entry = Entry(
            path=_inside(path, name),
            mode=kind_bits | _number(mode) & 0o7777,
            uid=int(records[b"uid"]) if b"uid" in records else _number(uid),
            gid=int(records[b"gid"]) if b"gid" in records else _number(gid),
            mtime=float(records[b"mtime"]) if b"mtime" in records else _number(mtime),
            size=size if kind_bits == stat.S_IFREG else 0,
            offset=start,
            link=records.get(b"linkpath", link.split(b"\0", 1)[0]),
            device=(_number(major), _number(minor)) if kind in b"34" else (0, 0),
            xattrs={key[len(XATTR) :]: value for key, value in records.items() if key.startswith(XATTR)}
            if records else {},
        )  # fmt: skip
    except ValueError as error:
        raise SandboxError(f"{name}: {path!r} has a broken extended header") from error
    if size < 0:
        raise SandboxError(f"{name}: {path!r} has {size} bytes")
    return entry, entry.size


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # base 256
        value = int.from_bytes(field, "big")
        bits = 8 * len(field)
        return value - (1 << bits) if field[0] == 0xFF else value & ~(1 << (bits - 1))
    text = field.strip(b" \0")
    try:
        return int(text, 8) if text else 0
    except ValueError as error:
        raise SandboxError(f"tar: {field!r} is no number: this is broken, or no tar") from error


def _records(body: bytes) -> Iterator[tuple[bytes, bytes]]:
    """``LENGTH KEY=VALUE\\n`` again and again; the length counts itself and values may hold any byte."""
    position = 0
    while position < len(body) and body[position]:
        space = body.find(b" ", position)
        try:
            length = int(body[position:space])
        except ValueError as error:
            raise SandboxError("tar: a broken extended header") from error
        key, equals, value = body[space + 1 : position + length - 1].partition(b"=")
        if length < 5 or not equals or position + length > len(body):
            raise SandboxError("tar: a broken extended header")
        yield key, value
        position += length


def _inside(path: bytes, name: str) -> bytes:
    if path.startswith(b"./") or path.endswith(b"/") or b"//" in path or path[:1] == b"/" or b"." in path:
        parts = [part for part in path.split(b"/") if part not in (b"", b".")]
        if b".." in parts:
            raise SandboxError(f"{name}: the path {path!r} leads out of the image")
        path = b"/".join(parts)
    return path


def inside(path: bytes, *, name: str) -> bytes:
    """A member's path, or the target of a hard link, as a clean path below the root.

    Raises:
        SandboxError: it climbs out.
    """
    return _inside(path, name)
