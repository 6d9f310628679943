"""What the keeper found that this kernel makes roots of, in words.

Owns: the ways to make overlays of layers, newest kernel first, and what a box's ids are where mounts map none.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tandem.core.errors import SandboxUnavailable


class MountWay(StrEnum):
    DETACHED = "d"  # Linux 6.15: an overlay takes detached mounts
    ATTACHED = "a"  # parts hang in a folder of the keeper's own mount namespace
    STRING = "s"  # the same, named in one option string: no lowerdir+ (before 6.7)


DETAILS = {
    MountWay.DETACHED: "overlays of detached mounts",
    MountWay.ATTACHED: "overlays of mounts in the keeper's own namespace",
    MountWay.STRING: "overlays of mounts in the keeper's own namespace, by one option string",
}


@dataclass(frozen=True, slots=True)
class Mounts:
    """``maps_ids`` False, as root: mounts here map no ids (tmpfs before Linux 6.3), so boxes have the machine's own
    ids 0 to 65535, without its powers: a weaker wall than a range for each."""

    way: MountWay
    maps_ids: bool

    @property
    def detail(self) -> str:
        return DETAILS[self.way]


@dataclass(frozen=True, slots=True)
class MountChoice:
    """What the keeper may use: the first of ``ways`` that works here. A test restricts them."""

    ways: tuple[MountWay, ...] = tuple(MountWay)
    maps_ids: bool = True

    def packed(self) -> str:
        return "".join(self.ways) + ("i" if self.maps_ids else "")


def read_found(text: str) -> Mounts:
    """The keeper's word. Raises SandboxUnavailable: nothing works."""
    if text[:1] == "n":
        raise SandboxUnavailable(
            f"this machine makes no boxes: {text[2:]}",
            hint="tandem doctor says what is missing; roots of boxes need Linux 5.14 or newer with overlayfs and tmpfs",
        )
    return Mounts(MountWay(text[0]), text[1] == "i")
