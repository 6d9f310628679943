"""What boxes of a manager may reach, and the record of what they tried.

Owns: the bound that an operator sets on the policies that clients ask for, and where attempts are told: the audit log,
and refused ones the box's own log too. Invariant: a policy is in force before it is recorded as the box's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tandem.core.boxes import NetworkPolicy, SandboxSpec
from tandem.core.errors import SandboxError, boundary
from tandem.sandbox.abilities import Ability, refuse
from tandem.sandbox.backend import SandboxBackend
from tandem.sandbox.entry import Entry
from tandem.sandbox.network.attempts import Attempt, Tell
from tandem.sandbox.network.policy import check

Bound = Callable[[NetworkPolicy], NetworkPolicy]
NoteNetwork = Callable[[str, Attempt], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """``bound`` makes of any policy one that this manager gives: it is applied whenever one comes into force, so that
    boxes of an earlier server follow the bound of this one."""

    backend: SandboxBackend
    bound: Bound
    note: NoteNetwork

    def require(self, spec: SandboxSpec) -> None:
        """Of a box that is to be made. Raises ConfigError, SandboxUnavailable."""
        check(spec.network)
        if not spec.network.none and Ability.NETWORK not in self.backend.abilities:
            raise refuse(self.backend.name, Ability.NETWORK)

    async def open(self, entry: Entry) -> None:
        """Put the policy of a box's record in force. Nothing to do where it is none: boxes start so."""
        if not entry.record.spec.network.none and entry.session.box is not None:
            await self._apply(entry, entry.record.spec.network)

    async def change(self, entry: Entry, policy: NetworkPolicy) -> None:
        """Another policy, running or paused; of a box that is only files, from its resume on.

        Raises:
            ConfigError: a rule is none. SandboxUnavailable: the backend has no networks. SandboxError.
        """
        if policy.none and entry.record.spec.network.none:
            return
        async with entry.turn():
            before = entry.record.spec
            await self._apply(entry, policy)
            try:
                entry.change(spec=replace(before, network=policy))
            except SandboxError:
                await self._apply(entry, before.network)
                raise
            entry.say("info", "network changed")

    async def _apply(self, entry: Entry, policy: NetworkPolicy) -> None:
        if Ability.NETWORK not in self.backend.abilities:
            raise refuse(self.backend.name, Ability.NETWORK)
        box = entry.session.box
        if box is not None:
            with boundary(SandboxError, f"sandbox {entry.id}: its network"):
                await box.set_network(self.bound(policy), self._teller(entry), entry.budget)

    def _teller(self, entry: Entry) -> Tell:
        def tell(attempt: Attempt) -> None:
            self.note(entry.id, attempt)
            if not attempt.allowed:
                entry.say("warning", "connection refused", target=attempt.target, why=attempt.why)

        return tell


def unbounded(policy: NetworkPolicy) -> NetworkPolicy:
    """Of a program's own manager: what the program asks for is what its operator allows."""
    return policy
