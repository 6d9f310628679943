"""Small real parts of the serve tests: a character tokenizer with a few longer tokens, a scripted engine, a server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tandem.core.errors import NotRunning, PromptTooLong
from tandem.core.types import (
    Completion,
    EngineStats,
    FinishReason,
    GenerateRequest,
    Sampled,
    Top,
    WeightVersion,
    floats,
    ids,
)
from tandem.serve.generation import Served
from tandem.serve.openai import make_app
from tandem.serve.server import serve_forever
from tandem.text.render import Renderer
from tandem.text.tokenizer import Tokenizer

END = "<|im_end|>"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PAIRS = ("AB", "CD", "EF")  # one token each


@lru_cache(maxsize=8)
def renderer(tool_format: str = "fence", reasoning: str = "auto") -> Renderer:
    """ChatML; every byte is a token, and so are ``PAIRS``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: number for number, symbol in enumerate([*alphabet, *PAIRS])}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[(pair[0], pair[1]) for pair in PAIRS]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|im_start|>", END])
    loaded = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, chat_template=CHATML)
    return Renderer(Tokenizer(loaded, name="characters"), tool_format, reasoning)


def say(text: str, *, end: bool = True) -> list[int]:
    tokenizer = renderer().tokenizer
    return [*tokenizer.encode(text), *([tokenizer.special_tokens[END]] if end else [])]


def sampled(request: GenerateRequest, made: Sequence[int], start: int) -> Sampled:
    """The tokens of an answer from ``start`` on, with numbers that tell their places."""
    tops = None
    if request.params.top_logprobs:
        tops = tuple(Top(token_ids=ids([token, 65]), logprobs=floats([-0.5, -2])) for token in made[start:])
    scores = scored_tops = None
    if request.params.prompt_logprobs and start == 0:
        scores = floats(-0.125 * place for place in range(1, len(request.prompt_ids)))
        if tops is not None:
            scored_tops = tuple(Top(token_ids=ids([66]), logprobs=floats([-1])) for _ in scores)
    return Sampled(
        token_ids=ids(made[start:]),
        logprobs=floats(-0.25 * (place + 1) for place in range(start, len(made))),
        tops=tops,
        prompt_logprobs=scores,
        prompt_tops=scored_tops,
    )


class ScriptedEngine:
    """A ``TokenEngine`` that says what ``script`` returns, one token a step, and stops at end tokens and limits.
    ``at_once``: so many tokens are told together."""

    def __init__(
        self, script: Callable[[GenerateRequest], Sequence[int]], *, step_s: float = 0.0, at_once: int = 1
    ) -> None:
        self.script = script
        self.step_s = step_s
        self.at_once = at_once
        self.requests: list[GenerateRequest] = []
        self.num_waiting = 0
        self.running: set[str] = set()
        self.cancelled: list[str] = []
        self.forks: list[str] = []
        self._aborted: set[str] = set()

    async def generate(
        self,
        request: GenerateRequest,
        *,
        on_tokens: Callable[[Sampled], None] | None = None,
        guide: object = None,
    ) -> Completion:
        self.requests.append(request)
        if len(request.prompt_ids) > 4000:
            raise PromptTooLong("the prompt does not fit the cache")
        self.running.add(request.id)
        made: list[int] = []
        reason = FinishReason.LENGTH
        try:
            for token_id in self.script(request):
                if len(made) == request.params.max_tokens:
                    break
                await asyncio.sleep(self.step_s)
                if request.id in self._aborted:
                    reason = FinishReason.ABORT
                    break
                made.append(token_id)
                if on_tokens is not None and len(made) % self.at_once == 0:
                    on_tokens(sampled(request, made, len(made) - self.at_once))
                if token_id in request.params.stop_token_ids:
                    reason = FinishReason.STOP
                    break
        except asyncio.CancelledError:
            self.cancelled.append(request.id)
            raise
        finally:
            self.running.discard(request.id)
        told = sampled(request, made, 0)
        return Completion(
            request_id=request.id,
            token_ids=told.token_ids,
            logprobs=told.logprobs,
            versions=ids([3] * len(made)),
            finish_reason=reason,
            num_cached_tokens=5,
            tops=told.tops,
            prompt_logprobs=told.prompt_logprobs,
            prompt_tops=told.prompt_tops,
        )

    async def fork(
        self,
        request_id: str,
        forks: Mapping[str, int],
        *,
        at: int | None = None,
        on_tokens: Callable[[str, Sampled], None] | None = None,
        guides: object = None,
    ) -> list[Completion]:
        if request_id not in self.running:
            raise NotRunning(f"request {request_id} is not running")
        assert at == 0 and on_tokens is not None
        parent = next(request for request in self.requests if request.id == request_id)
        self.forks += forks
        return [
            await self.generate(replace(parent, id=name, seed=seed), on_tokens=partial(on_tokens, name))
            for name, seed in forks.items()
        ]

    async def abort(self, request_id: str) -> None:
        self._aborted.add(request_id)

    async def load(self, version: WeightVersion) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.running), num_waiting=self.num_waiting, blocks_in_use=0, blocks_total=0,
            prompt_tokens=0, cached_tokens=0, generated_tokens=0, busy_s=0.0, version=3,
        )  # fmt: skip

    async def close(self) -> None: ...


def served(
    engine: ScriptedEngine,
    *,
    tool_format: str = "fence",
    reasoning: str = "auto",
    max_context_tokens: int = 2048,
    **more: object,
) -> Served:
    return Served(
        engine=engine,
        renderer=renderer(tool_format, reasoning),
        names=("small", "run-7"),
        max_context_tokens=max_context_tokens,
        **more,
    )


@contextlib.asynccontextmanager
async def serving(what: Served) -> AsyncIterator[str]:
    """A real server on a free loopback port; yields its address."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = asyncio.ensure_future(serve_forever(make_app(what), host="127.0.0.1", port=0, on_ready=ready.set_result))
    try:
        yield await asyncio.wait_for(ready, 30)
    finally:
        server.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait_for(server, 30)
