"""A box's way out: from a target that its proxy was asked for to a connection, or to the reason why there is none.

Owns: the one look-up of a name, the choice among its addresses, and what the box was told of names. Invariant: what is
connected to is an address that was judged, never a name that could mean another one by then.
"""

from __future__ import annotations

import asyncio
import socket
from collections import OrderedDict
from dataclasses import dataclass, field

from tandem.sandbox.network.attempts import Attempts
from tandem.sandbox.network.budget import Budget
from tandem.sandbox.network.names import Names, NoAddress
from tandem.sandbox.network.policy import Policy, Verdict
from tandem.sandbox.network.refusal import Refused, Unreachable
from tandem.sandbox.network.rules import Address, plain_address, plain_name

CONNECT_TIMEOUT_S = 10.0
MAX_TOLD = 1024


@dataclass(slots=True, kw_only=True, eq=False)
class Line:
    """One connection out. ``name`` '' : it was asked for by address; ``by_name``: its rule is one of names."""

    target: str
    name: str
    address: Address
    port: int
    by_name: bool
    task: asyncio.Task[None] | None = field(default=None)


class Outlet:
    """Of one box. ``policy`` may be replaced at any time; ``budget`` is the box's own."""

    def __init__(self, policy: Policy, names: Names, attempts: Attempts, budget: Budget) -> None:
        self.policy = policy
        self.attempts = attempts
        self.lines: set[Line] = set()
        self.budget = budget
        self._names = names
        self._told: OrderedDict[Address, str] = OrderedDict()

    async def open(self, host: str, port: int) -> tuple[Line, asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to what the box asks for. Every attempt is told.

        Raises:
            Refused: by the policy, or because its bytes are used up. Unreachable: nobody answers there.
        """
        target = f"{host}:{port}" if ":" not in host else f"[{host}]:{port}"
        try:
            line, why = await self.judge(host, port, target)
            if self.budget.used >= self.policy.limits.total_bytes:
                raise Refused(f"it has had its {self.policy.limits.total_bytes} bytes")
        except (Refused, Unreachable) as error:
            self.attempts.note(target, allowed=isinstance(error, Unreachable), why=str(error))
            raise
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(str(line.address), port)
        except TimeoutError:
            problem = f"{target} does not answer in {CONNECT_TIMEOUT_S:g} s"
        except OSError as error:
            problem = f"{target}: {error.strerror or error}"
        else:
            verdict = self.judge_again(line)  # the policy may be another one by now
            try:
                self.attempts.note(target, allowed=verdict.allowed, why=why if verdict.allowed else verdict.why)
            except BaseException:
                writer.transport.abort()
                raise
            if verdict.allowed:
                return line, reader, writer
            writer.transport.abort()
            raise Refused(verdict.why)
        self.attempts.note(target, allowed=True, why=f"{why}, but {problem}")
        raise Unreachable(problem)

    async def judge(self, host: str, port: int, target: str) -> tuple[Line, str]:
        """Which address is meant, and why it is allowed. Raises Refused, Unreachable (it has no address)."""
        if not 1 <= port <= 65535:
            raise Refused(f"{port} is no port")
        try:
            address = plain_address(host)
            name = plain_name(host) if address is None else ""
        except ValueError as error:
            raise Refused(str(error)) from None
        if address is not None:
            verdict, told = self.policy.judge_address(address, port), self._told.get(address, "")
            if not verdict.allowed and told and (by_name := self.policy.judge_name(told, port)).allowed:
                name, verdict = told, self.policy.judge_address(address, port, by_name=by_name.by_name)
            if not verdict.allowed:
                raise Refused(verdict.why)
            return Line(target=target, name=name, address=address, port=port, by_name=verdict.by_name), verdict.why
        verdict = self.policy.judge_name(name, port)
        if not verdict.allowed:
            raise Refused(verdict.why)
        reason = ""
        for address in await self._look_up(name):
            judged = self.policy.judge_address(address, port, by_name=verdict.by_name)
            if judged.allowed:
                line = Line(target=target, name=name, address=address, port=port, by_name=verdict.by_name)
                return line, f"{verdict.why}, at {address}"
            reason = reason or judged.why
        raise Refused(f"its name leads to where it may not go: {reason}")

    def judge_again(self, line: Line) -> Verdict:
        """Of an open connection, by the policy of now."""
        by_name = False
        if line.name:
            verdict = self.policy.judge_name(line.name, line.port)
            if not verdict.allowed:
                return verdict
            by_name = verdict.by_name
        return self.policy.judge_address(line.address, line.port, by_name=by_name)

    async def tell_addresses(self, name: str, family: socket.AddressFamily) -> list[Address]:
        """A name's addresses for the box's own resolver; a connection to one of them counts as one to the name.

        Raises:
            Refused, Unreachable.
        """
        try:
            name = plain_name(name)
        except ValueError as error:
            raise Refused(str(error)) from None
        verdict = self.policy.judge_name_anywhere(name)
        if not verdict.allowed:
            raise Refused(verdict.why)
        version = 4 if family == socket.AF_INET else 6
        found = [address for address in await self._look_up(name) if address.version == version]
        for address in found:
            self._told[address] = name
            self._told.move_to_end(address)
        while len(self._told) > MAX_TOLD:
            self._told.popitem(last=False)
        return found

    async def _look_up(self, name: str) -> list[Address]:
        try:
            return await self._names.addresses(name)
        except NoAddress as error:
            raise Unreachable(str(error)) from None
