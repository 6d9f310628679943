"""A model call: context ids in, one ``Turn`` out.

Owns: the sampling parameters of a turn and its true finish reason. Refuses: making ids from text that the model
has already seen or written; a context only ever grows at its end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem.core.errors import EngineError, PromptTooLong, RequestAborted, boundary
from tandem.core.protocols import TokenEngine
from tandem.core.resume import resumed
from tandem.core.types import Completion, FinishReason, GenerateRequest, Ids, SamplingParams, ToolSpec, Turn
from tandem.text.render import Renderer


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the policy draws its tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    priority: int = 0  # of its requests among others of the engine
    resumes: bool = True  # a turn that was given up for new weights goes on under them; else its episode fails


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A turn, and how much of its prompt was cached."""

    turn: Turn
    num_cached_tokens: int


class Policy:
    """The model as workflows meet it: an engine, a renderer and one way of sampling."""

    def __init__(self, engine: TokenEngine, renderer: Renderer, sampling: Sampling) -> None:
        self.renderer = renderer
        self.sampling = sampling
        self._engine = engine

    async def reply(
        self,
        prompt_ids: Ids,
        tools: Sequence[ToolSpec],
        *,
        request_id: str,
        seed: int,
        max_tokens: int,
        max_context_tokens: int,
        group: str = "",
    ) -> Reply:
        """Let the model continue ``prompt_ids`` by at most ``max_tokens``, or to the end of the context. ``tools``
        are those that the prompt offers; the turns of one ``group`` share one line of the engine.

        Raises:
            PromptTooLong: there is no room for one token.
            RequestAborted: the engine gave it up for new weights, and it is not to go on.
            EngineError: the engine failed, or somebody aborted the request.
        """
        room = max_context_tokens - len(prompt_ids)
        if room < 1:
            raise PromptTooLong(
                f"request {request_id}: the prompt has {len(prompt_ids)} tokens, the context {max_context_tokens}",
                hint="raise model.max_context_tokens or shorten the task",
            )
        params = SamplingParams(
            max_tokens=min(max_tokens, room),
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
            stop_token_ids=self.renderer.stop_token_ids,
        )
        start = time.perf_counter()
        request = GenerateRequest(
            id=request_id,
            prompt_ids=prompt_ids,
            params=params,
            seed=seed,
            group=group,
            priority=self.sampling.priority,
        )
        completion = await self._complete(request)
        parsed = self.renderer.parse(completion.token_ids, tools)
        called = bool(parsed.message.tool_calls)
        turn = Turn(
            prompt_ids=prompt_ids,
            completion_ids=completion.token_ids,
            logprobs=completion.logprobs,
            versions=completion.versions,
            message=parsed.message,
            finish_reason=FinishReason.TOOL_CALLS if called else completion.finish_reason,
            tool_results=parsed.failures,
            model_s=time.perf_counter() - start,
            routes=completion.routes,
        )
        return Reply(turn=turn, num_cached_tokens=completion.num_cached_tokens)

    async def _complete(self, request: GenerateRequest) -> Completion:
        with boundary(EngineError, f"request {request.id}"):
            completion = first = await self._engine.generate(request)
            while (again := resumed(request, completion, version=self._engine.stats().version)) is not None:
                if not self.sampling.resumes:
                    raise RequestAborted(
                        f"request {request.id}: given up after {len(completion.token_ids)} tokens, for new weights"
                    )
                completion = await self._engine.generate(again)
        if completion.finish_reason is FinishReason.ABORT:
            raise EngineError(f"request {request.id} was aborted by the engine")
        return replace(completion, num_cached_tokens=first.num_cached_tokens)
