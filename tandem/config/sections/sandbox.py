"""[sandbox]: the boxes that tools run in."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tandem.config.sections.section import Section


class RemoteSection(Section):
    url: str = ""
    """Control plane of the E2B-compatible service that gives the boxes, for example another machine's
    `tandem sandbox serve`. Empty: E2B's own."""
    box_url: str = ""
    """Where the service's boxes are reached. Empty: at `url`, and for E2B's own at the names that it gives."""
    key_variable: str = "E2B_API_KEY"
    """Environment variable that holds the service's key."""
    template: str = "base"
    """The service's template that stands for `host`."""
    isolation: Literal["shared_kernel", "user_kernel", "machine"] = "shared_kernel"
    """How the service isolates its boxes, as you know it: nothing in the protocol says so."""


class NetworkSection(Section):
    internet: bool = False
    """Boxes reach every public address that `deny` does not name."""
    allow: tuple[str, ...] = ()
    """What boxes reach without it: addresses, CIDR blocks and names (`*.example.org` for all below it), with a port or
    ports if wanted (`10.0.0.5:5432`). Loopback, private and link-local addresses and this machine's own are reached
    only if such a rule names them by address. Of a server: which of those its clients may ask for."""
    deny: tuple[str, ...] = ()
    """What boxes do not reach in spite of `internet`; `allow` wins over it. Of a server: what no client may reach."""
    connections: int = Field(default=64, ge=1, le=1024)
    """Connections of one box to outside that are open at a time."""
    total_mb: int = Field(default=4096, ge=1)
    """Bytes that one box may send and receive, together."""


class SandboxSection(Section):
    backend: str = "namespace"
    """Sandbox backend: `namespace`, `gvisor`, `remote`, or a plug-in's. There is none without isolation."""
    isolation: Literal["shared_kernel", "user_kernel", "machine"] = "shared_kernel"
    """The least isolation that will do; a backend that has less is refused. `shared_kernel` holds careless code,
    `user_kernel` (gVisor) and `machine` (a virtual machine) hold hostile code."""
    remote: RemoteSection = RemoteSection()
    template: str = "host"
    """What a box is made from: `host` is this machine's `/usr`, read-only; everything else is private."""
    memory_mb: int = Field(default=512, ge=8)
    """Memory of one box."""
    cpus: float = Field(default=1.0, gt=0)
    """CPU time of one box, in cores."""
    pids: int = Field(default=64, ge=4)
    """Processes and threads of one box."""
    disk_mb: int = Field(default=256, ge=1)
    """Writable space of one box. Files live in memory: where they are larger than the box's memory, its ceiling is
    the files' size (and a little)."""
    output_kb: int = Field(default=256, ge=1)
    """Kept output of one command, each of stdout and stderr; the rest is counted and dropped."""
    lifetime_s: float = Field(default=3600.0, gt=0)
    """Seconds after which a box is killed, whatever it does."""
    create_timeout_s: float = Field(default=20.0, gt=0)
    """Seconds in which a new box must answer."""
    warm: int = Field(default=2, ge=0)
    """Boxes kept ready ahead of need; an idle one takes about half a megabyte."""
    network: NetworkSection = NetworkSection()
