"""Checkpoint files are safetensors files, and their digest is that of their bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tandem.engine.train.tensor_file import write_tensors


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_what_is_written_is_read_back_by_the_standard_library(tmp_path, where) -> None:
    memory = Path("/dev/shm")
    if where == "memory" and not memory.is_dir():
        pytest.skip("no memory file system")
    path = (tmp_path if where == "disk" else memory) / f"tandem-test-{tmp_path.name}.safetensors"
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "large": torch.randn(3_000_017, generator=generator),  # more than one buffer
        "matrix": torch.randn(5, 7, generator=generator).to(torch.bfloat16),
        "turned": torch.randn(6, 4, generator=generator).t(),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 3),
    }
    try:
        digest = write_tensors(path, tensors)
        assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
        read = load_file(path)
    finally:
        path.unlink(missing_ok=True)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype is tensor.dtype and torch.equal(read[name], tensor)


def test_no_tensors_is_a_file_too(tmp_path) -> None:
    write_tensors(tmp_path / "none.safetensors", {})
    assert load_file(tmp_path / "none.safetensors") == {}
