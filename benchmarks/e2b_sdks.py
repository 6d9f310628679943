"""Runs one checklist under releases of E2B's SDKs against a server of ours on loopback; prints what each can do.

Each release has an environment of its own, made beforehand (the script installs nothing):

    python -m venv A && A/bin/pip install 'e2b==2.50.*' e2b-code-interpreter
    python -m venv B && B/bin/pip install 'e2b>=2.60' e2b-code-interpreter
    mkdir J && npm --prefix J install e2b @e2b/code-interpreter
    python benchmarks/e2b_sdks.py --python A --python B --node J

It ends with 1 if any check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent / "e2b"
LIMIT_S = 300


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", default=[], help="folder of a virtual environment")
    parser.add_argument("--node", action="append", default=[], help="folder that holds node_modules")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="e2b-sdks-") as state:
        key = "e2b_" + "5" * 40
        environment = os.environ | {"XDG_CACHE_HOME": state}
        command = [sys.executable, "-m", "tandem.cli.main", "sandbox", "serve", "--port", "0", "--state", f"{state}/s",
                   "--api-key", key]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
            assert server.stdout is not None
            url = server.stdout.readline().split()[3]
            client = os.environ | {"E2B_API_URL": url, "E2B_SANDBOX_URL": url, "E2B_API_KEY": key}
            try:
                told = {
                    **{name: run([f"{name}/bin/python", str(HERE / "checklist.py")], client) for name in words.python},
                    **{name: run(["node", str(HERE / "checklist.mjs"), str(Path(name).resolve())], client)
                       for name in words.node},
                }  # fmt: skip
            finally:
                server.terminate()
    show(told)
    return int(any(one != "ok" for results in told.values() for one in results.values()))


def run(command: list[str], environment: dict[str, str]) -> dict[str, str]:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    lines = done.stdout.strip().splitlines()
    if not lines or not lines[-1].startswith("{"):
        return {"start": done.stderr[-400:] or "no output"}
    return json.loads(lines[-1])


def show(told: dict[str, dict[str, str]]) -> None:
    for name, results in told.items():
        good = sum(one == "ok" for one in results.values())
        print(f"{name}: {good} of {len(results)}")
        for check, one in results.items():
            print(f"  {check:32} {one}")


if __name__ == "__main__":
    sys.exit(main())
