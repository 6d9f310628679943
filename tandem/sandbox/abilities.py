"""What boxes can, and which backend's boxes can it: the table behind every refusal.

Owns: the names of abilities, what the backends that come with Tandem can at best (a machine may give less), and the
errors for what a backend has not. Refuses: to import a backend; a third party's says the same of itself in code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tandem.core.boxes import Isolation
from tandem.core.errors import SandboxUnavailable


class Ability(StrEnum):
    PAUSE = "pause"
    COLD_PAUSE = "cold_pause"  # a paused box gives its memory back
    SNAPSHOT = "snapshot"  # files
    LIVE_SNAPSHOT = "live_snapshot"  # files and running processes, durable
    LIVE_FORK = "live_fork"  # siblings with the running processes of their parent
    PROCESSES = "processes"  # long-lived commands with stdin and signals
    TERMINAL = "terminal"  # pseudo-terminals
    NETWORK = "network"  # a policy other than "none"
    PORTS = "ports"  # the host connects to ports in the box
    IMAGES = "images"  # roots made of layers, not only the host template
    USAGE = "usage"
    FILE_STREAMS = "file_streams"  # file operations as long-lived commands, of any user: large files, watching folders


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """``target`` makes the backend (``module:attribute``); ``isolation`` None: it is what the other end says."""

    target: str
    isolation: Isolation | None
    abilities: frozenset[Ability]


A = Ability
OFFERS: Mapping[str, Offer] = {
    "namespace": Offer(
        target="tandem.sandbox.backends.namespace:make", isolation=Isolation.SHARED_KERNEL,
        abilities=frozenset(Ability) - {A.LIVE_SNAPSHOT},
    ),
    "gvisor": Offer(
        target="tandem.sandbox.backends.gvisor:make", isolation=Isolation.USER_KERNEL,
        abilities=frozenset({A.PAUSE, A.LIVE_SNAPSHOT, A.LIVE_FORK, A.PROCESSES, A.TERMINAL, A.USAGE,
                             A.FILE_STREAMS, A.SNAPSHOT, A.IMAGES}),
    ),
    "remote": Offer(
        target="tandem.sandbox.backends.remote:make", isolation=None,
        abilities=frozenset({A.PAUSE, A.SNAPSHOT, A.PROCESSES, A.USAGE}),
    ),
}  # fmt: skip


def who_can(ability: Ability, *, but: str = "") -> list[str]:
    """Built-in backends that have an ability."""
    return [name for name, offer in OFFERS.items() if ability in offer.abilities and name != but]


def refuse(backend: str, ability: Ability) -> SandboxUnavailable:
    """The error for a verb that a backend has not; it names those that have it."""
    others = who_can(ability, but=backend)
    hint = f"backends that can: {', '.join(others)}" if others else "`tandem doctor` shows what this machine can do"
    return SandboxUnavailable(f"the {backend} backend cannot {ability.replace('_', ' ')} here", hint=hint)


def refuse_isolation(backend: str, has: Isolation, wanted: Isolation) -> SandboxUnavailable:
    """The error for a box that shall be further from the host than a backend's are."""
    better = [name for name, offer in OFFERS.items()
              if name != backend and (offer.isolation is None or offer.isolation >= wanted)]  # fmt: skip
    return SandboxUnavailable(
        f"the {backend} backend isolates by {_words(has)}; {_words(wanted)} was asked for",
        hint=f"backends that may give it: {', '.join(better)}" if better else "no backend here gives it",
    )


def _words(isolation: Isolation) -> str:
    return isolation.name.lower().replace("_", " ")
