"""Names looked up for boxes, on the host, with a bound on how many and how long.

Owns: the threads that wait for the system's resolver, so that a slow one holds up nothing else. Refuses: nothing by
name; that is the policy's.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from tandem.sandbox.network.rules import Address, plain_address

LOOKUP_TIMEOUT_S = 8.0
NUM_THREADS = 16
MAX_ADDRESSES = 16

Lookup = Callable[[str], Awaitable[Sequence[str]]]


class NoAddress(Exception):
    """A name has no address, or nobody tells it."""


class Names:
    """One for all boxes of a backend. ``lookup`` gives a name's addresses as text and raises OSError; None: the
    system's resolver, ``/etc/hosts`` included."""

    def __init__(self, lookup: Lookup | None = None) -> None:
        self._lookup = lookup or self._ask_system
        self._threads: ThreadPoolExecutor | None = None

    async def addresses(self, name: str) -> list[Address]:
        """All of them, as the resolver orders them. Raises NoAddress."""
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                texts = await self._lookup(name)
        except TimeoutError:
            raise NoAddress(f"{name} was not looked up in {LOOKUP_TIMEOUT_S:g} s") from None
        except (OSError, UnicodeError) as error:
            raise NoAddress(f"{name} has no address: {error}") from None
        found: list[Address] = []
        for text in texts[:MAX_ADDRESSES]:
            try:
                address = plain_address(text)
            except ValueError:
                continue  # of one interface only: nothing to connect to
            if address is not None and address not in found:
                found.append(address)
        if not found:
            raise NoAddress(f"{name} has no address")
        return found

    def close(self) -> None:
        """Idempotent; waits for no resolver."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None

    async def _ask_system(self, name: str) -> Sequence[str]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="box-names")
        found = await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        )
        return [str(place[4][0]) for place in found]
