"""The name that a TLS client says it wants, read from the first bytes it sends (RFC 8446 section 4.1.2, RFC 6066).

Owns: the walk through records and extensions. Refuses: to guess; what is cut, too long or odd is an error.
"""

from __future__ import annotations

HANDSHAKE, CLIENT_HELLO, SERVER_NAME, HOST_NAME = 22, 1, 0, 0
MAX_HELLO = 64 * 1024


class NotYet(Exception):
    """More bytes are needed."""


class NoHello(ValueError):
    """These are not the first bytes of a TLS client."""


class _Bytes:
    """A part of the message, read from its start."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def take(self, count: int) -> bytes:
        if count > len(self._data):
            raise NoHello("a field is longer than its message")
        taken, self._data = self._data[:count], self._data[count:]
        return taken

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def field(self, size: int) -> _Bytes:
        """What a length of ``size`` bytes announces."""
        return _Bytes(self.take(self.number(size)))

    @property
    def rest(self) -> bytes:
        return self._data


def server_name(data: bytes) -> str:
    """The name in a ClientHello, '' when it has none.

    Raises:
        NotYet: it is not all there. NoHello: it is something else.
    """
    hello = _Bytes(_message(data))
    hello.take(2 + 32)  # version, random
    hello.field(1)  # session
    hello.field(2)  # cipher suites
    hello.field(1)  # compression
    if not hello.rest:
        return ""
    extensions = hello.field(2)
    while extensions.rest:
        kind, body = extensions.number(2), extensions.field(2)
        if kind != SERVER_NAME:
            continue
        names = body.field(2)
        while names.rest:
            sort, name = names.number(1), names.field(2).rest
            if sort == HOST_NAME:
                try:
                    return name.decode("ascii")
                except UnicodeDecodeError:
                    raise NoHello("its server name is not ASCII") from None
    return ""


def _message(data: bytes) -> bytes:
    """The ClientHello out of its records."""
    message, at = bytearray(), 0
    while True:
        head = data[at : at + 5]
        if head and head[0] != HANDSHAKE or len(head) > 1 and head[1] != 3:
            raise NoHello("no TLS handshake")
        if len(head) < 5 or len(data) < at + 5 + (length := int.from_bytes(head[3:5], "big")):
            raise NotYet
        message += data[at + 5 : at + 5 + length]
        at += 5 + length
        if message and message[0] != CLIENT_HELLO or not length:
            raise NoHello("no ClientHello")
        if len(message) >= 4:
            size = int.from_bytes(message[1:4], "big")
            if size > MAX_HELLO:
                raise NoHello("a ClientHello of more than 64 KiB")
            if len(message) >= 4 + size:
                return bytes(message[4 : 4 + size])
