"""A second device on a machine that has none: tensors that compute with real numbers and refuse those of the CPU.

``register`` makes the device ``apart`` known to PyTorch's dispatcher, for this process and for good, before any
backward pass; so checks that use it run in a process of their own (``check_apart``). An operation that gets a tensor
of the CPU beside one of the device raises, as an accelerator would: only copies, and numbers without a dimension, may
cross.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch
from torch.utils import _pytree as pytree

CHECK_S = 240
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


def check_apart(function: str) -> None:
    """Call ``module:function`` in a process that has the device; its failure is this test's."""
    module, _, name = function.partition(":")
    # One thread: operations as small as these only wait for others.
    code = f"import tests.apart_device as a; a.torch.set_num_threads(1); a.register(); import {module} as m; m.{name}()"
    path = os.pathsep.join(each or os.getcwd() for each in sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=CHECK_S,
        env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


class Apart(torch.Tensor):
    """The device's tensor; ``inner`` holds its numbers, and shares its memory with those of views."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=torch.device("apart", 0),
        )  # fmt: skip
        made.inner = inner
        return made

    def tolist(self):
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def run(func, args, kwargs):
    """An operation on the device."""
    flat, spec = pytree.tree_flatten((args, kwargs))
    tensors = [each for each in flat if isinstance(each, torch.Tensor)]
    here = [each for each in tensors if not isinstance(each, Apart) and each.dim()]
    if here and len(here) < len(tensors) and func not in COPIES:
        raise RuntimeError(f"{func} of the device got a tensor of the CPU, {tuple(here[0].shape)}")
    if func is torch.ops.aten._local_scalar_dense.default:
        return args[0].inner.item()
    inner_args, inner_kwargs = pytree.tree_unflatten([_inside(each) for each in flat], spec)
    out = func(*inner_args, **inner_kwargs)
    if func is torch.ops.aten.copy_.default:
        return args[0]
    target = kwargs.get("device")
    if target is not None and torch.device(target).type == "cpu":
        return out
    own = {id(each.inner): each for each in tensors if isinstance(each, Apart)}

    def outside(each):
        return own[id(each)] if id(each) in own else Apart(each) if isinstance(each, torch.Tensor) else each

    return pytree.tree_map(outside, out)


def _inside(each):
    if isinstance(each, Apart):
        return each.inner
    return torch.device("cpu") if isinstance(each, torch.device) and each.type == "apart" else each


def register() -> None:
    """Have the device. Once a process."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("apart")
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda func, *args, **kwargs: run(func, args, kwargs), "PrivateUse1")
    register.library = library  # it is undone when it is collected
    plain = torch.tensor

    def tensor(data, *, dtype=None, device=None, requires_grad=False):
        """Made on the CPU and copied, as it is on an accelerator; the dispatcher asks for what Python cannot give."""
        made = plain(data, dtype=dtype) if device is None else plain(data, dtype=dtype).to(device)
        return made.requires_grad_(requires_grad)

    torch.tensor = tensor
