"""The direction of the arrows: the contracts of pyproject.toml hold, and planning needs no tensors."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_contracts_hold():
    program = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize(
    "module",
    [
        "tandem.rollout.scheduler",
        "tandem.rollout.driver",
        "tandem.trainer.loop",
        "tandem.trainer.batcher",
        "tandem.sandbox.manager",
        "tandem.envs.environment",
        "tandem.algorithms.spec",
        "tandem.record.log",
        "tandem.cli.main",
        "tandem.engine.infer.scheduler",
    ],
)
def test_imports_without_torch(module):
    program = f"import sys, {module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "False", done.stderr
