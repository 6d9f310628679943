"""Layers come compressed: the right decompressor for a stream, found by its first bytes.

Owns: gzip (through ``isal`` where it is installed, several times as fast as zlib), zstd and plain. Several gzip
members or zstd frames in a row are one stream, as both formats say.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Protocol

from tandem.core.errors import SandboxError, SandboxUnavailable, boundary

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
GZIP_BITS = 31  # a gzip header and the largest window


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def decompressed(pieces: Iterable[bytes], *, what: str) -> Iterator[bytes]:
    """The plain bytes of a stream.

    Raises:
        SandboxError: broken or cut off.
        SandboxUnavailable: zstd without its package.
    """
    source = iter(pieces)
    first = b""
    while len(first) < len(ZSTD) and (piece := next(source, None)) is not None:
        first += piece
    if not first.startswith((GZIP, ZSTD)):
        if first:
            yield first
        yield from source
        return
    zstd = first.startswith(ZSTD)
    current = _new(zstd)
    began = False
    piece: bytes | None = first
    while piece is not None:
        while piece:
            if current.eof:
                if not zstd and not piece.strip(b"\0"):  # padding after the last member
                    piece = b""
                    break
                current, began = _new(zstd), False
            with boundary(SandboxError, f"{what} does not decompress"):
                plain = current.decompress(piece)
            began = True
            piece = current.unused_data if current.eof else b""
            if plain:
                yield plain
        piece = next(source, None)
    if began and not current.eof:
        raise SandboxError(f"{what} is cut off")


def _new(zstd: bool) -> _Decompressor:
    if zstd:
        try:
            import zstandard
        except ImportError as error:
            raise SandboxUnavailable(
                "this image is compressed with zstd, and zstandard is not installed", hint="pip install zstandard"
            ) from error
        return zstandard.ZstdDecompressor().decompressobj()  # pyright: ignore[reportReturnType]
    try:
        from isal import isal_zlib  # pyright: ignore[reportMissingImports]
    except ImportError:
        return zlib.decompressobj(GZIP_BITS)
    return isal_zlib.decompressobj(GZIP_BITS)
