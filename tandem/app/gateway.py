"""The server that agents with a loop of their own speak to, inside a run.

Owns: one listening socket on loopback for the life of the run, opened at first use, and a key an episode: an agent
reaches its own episode and no other.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from tandem.core.errors import EngineError
from tandem.core.protocols import TokenEngine
from tandem.core.types import Limits, SamplingParams, Turn
from tandem.envs.workflow import Endpoint
from tandem.rollout.gateway import Served as EpisodeServed
from tandem.serve.generation import Served
from tandem.serve.openai import make_app
from tandem.serve.server import serve_forever
from tandem.serve.sessions import Sessions, Terms
from tandem.text.render import Renderer

MODEL = "policy"
START_S = 10.0


class AgentGateway:
    """Implements ``rollout.gateway.Gateway``."""

    def __init__(self, engine: TokenEngine, renderer: Renderer, *, max_context_tokens: int) -> None:
        self._sessions = Sessions(renderer, openable=False)
        self._served = Served(
            engine=engine,
            renderer=renderer,
            names=(MODEL,),
            max_context_tokens=max_context_tokens,
            max_waiting=1_000_000,  # the scheduler of the run bounds the episodes
            sessions=self._sessions,
        )
        self._server: asyncio.Task[None] | None = None
        self._address: asyncio.Future[str] | None = None

    @asynccontextmanager
    async def serve(
        self,
        episode_id: str,
        *,
        group: str,
        priority: int,
        params: SamplingParams,
        seed: int,
        limits: Limits,
        on_turn: Callable[[Turn, int], None],
    ) -> AsyncIterator[EpisodeServed]:
        address = await self._listening()
        name = secrets.token_urlsafe(16)  # the name is the key: nobody guesses another episode's
        terms = Terms(
            params=params,
            seed=seed,
            group=group,
            priority=priority,
            max_turns=limits.max_turns,
            max_context_tokens=limits.max_context_tokens,
        )
        session = self._sessions.open(name, terms, on_turn=on_turn)
        try:
            endpoint = Endpoint(base_url=f"{address}/sessions/{name}/v1", api_key=name, model=MODEL)
            yield EpisodeServed(endpoint=endpoint, over=lambda: session.over)
        finally:
            self._sessions.close(name)

    async def close(self) -> None:
        if self._server is not None:
            self._server.cancel()
            with suppress(asyncio.CancelledError):
                await self._server

    async def _listening(self) -> str:
        if self._address is None:
            address = self._address = asyncio.get_running_loop().create_future()
            self._server = asyncio.create_task(
                serve_forever(make_app(self._served), host="127.0.0.1", port=0, on_ready=address.set_result)
            )
        done, _ = await asyncio.wait({self._address}, timeout=START_S)
        if not done:
            raise EngineError(f"the server for agents did not listen within {START_S:g} s")
        return self._address.result()
