"""The resolver in a box: one question by UDP, answered from the policy and the host's resolver (RFC 1035).

Owns: the few bytes of a question and an answer. Refuses: names that no rule allows, and every question but for
addresses: no bytes of a box's question travel further, and none of a stranger's answer come in, so that there is no
tunnel.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import dataclass
from typing import cast

from tandem.sandbox.network.attempts import Bucket
from tandem.sandbox.network.outlet import Outlet
from tandem.sandbox.network.refusal import Refused, Unreachable
from tandem.sandbox.network.rules import Address

HEAD = struct.Struct(">HHHHHH")
A, AAAA, INTERNET = 1, 28, 1
OK, BROKEN, FAILED, UNKNOWN, REFUSED = 0, 1, 2, 4, 5
ANSWER, WANTED, GIVEN = 0x8000, 0x0100, 0x0080  # response; recursion desired, available
TTL_S = 30
MAX_ANSWERS = 12  # of IPv6: 12 * 28 bytes fit in the 512 of a datagram
MAX_OPEN, BURST, PER_S = 16, 100, 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    number: int
    wanted: bool
    name: str
    kind: int
    raw: bytes  # as it was asked, to be said again


class Broken(ValueError):
    """No question that we understand."""


def read_question(data: bytes) -> Question:
    """Raises Broken."""
    if len(data) < HEAD.size:
        raise Broken("too short")
    number, flags, questions, *_ = HEAD.unpack_from(data)
    if flags & ANSWER or flags & 0x7800 or questions != 1:
        raise Broken("no plain question")
    labels, at = [], HEAD.size
    while True:
        length = data[at] if at < len(data) else 64
        if length > 63 or at + length >= len(data):
            raise Broken("no name")
        at += 1
        if not length:
            break
        labels.append(data[at : at + length])
        at += length
    if len(data) < at + 4:
        raise Broken("no kind")
    kind, where = struct.unpack_from(">HH", data, at)
    if where != INTERNET:
        raise Broken("not of the internet")
    try:
        name = b".".join(labels).decode("ascii")
    except UnicodeDecodeError:
        raise Broken("a name that is not ASCII") from None
    return Question(number=number, wanted=bool(flags & WANTED), name=name, kind=kind, raw=data[HEAD.size : at + 4])


def answer(question: Question, code: int, addresses: list[Address] = []) -> bytes:  # noqa: B006 (never changed)
    flags = ANSWER | GIVEN | (WANTED if question.wanted else 0) | code
    told = addresses[:MAX_ANSWERS]
    head = HEAD.pack(question.number, flags, 1, len(told), 0, 0)
    records = (
        struct.pack(">HHHIH", 0xC000 | HEAD.size, question.kind, INTERNET, TTL_S, len(address.packed)) + address.packed
        for address in told
    )
    return head + question.raw + b"".join(records)


class Stub(asyncio.DatagramProtocol):
    """Answers on one socket. What comes too fast is dropped: whoever asked asks again."""

    def __init__(self, outlet: Outlet) -> None:
        self._outlet = outlet
        self._bucket = Bucket(BURST, PER_S)
        self._open: set[asyncio.Task[None]] = set()
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if len(self._open) >= MAX_OPEN or not self._bucket.take():
            return
        task = asyncio.get_running_loop().create_task(self._answer(data, addr))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    def connection_lost(self, exc: Exception | None) -> None:
        for task in self._open:
            task.cancel()

    async def _answer(self, data: bytes, addr: tuple[str, int]) -> None:
        try:
            question = read_question(data)
        except Broken as broken:
            self._outlet.attempts.note("dns", allowed=False, why=f"no question: {broken}")
            if len(data) >= 2:
                self._send(HEAD.pack(int.from_bytes(data[:2], "big"), ANSWER | BROKEN, 0, 0, 0, 0), addr)
            return
        target, code = f"dns {question.name} {_kind(question.kind)}", OK
        addresses: list[Address] = []
        try:
            family = socket.AF_INET6 if question.kind == AAAA else socket.AF_INET
            if question.kind not in (A, AAAA):
                raise Refused("only addresses are told")
            addresses = await self._outlet.tell_addresses(question.name, family)
            self._outlet.attempts.note(target, allowed=True, why=f"{len(addresses)} told")
        except Refused as refused:
            code = REFUSED
            self._outlet.attempts.note(target, allowed=False, why=str(refused))
        except Unreachable as error:
            code = FAILED
            self._outlet.attempts.note(target, allowed=True, why=str(error))
        self._send(answer(question, code, addresses), addr)

    def _send(self, data: bytes, addr: tuple[str, int]) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.sendto(data, addr)


def _kind(kind: int) -> str:
    return {A: "A", AAAA: "AAAA", 16: "TXT", 10: "NULL", 15: "MX", 5: "CNAME"}.get(kind, str(kind))
