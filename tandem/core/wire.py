"""Versioned encode and decode of the core records: msgpack, packed buffers kept packed.

``array`` streams travel as their raw bytes behind a one-character type code; the format version leads every
blob, so that an old reader refuses a new blob with one sentence.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import TypeVar

import msgspec

from tandem.core.errors import RecordError

FORMAT = 1
T = TypeVar("T")


def _pack(value: object) -> object:
    if isinstance(value, array):
        return value.typecode.encode() + value.tobytes()
    raise NotImplementedError(f"cannot encode {type(value).__name__}")


def _unpack(kind: type, value: object) -> object:
    if kind is array and isinstance(value, bytes):
        return array(value[:1].decode(), value[1:])
    if kind is object:  # free-form data, such as a task's private part or a call's arguments
        return value
    raise NotImplementedError(f"cannot decode {kind}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack, order="deterministic")


def encode(record: object) -> bytes:
    """Encode a core record. The same record always gives the same bytes."""
    return bytes([FORMAT]) + _encoder.encode(record)


def decode(data: bytes, kind: type[T]) -> T:
    """Decode bytes of ``encode`` into ``kind``.

    Raises:
        RecordError: another format version, or bytes that do not fit the type.
    """
    if not data or data[0] != FORMAT:
        raise RecordError(
            f"record has format {data[0] if data else 'none'}, this version reads {FORMAT}",
            hint="read it with the version of tandem that wrote it",
        )
    try:
        return msgspec.msgpack.decode(memoryview(data)[1:], type=kind, dec_hook=_unpack)
    except (msgspec.DecodeError, ValueError) as error:
        raise RecordError(f"broken {kind.__name__} record: {error}") from error


def storable(text: str) -> str:
    """The text with every half of a surrogate pair as ``?``: no record and no file can hold those."""
    return text.encode("utf-8", "replace").decode()


def digest(data: bytes) -> str:
    """The content address of bytes: hex BLAKE2b-256."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from any printable parts (run seed, task, sample, turn): the same parts, the same seed."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
