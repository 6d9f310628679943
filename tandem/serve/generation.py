"""One request on its way to an answer of n choices, whatever face asked for it.

Owns: the engine requests of a request, their seeds, streaming as tokens come, the end at a stop string, exact usage.
Refuses: how a reply looks (``shapes``). Invariant: streamed pieces, joined, are the whole answer's content.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from tandem.core.errors import ConfigError, EngineError, PromptTooLong
from tandem.core.protocols import TokenEngine
from tandem.core.types import Completion, FinishReason, GenerateRequest, Ids, ToolSpec
from tandem.core.wire import derive_seed
from tandem.serve.answer import Answer, AnswerReader
from tandem.serve.connection import Emit
from tandem.serve.requests import Asked, BadRequest
from tandem.serve.sessions import Sessions
from tandem.text.guide import Guide, Guides
from tandem.text.render import Renderer


@dataclass(frozen=True, kw_only=True)
class Served:
    """What is served: an engine, how its model writes conversations, and the names that clients call it by.
    ``keys``: the API keys that are let in; none: everybody. ``max_waiting``: requests beyond it are told to come
    again (429)."""

    engine: TokenEngine
    renderer: Renderer
    names: tuple[str, ...]
    max_context_tokens: int
    keys: tuple[str, ...] = ()
    max_waiting: int = 1024
    sessions: Sessions | None = None

    @cached_property
    def guides(self) -> Guides:
        return Guides(self.renderer.tokenizer, self.renderer.stop_token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """One finished choice."""

    index: int
    answer: Answer
    completion: Completion

    @property
    def token_ids(self) -> Ids:
        return self.completion.token_ids[: self.answer.num_tokens]


class Shape(Protocol):
    """How a face writes what was generated. ``envelope`` is what every reply and chunk carries."""

    def words(self, index: int, text: str) -> object:
        """A chunk of content."""
        ...

    def opening(self, index: int) -> object | None:
        """The chunk before the first content of a choice, if the face has one."""
        ...

    def ending(self, made: Made) -> list[object]:
        """The last chunks of a choice."""
        ...

    def usage(self, usage: dict[str, object]) -> object:
        """The chunk after all choices."""
        ...

    def whole(self, choices: Sequence[Made], usage: dict[str, object]) -> object:
        """The reply that is not streamed."""
        ...


def envelope(kind: str, stem: str, model: str) -> dict[str, object]:
    return {"id": f"{stem}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


class Generation:
    """``asked.num_choices`` answers to each of ``prompts`` (choice i is prompt i // n)."""

    def __init__(
        self,
        served: Served,
        asked: Asked,
        prompts: Sequence[Ids],
        shape: Shape,
        *,
        request_id: str,
        tools: Sequence[ToolSpec] = (),
        one_call: bool = False,
        max_context_tokens: int | None = None,
        on_made: Callable[[Made], None] | None = None,
    ) -> None:
        limit = min(served.max_context_tokens, max_context_tokens or served.max_context_tokens)
        for prompt in prompts:
            room = limit - len(prompt)
            if room < (1 if asked.max_tokens is None else asked.max_tokens):
                wanted = f" and max_tokens {asked.max_tokens}" if asked.max_tokens else ""
                raise PromptTooLong(f"the prompt has {len(prompt)} tokens{wanted}; the context holds {limit}")
        self._served, self._asked, self._prompts, self._shape = served, asked, prompts, shape
        self._one_call = one_call
        self._id, self._tools, self._limit, self._on_made = request_id, tools, limit, on_made

    async def run(self, emit: Emit) -> object:
        """Make all choices, emitting chunks on the way if the client streams; returns the whole reply."""
        count = len(self._prompts) * self._asked.num_choices
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._choice(index, emit)) for index in range(count)]
        except BaseExceptionGroup as errors:  # the first failure ended the others
            raise errors.exceptions[0] from None
        made = [task.result() for task in tasks]
        usage = self._usage(made)
        if self._asked.stream and self._asked.include_usage:
            emit(self._shape.usage(usage))
        return self._shape.whole(made, usage)

    async def _choice(self, index: int, emit: Emit) -> Made:
        prompt = self._prompts[index // self._asked.num_choices]
        reader = AnswerReader(
            self._served.renderer, self._tools, self._asked.params.stop, one_call=self._one_call
        )
        params = replace(
            self._asked.params,
            max_tokens=self._limit - len(prompt) if self._asked.max_tokens is None else max(1, self._asked.max_tokens),
            stop=(),
            stop_token_ids=self._served.renderer.stop_token_ids,
        )
        request = GenerateRequest(
            id=f"{self._id}-{index}",
            prompt_ids=prompt,
            params=params,
            seed=derive_seed("serve", self._asked.seed, index),
        )
        aborts: list[asyncio.Task[None]] = []
        opened = False  # with the first chunk, so that an early error has its status

        def say(chunk: object) -> None:
            nonlocal opened
            if not self._asked.stream:
                return
            if not opened and (opening := self._shape.opening(index)) is not None:
                emit(opening)
            opened = True
            emit(chunk)

        def hear(token_ids: Sequence[int]) -> None:
            if words := reader.push(token_ids):
                say(self._shape.words(index, words))
            if reader.stopped and not aborts:
                aborts.append(asyncio.ensure_future(self._served.engine.abort(request.id)))

        scores_only = self._asked.max_tokens == 0  # the engine's one token is nobody's
        completion = await self._served.engine.generate(
            request, on_tokens=None if scores_only else hear, guide=self._guide()
        )
        await asyncio.gather(*aborts)
        if scores_only:
            last, answer = "", Answer(content="", calls=(), finish_reason=FinishReason.LENGTH, num_tokens=0)
        else:
            last, answer = reader.finish(completion.token_ids, completion.finish_reason)
        if answer.finish_reason is FinishReason.ABORT:
            raise EngineError(f"request {request.id} was aborted")
        if last:
            say(self._shape.words(index, last))
        made = Made(index=index, answer=answer, completion=completion)
        if self._on_made is not None:
            self._on_made(made)
        for chunk in self._shape.ending(made):
            say(chunk)
        return made

    def _guide(self) -> Guide | None:
        """Raises BadRequest naming the field."""
        if (spec := self._asked.guide) is None:
            return None
        guides = self._served.guides
        try:
            if spec.lark is not None:
                return guides.lark(spec.lark)
            return guides.regex(spec.regex) if spec.regex is not None else guides.json_schema(spec.schema or {})
        except ConfigError as error:
            raise BadRequest(f"{spec.field}: {error.message}", param=spec.field) from error

    def _usage(self, made: Sequence[Made]) -> dict[str, object]:
        """A prompt counts once, however many choices it has; what of it was cached is what its first choice found."""
        each = self._asked.num_choices
        prompts = sum(len(prompt) for prompt in self._prompts)
        answers = sum(one.answer.num_tokens for one in made)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": answers,
            "total_tokens": prompts + answers,
            "prompt_tokens_details": {"cached_tokens": sum(one.completion.num_cached_tokens for one in made[::each])},
        }
