"""The program of an inference engine in a process of its own; ``engine.process = true`` starts it.

Owns: making model and engine there. Its weights come through the transport: no checkpoint is read. Invariant: it
ends with the process that started it, however that ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from tandem.app.build import DTYPES, prepare_process, with_adapters
from tandem.config.load import from_mapping
from tandem.core.protocols import TokenGuide
from tandem.core.types import Completion, EngineStats, GenerateRequest, WeightVersion
from tandem.engine.compute import ComputeQueue
from tandem.engine.infer.loop import InferEngine
from tandem.engine.process.host import host
from tandem.engine.process.messages import Start
from tandem.engine.weights import PublishedWeights
from tandem.kernels.ops import Ops
from tandem.models.causal_lm import CausalLM
from tandem.models.loader import read_spec

_DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


class SharedEngine:
    """An ``InferEngine`` on weights that another process owns (``engine.process.host.HostedEngine``)."""

    def __init__(self, engine: InferEngine, weights: PublishedWeights, compute: ComputeQueue) -> None:
        self._engine, self._weights, self._compute = engine, weights, compute

    async def generate(
        self,
        request: GenerateRequest,
        *,
        on_tokens: Callable[[Sequence[int]], None] | None = None,
        guide: TokenGuide | None = None,
    ) -> Completion:
        return await self._engine.generate(request, on_tokens=on_tokens, guide=guide)

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    async def load(self, version: WeightVersion) -> None:
        await self._engine.load(version)

    async def adopt(self, tensors: dict[str, Tensor], version: WeightVersion) -> None:
        await self._compute.run("infer", lambda: self._weights.point_to(tensors, version))
        await self._engine.load(WeightVersion(number=version.number, step=version.step))

    async def sleep(self) -> None:
        await self._engine.sleep()

    async def wake(self) -> None:
        await self._engine.wake()

    def stats(self) -> EngineStats:
        return self._engine.stats()

    async def close(self) -> None:
        await self._engine.close()
        self._compute.close()


async def _make(start: Start) -> SharedEngine:
    settings = json.loads(start.settings)
    recipe = from_mapping(settings["recipe"])
    prepare_process(recipe)
    spec = read_spec(Path(settings["path"]))
    model = CausalLM(spec, Ops(settings["numerics"], "cpu"), dtype=DTYPES[recipe.model.dtype])
    model = with_adapters(model, recipe)
    weights, compute = PublishedWeights(model), ComputeQueue()
    engine = InferEngine(
        model, weights, recipe.engine, compute,
        max_context_tokens=settings["max_context_tokens"], eos_ids=spec.eos_ids,
    )  # fmt: skip
    return SharedEngine(engine, weights, compute)


def main() -> None:
    """Serve the socket whose number is the last word of the command."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it died before it could be asked for
        return
    asyncio.run(host(int(sys.argv[-1]), _make))


if __name__ == "__main__":
    main()
