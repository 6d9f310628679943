"""The OCI bundle of a gVisor box: its root folder and its ``config.json``.

Owns: what of the host a box sees: the host template's trees, read-only; all else is private and in the box's memory.
The box's user has no powers; those of its agent are the few that it hands commands out with.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from tandem.core.boxes import SandboxSpec
from tandem.sandbox.backends.template import WORK_ID, Step, Template

PROGRAM = ".tandem-agent"
POWERS = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP", "SETFCAP",
          "NET_BIND_SERVICE", "SYS_CHROOT")  # fmt: skip
THE_KERNELS = ("dev", "proc")  # gVisor makes its own


def make_root(folder: Path, template: Template, program: Path) -> None:
    """The files that all boxes start from; a box's own writes stay in its memory."""
    folder.mkdir(mode=0o755)
    for step in _steps(template):
        place = folder / step.path
        match step.kind:
            case "d" | "h":
                place.mkdir(parents=True, exist_ok=True)
                place.chmod(step.mode)
                if step.kind == "h":
                    os.chown(place, WORK_ID, WORK_ID)
            case "f":
                place.write_bytes(step.argument)
                place.chmod(step.mode)
            case "l":
                place.symlink_to(os.fsdecode(step.argument))
            case "b" if Path(os.fsdecode(step.argument)).is_dir():
                place.mkdir(parents=True, exist_ok=True)
            case "b":
                place.touch()
    shutil.copyfile(program, folder / PROGRAM)
    (folder / PROGRAM).chmod(0o755)


def write_config(bundle: Path, root: Path, template: Template, spec: SandboxSpec) -> None:
    binds = [
        {"destination": f"/{step.path}", "type": "bind", "source": os.fsdecode(step.argument),
         "options": ["bind", "ro", "nosuid", "nodev"]}
        for step in _steps(template) if step.kind == "b"
    ]  # fmt: skip
    powers = [f"CAP_{name}" for name in POWERS]
    config = {
        "ociVersion": "1.0.2",
        "hostname": spec.hostname,
        "root": {"path": str(root), "readonly": False},
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": [f"/{PROGRAM}", "guest", str(WORK_ID)],
            "env": [],
            "cwd": "/",
            "noNewPrivileges": True,
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), powers),
        },
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}, *binds],
        "linux": {"namespaces": [{"type": name} for name in ("pid", "network", "ipc", "uts", "mount")]},
    }
    bundle.mkdir(parents=True)
    (bundle / "config.json").write_text(json.dumps(config))


def _steps(template: Template) -> list[Step]:
    return [step for step in template.steps if step.path.split("/")[0] not in THE_KERNELS]
