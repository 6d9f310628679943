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
from functools import cached_property, partial
from typing import Protocol

from tandem.core.errors import ConfigError, EngineError, PromptTooLong
from tandem.core.protocols import TokenEngine
from tandem.core.resume import resumed
from tandem.core.types import Completion, FinishReason, GenerateRequest, Ids, Sampled, ToolSpec
from tandem.core.wire import derive_seed
from tandem.serve.answer import Answer, AnswerReader
from tandem.serve.connection import Emit
from tandem.serve.parts import Part, Scored, Telling, whole_part
from tandem.serve.requests import Asked, BadRequest
from tandem.serve.sessions import Sessions
from tandem.serve.trunk import Hear, Trunk
from tandem.text.call_stream import CallPiece
from tandem.text.guide import Guide, Guides
from tandem.text.reasoning import Reasoning
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
    """One finished choice. ``part`` is all of its tokens, whether they were told one by one or not."""

    index: int
    answer: Answer
    completion: Completion
    part: Part


class Shape(Protocol):
    """How a face writes what was generated. ``envelope`` is what every reply and chunk carries, ``part`` the tokens
    that a chunk brings."""

    def words(self, index: int, text: str, part: Part) -> object:
        """A chunk of content."""
        ...

    def thoughts(self, index: int, text: str, part: Part) -> object:
        """A chunk of what the model thinks."""
        ...

    def call(self, index: int, piece: CallPiece, part: Part) -> object:
        """A chunk of a tool call."""
        ...

    def opening(self, index: int, scored: Scored | None) -> object | None:
        """The chunk before the first content of a choice, if the face has one."""
        ...

    def ending(self, made: Made, part: Part) -> list[object]:
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


class _Voice:
    """What a client hears of one choice while it is made."""

    def __init__(self, shape: Shape, index: int, emit: Emit, reader: AnswerReader) -> None:
        self._shape, self._index, self._emit, self._reader = shape, index, emit, reader
        self._telling = Telling()
        self._opened = False  # with the first chunk, so that an early error has its status

    def hear(self, new: Sampled) -> None:
        self._telling.hear(new)

    def give(self, words: str) -> None:
        """What the reader has become certain of: its thoughts, these words, and its calls. The last chunk has the
        tokens."""
        shape, index = self._shape, self._index
        write: list[Callable[[Part], object]] = []
        if thoughts := self._reader.take_reasoning():
            write.append(partial(shape.thoughts, index, thoughts))
        if words:
            write.append(partial(shape.words, index, words))
        write += [partial(shape.call, index, piece) for piece in self._reader.take_calls()]
        for left, chunk in zip(reversed(range(len(write))), write, strict=True):
            self._open()
            self._emit(chunk(self._part(0 if left else self._reader.num_out)))

    def end(self, made: Made, last: str) -> None:
        self._telling.end(made.completion)
        self.give(last)
        self._open()
        for chunk in self._shape.ending(made, self._part(made.answer.num_tokens)):
            self._emit(chunk)

    def _part(self, stop: int) -> Part:
        return self._telling.part(stop, self._reader.places)

    def _open(self) -> None:
        if not self._opened and (opening := self._shape.opening(self._index, self._telling.scored)) is not None:
            self._emit(opening)
        self._opened = True


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
        forks: bool = False,
        reasoning: Reasoning | None = None,
        on_made: Callable[[Made], None] | None = None,
    ) -> None:
        """``forks``: the choices of a prompt are forked from its first one, and the usage tells what each of them
        found."""
        limit = min(served.max_context_tokens, max_context_tokens or served.max_context_tokens)
        for prompt in prompts:
            room = limit - len(prompt)
            if room < (1 if asked.max_tokens is None else asked.max_tokens):
                wanted = f" and max_tokens {asked.max_tokens}" if asked.max_tokens else ""
                raise PromptTooLong(f"the prompt has {len(prompt)} tokens{wanted}; the context holds {limit}")
        self._served, self._asked, self._prompts, self._shape = served, asked, prompts, shape
        self._one_call = one_call
        self._reasoning = reasoning if asked.guide is None else None  # who must fit a grammar thinks nothing aloud
        self._trunks = [Trunk(served.engine) for _ in prompts] if forks else None
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
            self._served.renderer,
            self._tools,
            self._asked.params.stop,
            one_call=self._one_call,
            reasoning=self._reasoning,
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
            group=self._asked.group,
            priority=self._asked.priority,
        )
        aborts: list[asyncio.Task[None]] = []
        voice = _Voice(self._shape, index, emit, reader) if self._asked.stream else None

        def hear(new: Sampled) -> None:
            if voice is not None:
                voice.hear(new)
            for token_id in new.token_ids:
                words = reader.push([token_id])
                if voice is not None:
                    voice.give(words)
            if reader.stopped and not aborts:
                aborts.append(asyncio.ensure_future(self._served.engine.abort(request.id)))

        scores_only = self._asked.max_tokens == 0  # the engine's one token is nobody's
        completion = await self._complete(index, request, reader, None if scores_only else hear)
        await asyncio.gather(*aborts)
        if scores_only:
            last, answer = "", Answer(content="", calls=(), finish_reason=FinishReason.LENGTH, num_tokens=0)
        else:
            last, answer = reader.finish(completion.token_ids, completion.finish_reason)
        if answer.finish_reason is FinishReason.ABORT:
            raise EngineError(f"request {request.id} was aborted")
        part = whole_part(completion, answer.num_tokens, reader.places)
        made = Made(index=index, answer=answer, completion=completion, part=part)
        if self._on_made is not None:
            self._on_made(made)
        if voice is not None:
            voice.end(made, last)
        return made

    async def _complete(
        self, index: int, request: GenerateRequest, reader: AnswerReader, hear: Hear | None
    ) -> Completion:
        """A client cannot go on from tokens: a request that was given up for new weights goes on here."""
        engine = self._served.engine
        completion = first = await self._begin(index, request, hear)
        while not reader.stopped:
            again = resumed(request, completion, version=engine.stats().version)
            if again is None:
                break
            completion = await engine.generate(again, on_tokens=hear, guide=self._guide())
        return replace(completion, num_cached_tokens=first.num_cached_tokens)

    async def _begin(self, index: int, request: GenerateRequest, hear: Hear | None) -> Completion:
        guide = self._guide()
        if self._trunks is None or hear is None:
            return await self._served.engine.generate(request, on_tokens=hear, guide=guide)
        place, way = divmod(index, self._asked.num_choices)
        trunk = self._trunks[place]
        return await (trunk.branch if way else trunk.grow)(request, hear, guide)

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
        cached = [one.completion.num_cached_tokens for one in made]
        details: dict[str, object] = {"cached_tokens": sum(cached[::each])}
        if self._trunks is not None:
            details["branches_cached_tokens"] = cached
        usage: dict[str, object] = {
            "prompt_tokens": prompts,
            "completion_tokens": answers,
            "total_tokens": prompts + answers,
            "prompt_tokens_details": details,
        }
        if self._reasoning is not None:
            thoughts = sum(one.answer.num_reasoning_tokens for one in made)
            usage["completion_tokens_details"] = {"reasoning_tokens": thoughts}
        return usage
