"""Rules of a network policy, and what kind of place an address is.

Owns: the grammar of a rule: an address, a CIDR block, a name, or ``*.name`` for all below it; then, if wanted,
``:port`` or ``:first-last`` (IPv6 in brackets then). Refuses: what could mean two things.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from dataclasses import dataclass

from tandem.core.errors import ConfigError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Block = ipaddress.IPv4Network | ipaddress.IPv6Network

LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\Z")
NUMBER = re.compile(r"(\d+|0x[0-9a-f]*)\Z")  # such a last label makes an old-style address: 127.1, 0x7f.1, 2130706433
HINT = "an address, a CIDR block, a name or *.name, perhaps with ports: 10.0.0.5:5432, [fd00::/8]:443, *.x.org:80-90"

# Beyond what the standard library calls not global: places that clouds keep, and prefixes that hold another address.
SPECIAL = tuple(ipaddress.ip_network(text) for text in (
    "0.0.0.0/8", "100.64.0.0/10", "168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24", "198.18.0.0/15", "224.0.0.0/3",
    "64:ff9b:1::/48", "100::/64", "2001::/23", "5f00::/16", "fc00::/7", "fe80::/9", "ff00::/8",
))
NAT64 = ipaddress.ip_network("64:ff9b::/96")
COMPATIBLE = ipaddress.ip_network("::/96")
METADATA = frozenset(ipaddress.ip_address(text) for text in (
    "169.254.169.254", "169.254.170.2", "168.63.129.16", "100.100.100.200", "192.0.0.192", "fd00:ec2::254",
))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """``block`` None: the rule is of ``name`` (``below``: of all names below it, not of itself)."""

    text: str
    block: Block | None = None
    name: str = ""
    below: bool = False
    ports: tuple[int, int] = (1, 65535)

    def at(self, port: int) -> bool:
        return self.ports[0] <= port <= self.ports[1]

    def holds(self, address: Address, port: int) -> bool:
        return self.block is not None and self.at(port) and address in self.block

    def names(self, name: str, port: int) -> bool:
        if self.block is not None or not self.at(port):
            return False
        return name.endswith(f".{self.name}") if self.below else name == self.name

    @property
    def whole(self) -> bool:
        """Whether it is of every address."""
        return self.block is not None and self.block.prefixlen == 0


def parse(text: str) -> Rule:
    """Raises ConfigError, which quotes the rule and shows good ones."""
    host, ports = _split(text.strip())
    try:
        return Rule(text=text, block=ipaddress.ip_network(host, strict=False), ports=ports)
    except ValueError:
        pass
    below = host.startswith("*.")
    try:
        return Rule(text=text, name=plain_name(host.removeprefix("*.")), below=below, ports=ports)
    except ValueError as error:
        raise ConfigError(f"network rule {text[:80]!r}: {error}", hint=HINT) from None


def _split(text: str) -> tuple[str, tuple[int, int]]:
    found = re.fullmatch(r"\[([^\]]*)\](?::(.*))?", text)
    if found is not None:
        host, ports = found[1], found[2]
    elif text.count(":") == 1:
        host, _, ports = text.partition(":")
    else:
        host, ports = text, None
    if ports is None:
        return host, (1, 65535)
    first, dash, last = ports.partition("-")
    if not first.isascii() or not first.isdecimal() or (dash and not (last.isascii() and last.isdecimal())):
        raise ConfigError(f"network rule {text[:80]!r}: {ports[:20]!r} is no port", hint=HINT)
    span = int(first), int(last or first)
    if not 1 <= span[0] <= span[1] <= 65535:
        raise ConfigError(f"network rule {text[:80]!r}: ports go from 1 to 65535", hint=HINT)
    return host, span


def plain_name(text: str) -> str:
    """A name in the one form in which names are compared: ASCII, lower case, no dot at its end.

    Raises:
        ValueError: it is none, or could be taken for an address.
    """
    name = text.removesuffix(".").lower()
    if not name.isascii():
        try:
            name = name.encode("idna").decode("ascii").lower()
        except UnicodeError:
            raise ValueError(f"{text[:80]!r} is no name") from None
    labels = name.split(".")
    if len(name) > 253 or not all(LABEL.match(label) for label in labels):
        raise ValueError(f"{text[:80]!r} is no name")
    if NUMBER.match(labels[-1]):
        raise ValueError(f"{text[:80]!r} is neither a name nor an address in its usual form")
    return name


def plain_address(text: str) -> Address | None:
    """The address that a literal is, IPv4 in IPv6's clothes as IPv4; None: it is no literal.

    Raises:
        ValueError: an address with a zone, which means something else on every machine.
    """
    try:
        address = ipaddress.ip_address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            raise ValueError(f"{text[:80]!r} names an interface")
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
    return address


def place(address: Address) -> str:
    """What makes an address no public one ('' : it is public): of an IPv6 address that holds another one, what either
    of them is."""
    for each in (*_within(address), address):
        if each in METADATA:
            return "a metadata service's"
        if each.is_loopback:
            return "loopback"
        if each.is_link_local:
            return "link-local"
        if each.is_multicast or not each.is_global or any(each in block for block in SPECIAL):
            return "private or reserved"
        if is_own(each):
            return "this machine's own"
    return ""


def _within(address: Address) -> list[Address]:
    if isinstance(address, ipaddress.IPv4Address):
        return []
    low = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    found = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in NAT64 or (address in COMPATIBLE and int(address) > 0xFFFF):
        found.append(low)
    return [each for each in found if each is not None]


def is_own(address: Address) -> bool:
    """Whether an interface of this machine has it: only then can a socket be bound to it."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL):
            return False
        raise
    return True
