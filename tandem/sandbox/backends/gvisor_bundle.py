"""The OCI bundle of a gVisor box: its ``config.json``.

Owns: what of the host a box sees: its root, the host template's trees, read-only, and the program that is its agent.
The box's user has no powers; those of its agent are the few that it hands commands out with.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from tandem.core.boxes import SandboxSpec
from tandem.sandbox.backends.template import WORK_ID, Template

PROGRAM = ".tandem-agent"
POWERS = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP", "SETFCAP",
          "NET_BIND_SERVICE", "SYS_CHROOT")  # fmt: skip
THE_KERNELS = ("dev", "proc")  # gVisor makes its own


def write_config(bundle: Path, root: Path, template: Template, spec: SandboxSpec, agent: Path) -> None:
    trees = [(step.path, os.fsdecode(step.argument)) for step in template.steps if step.kind == "b"]
    binds = [
        {"destination": f"/{path}", "type": "bind", "source": source, "options": ["bind", "ro", "nosuid", "nodev"]}
        for path, source in (*trees, (PROGRAM, str(agent)))
    ]
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

