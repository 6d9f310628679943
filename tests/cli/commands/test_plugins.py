"""``tandem plugins list`` prints without importing what it names."""

import subprocess
import sys


def test_listing_imports_no_plugin():
    program = "import sys; from tandem.cli.main import run; run(['plugins', 'list']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    *lines, torch_is_there = done.stdout.splitlines()
    listed = [line.split()[:2] for line in lines]
    for pair in (["environment", "boxwork"], ["algorithm", "grpo"], ["model", "llama"], ["sandbox", "namespace"]):
        assert pair in listed
    assert torch_is_there == "False", done.stderr
