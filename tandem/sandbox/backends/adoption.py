"""How a supervisor finds the keeper, and with it the boxes, that an earlier one left in a state folder.

Owns: the socket and the record of control groups in that folder, and what is kept of a box for its next supervisor.
Refuses: a keeper whose supervisor lives, and one of another version, which is told to end.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tandem.core.errors import SandboxUnavailable
from tandem.sandbox.backend import Layer, LayerKind, Root
from tandem.sandbox.backends.frames import PROTOCOL
from tandem.sandbox.backends.keeper import MESSAGE_MAX

SOCKET, GROUPS = "keeper.sock", "cgroups.json"
ADOPT_TIMEOUT_S = 5.0
PATH_MAX = 100  # a socket's address holds about so much

Left = tuple[int, str, socket.socket]


def listen(folder: Path) -> socket.socket:
    """Raises SandboxUnavailable: another supervisor's keeper is there, or the path is too long for a socket."""
    place = folder / SOCKET
    if len(str(place)) > PATH_MAX:
        raise SandboxUnavailable(f"the path {place} is too long for a socket", hint="choose a shorter state folder")
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        if probe.connect_ex(str(place)) == 0:
            raise SandboxUnavailable(f"boxes of another process are kept at {folder}", hint="adopt them, or end it")
    place.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(place))
    place.chmod(0o600)
    listener.listen(4)
    return listener


def keeper_at(folder: Path) -> tuple[socket.socket, int, str, dict[int, int], list[Left]] | None:
    """The control socket of the keeper that waits in a folder, its pid, its word on mounts, the agents' pids by box,
    and the boxes: number, words, socket. None when there is none. Blocks for a moment."""
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.settimeout(ADOPT_TIMEOUT_S)
    keeper, mounts = 0, ""
    pids: dict[int, int] = {}
    boxes: list[Left] = []
    try:
        control.connect(str(folder / SOCKET))
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_MAX, 1)
            if not message:
                raise SandboxUnavailable(f"the boxes at {folder} are another process's", hint="end that one first")
            kind, (number,) = message[:1], struct.unpack_from("<I", message, 1)
            if kind == b"V":
                (keeper,) = struct.unpack_from("<I", message, 5)
                if number != PROTOCOL:
                    control.send(b"X")
                    raise SandboxUnavailable(f"the boxes at {folder} are of another version and were ended",
                                             hint="start again")
            elif kind == b"W":
                mounts = message[5:].decode("utf-8", "replace")
            elif kind == b"A":
                pids[number] = struct.unpack_from("<I", message, 5)[0]
                boxes.append((number, message[9:].decode(), socket.socket(fileno=descriptors[0])))
            elif kind == b"D":
                control.setblocking(False)
                return control, keeper, mounts, pids, boxes
    except (FileNotFoundError, ConnectionRefusedError):
        control.close()
        return None
    except BaseException as error:
        for _, _, end in boxes:
            end.close()
        control.close()
        if isinstance(error, OSError):
            raise SandboxUnavailable(f"the keeper at {folder} does not answer: {error}") from error
        raise


def pack_root(root: Root) -> dict[str, Any]:
    packed = asdict(root)
    packed["layers"] = [
        [layer.kind.value, str(layer.path), str(layer.device or ""), layer.digest] for layer in root.layers
    ]
    packed["environment"] = dict(root.environment)
    return packed


def unpack_root(packed: dict[str, Any]) -> Root:
    layers = tuple(
        Layer(kind=LayerKind(kind), path=Path(path), device=Path(device) if device else None, digest=digest)
        for kind, path, device, digest in packed["layers"]
    )
    return Root(**{**packed, "layers": layers})
