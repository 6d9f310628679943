"""The program of an inference engine in a process of its own; ``engine.process = true`` starts it.

Owns: making model and engine there. Its weights come through the transport: no checkpoint is read. Invariant: it
ends with the process that started it, however that ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from tandem.app.build import DTYPES, prepare_process, quantise, with_adapters
from tandem.config.load import from_mapping
from tandem.core.protocols import TokenGuide
from tandem.core.types import Completion, EngineStats, GenerateRequest, Sampled, WeightVersion
from tandem.engine.compute import ComputeQueue
from tandem.engine.infer.loop import InferEngine
from tandem.engine.process.host import end_with_parent, host
from tandem.engine.process.messages import Start
from tandem.engine.weights import PublishedWeights
from tandem.kernels.ops import Ops
from tandem.models.causal_lm import CausalLM
from tandem.models.loader import read_spec


class SharedEngine:
    """An ``InferEngine`` on weights that another process owns (``engine.process.host.HostedEngine``)."""

    def __init__(self, engine: InferEngine, weights: PublishedWeights, compute: ComputeQueue) -> None:
        self._engine, self._weights, self._compute = engine, weights, compute

    async def generate(
        self,
        request: GenerateRequest,
        *,
        on_tokens: Callable[[Sampled], None] | None = None,
        guide: TokenGuide | None = None,
    ) -> Completion:
        return await self._engine.generate(request, on_tokens=on_tokens, guide=guide)

    async def fork(
        self,
        request_id: str,
        forks: Mapping[str, int],
        *,
        at: int | None = None,
        on_tokens: Callable[[str, Sampled], None] | None = None,
        guides: Mapping[str, TokenGuide] | None = None,
    ) -> list[Completion]:
        return await self._engine.fork(request_id, forks, at=at, on_tokens=on_tokens, guides=guides)

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    async def load(self, version: WeightVersion) -> None:
        await self._engine.load(version)

    async def adopt(self, tensors: dict[str, Tensor], version: WeightVersion) -> None:
        await self._compute.run("infer", lambda: self._weights.point_to(tensors, version))
        await self._engine.load(WeightVersion(number=version.number, step=version.step, digest=version.digest))

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
    if recipe.engine.quantize == "int8":
        quantise(model, is_alone=False)
    weights, compute = PublishedWeights(model), ComputeQueue()
    engine = InferEngine(
        model, weights, recipe.engine, compute,
        max_context_tokens=settings["max_context_tokens"], eos_ids=spec.eos_ids,
    )  # fmt: skip
    return SharedEngine(engine, weights, compute)


def main() -> None:
    """Serve the socket whose number is the last word of the command."""
    if end_with_parent():
        asyncio.run(host(int(sys.argv[-1]), _make))


if __name__ == "__main__":
    main()
