"""The bodies of the control plane, as E2B's OpenAPI document names them.

Owns: what is read from requests (unknown fields are allowed: newer clients send more) and how records are shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec

from tandem.core.boxes import NetworkPolicy, SandboxState
from tandem.sandbox.records import BoxRecord, OnTimeout
from tandem.serve.e2b.faults import Fault

ENVD_VERSION = "0.6.1"  # what its clients may ask of our in-box services
CLIENT_ID = "tandem"
ALIAS, PUBLIC = "tandem.template", "tandem.public"  # kept among a box's metadata, never shown
T = TypeVar("T", bound="Body")


class Body(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A JSON object of a request."""


class AutoResume(Body, frozen=True, kw_only=True, rename="camel"):
    enabled: bool = False


class Network(Body, frozen=True, kw_only=True, rename="camel"):
    """A box's network. ``allow_out`` names addresses, blocks and domains; ``deny_out`` addresses and blocks."""

    allow_public_traffic: bool | None = None
    allow_out: list[str] = []
    deny_out: list[str] = []
    allow_internet_access: bool | None = None
    egress_proxy: dict[str, Any] | None = None
    rules: dict[str, Any] | None = None


class NewSandbox(Body, frozen=True, kw_only=True, rename="camel"):
    template_id: str = msgspec.field(name="templateID", default="base")
    timeout: int = 15
    auto_pause: bool = False
    auto_pause_memory: bool = True
    auto_resume: AutoResume = AutoResume()
    allow_internet_access: bool | None = None
    network: Network = Network()
    metadata: dict[str, str] | None = None
    env_vars: dict[str, str] | None = None
    volume_mounts: list[dict[str, Any]] | None = None
    mcp: dict[str, Any] | None = None
    iam: dict[str, Any] | None = None


class Connect(Body, frozen=True, kw_only=True, rename="camel"):
    timeout: int | None = None
    memory: bool | None = None


class Timeout(Body, frozen=True, kw_only=True, rename="camel"):
    timeout: int


class Refresh(Body, frozen=True, kw_only=True, rename="camel"):
    duration: int | None = None


class Pause(Body, frozen=True, kw_only=True, rename="camel"):
    memory: bool = True
    cold: bool = False  # ours: its memory is given back


class Fork(Body, frozen=True, kw_only=True, rename="camel"):
    timeout: int | None = None
    count: int = 1
    live: bool = False  # ours: with the running command


class Snapshot(Body, frozen=True, kw_only=True, rename="camel"):
    name: str = ""
    memory: bool | None = None


def read(data: bytes, kind: type[T]) -> T:
    """Raises: Fault 400, naming the field."""
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except msgspec.DecodeError as error:
        raise Fault(400, f"the body does not fit: {error}") from error


def policy_of(network: Network, internet: bool | None, *, may_internet: bool) -> NetworkPolicy:
    """What is asked of the network, within what this server gives: without ``may_internet`` only what the box's own
    ``allow_out`` names is reachable.

    Raises:
        Fault: something that we do not have and that would matter.
    """
    if network.egress_proxy or network.rules:
        raise Fault(400, "network: egress proxies and header rules are not supported here")
    everything = {"0.0.0.0/0", "::/0"}
    wanted = network.allow_internet_access if internet is None else internet
    open_by_list = bool(everything & set(network.allow_out))
    denied = not wanted if wanted is not None else bool(everything & set(network.deny_out))
    return NetworkPolicy(
        internet=may_internet and (open_by_list or not denied),
        allow=tuple(rule for rule in network.allow_out if rule not in everything),
        deny=tuple(rule for rule in network.deny_out if rule not in everything),
    )


def stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def shown_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in metadata.items() if key not in (ALIAS, PUBLIC)}


def listed(record: BoxRecord) -> dict[str, Any]:
    """A ``ListedSandbox``."""
    limits = record.spec.limits
    end = record.deadline if record.deadline is not None else record.started_at + record.lifetime_s
    return {
        "templateID": record.spec.template,
        "alias": record.metadata.get(ALIAS, record.spec.template),
        "sandboxID": record.id,
        "clientID": CLIENT_ID,
        "startedAt": stamp(record.started_at or record.created_at),
        "endAt": stamp(end),
        "cpuCount": max(1, round(limits.cpus)),
        "memoryMB": limits.memory_bytes // 2**20,
        "diskSizeMB": limits.disk_bytes // 2**20,
        "metadata": shown_metadata(record.metadata),
        "state": shown_state(record.state),
        "envdVersion": ENVD_VERSION,
    }


def shown_state(state: SandboxState) -> str:
    """E2B knows two states; a box on its way to rest is shown where it comes from or goes to."""
    resting = (SandboxState.PAUSED, SandboxState.PAUSING, SandboxState.RESUMING)
    return "paused" if state in resting else "running"


def detailed(record: BoxRecord, *, token: str) -> dict[str, Any]:
    """A ``SandboxDetail``."""
    network = record.spec.network
    return listed(record) | {
        "envdAccessToken": token,
        "domain": None,
        "allowInternetAccess": network.internet,
        "network": {
            "allowOut": list(network.allow), "denyOut": list(network.deny),
            "allowPublicTraffic": is_public(record),
        },
        "lifecycle": {"autoResume": record.auto_resume, "onTimeout": record.on_timeout.value},
    }  # fmt: skip


def is_public(record: BoxRecord) -> bool:
    """Whether ports of the box are open to who has no token."""
    return record.metadata.get(PUBLIC, "true") == "true"


def on_timeout(auto_pause: bool) -> OnTimeout:
    return OnTimeout.PAUSE if auto_pause else OnTimeout.KILL
