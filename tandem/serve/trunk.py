"""Choices that go on from one prompt: the first is computed, the others are forked from it.

Owns: when a fork may begin. Invariant: what stands before the choices goes through the model once, however full the
engine is: the first choice holds its keys and values until the others have them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tandem.core.errors import NotRunning
from tandem.core.protocols import TokenEngine, TokenGuide
from tandem.core.types import Completion, GenerateRequest, Sampled

Hear = Callable[[Sampled], None]


class Trunk:
    """One prompt and its choices; ``grow`` comes first, ``branch`` once for each of the others."""

    def __init__(self, engine: TokenEngine) -> None:
        self._engine = engine
        self._name: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def grow(self, request: GenerateRequest, hear: Hear, guide: TokenGuide | None) -> Completion:
        """The first choice."""

        def heard(new: Sampled) -> None:
            self._begun(request.id)
            hear(new)

        completion = await self._engine.generate(request, on_tokens=heard, guide=guide)
        self._begun(request.id)
        return completion

    async def branch(self, request: GenerateRequest, hear: Hear, guide: TokenGuide | None) -> Completion:
        """Another one, from where the first one's answer begins. Cancel it when ``grow`` fails."""
        name = await self._name
        try:
            (completion,) = await self._engine.fork(
                name,
                {request.id: request.seed},
                at=0,
                on_tokens=lambda _, new: hear(new),
                guides=None if guide is None else {request.id: guide},
            )
        except NotRunning:  # its answer is whole already, and what it computed is found as any prefix is
            return await self._engine.generate(request, on_tokens=hear, guide=guide)
        return completion

    def _begun(self, name: str) -> None:
        if not self._name.done():
            self._name.set_result(name)
