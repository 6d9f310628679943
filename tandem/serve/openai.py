"""The OpenAI chat face of an engine: ``/v1/chat/completions``, ``/v1/models``, ``/health``.

Owns: routes, the shape of replies, and how a conversation becomes a prompt: on the very road of training, where an
assistant's words are tokens of their own and nothing is rendered over. Refuses: loading models.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem.core.errors import EngineError, PromptTooLong
from tandem.core.protocols import TokenEngine
from tandem.core.types import Completion, FinishReason, GenerateRequest, Ids, Message, Role, ToolSpec
from tandem.core.wire import derive_seed
from tandem.serve.answer import Answer, AnswerReader
from tandem.serve.chat import BadRequest, ChatRequest, read_request
from tandem.serve.connection import Emit, Exchange, describe, error_body, json_response
from tandem.text.render import Renderer

MAX_BODY_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What is served: an engine, how its model writes conversations, and the names that clients call it by."""

    engine: TokenEngine
    renderer: Renderer
    names: tuple[str, ...]
    max_context_tokens: int


def make_app(served: Served) -> Starlette:
    """The application. The engine is the caller's to close."""
    started = int(time.time())

    async def chat(request: Request) -> Response | Exchange:
        try:
            asked = read_request(await _body(request))
            _check_model(served, asked.model)
            prompt = await asyncio.to_thread(_prompt, served.renderer, asked.messages, asked.tools)
            reply = _Reply(served, asked, prompt)
        except Exception as error:  # the boundary to the client: every error becomes a status and a sentence
            status, body = describe(error)
            return json_response(body, status)
        return Exchange(reply.run, stream=asked.stream)

    async def models(request: Request) -> Response:
        listed = [_model(served, name, started) for name in served.names]
        return json_response({"object": "list", "data": listed})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        try:
            _check_model(served, name)
        except BadRequest as error:
            status, body = describe(error)
            return json_response(body, status)
        return json_response(_model(served, name, started))

    async def health(request: Request) -> Response:
        stats = served.engine.stats()
        return json_response({"status": "ok", "running": stats.num_running, "waiting": stats.num_waiting,
                              "weight_version": stats.version})  # fmt: skip

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        return json_response(error_body(message, kind="invalid_request_error"), error.status_code)

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
        ],
        exception_handlers={HTTPException: http_error},
    )


async def _body(request: Request) -> bytes:
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MAX_BODY_BYTES:
            raise BadRequest(f"the body is larger than {MAX_BODY_BYTES} bytes", status=413)
    return bytes(data)


def _check_model(served: Served, name: str) -> None:
    if name not in served.names:
        message = f"model: no model {name!r}; served: {', '.join(served.names)}"
        raise BadRequest(message, param="model", code="model_not_found", status=404)


def _model(served: Served, name: str, created: int) -> dict[str, object]:
    limit = served.max_context_tokens
    return {"id": name, "object": "model", "created": created, "owned_by": "tandem", "max_model_len": limit}


def _prompt(renderer: Renderer, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Ids:
    turns = [index for index, message in enumerate(messages) if message.role is Role.ASSISTANT]
    stream = renderer.prompt(messages[: turns[0] if turns else len(messages)], tools)
    for turn, following in pairwise([*turns, len(messages)]):
        made = renderer.completion(messages[turn], tools)
        stream = stream + made + renderer.continuation(made, messages[turn + 1 : following])
    return stream


class _Reply:
    """One request on its way to an answer of ``num_choices`` choices."""

    def __init__(self, served: Served, asked: ChatRequest, prompt: Ids) -> None:
        room = served.max_context_tokens - len(prompt)
        if room < (asked.max_tokens or 1):
            wanted = f" and max_tokens {asked.max_tokens}" if asked.max_tokens else ""
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens{wanted}; the context holds {served.max_context_tokens}"
            )
        self._served, self._asked, self._prompt = served, asked, prompt
        params = replace(asked.params, max_tokens=asked.max_tokens or room, stop=(),
                         stop_token_ids=served.renderer.stop_token_ids)  # fmt: skip
        self._params = params
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())

    async def run(self, emit: Emit) -> object:
        """Make all choices, emitting chunks on the way if the client streams; returns the whole reply."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._choice(index, emit)) for index in range(self._asked.num_choices)]
        except BaseExceptionGroup as errors:  # the first failure ended the others
            raise errors.exceptions[0] from None
        outcomes = [task.result() for task in tasks]
        usage = self._usage([answer for answer, _ in outcomes], outcomes[0][1])
        if self._asked.stream and self._asked.include_usage:
            emit(self._envelope("chat.completion.chunk") | {"choices": [], "usage": usage})
        choices = [self._whole(index, *outcome) for index, outcome in enumerate(outcomes)]
        extra = {"prompt_token_ids": self._prompt.tolist()} if self._asked.token_ids else {}
        return self._envelope("chat.completion") | {"choices": choices, "usage": usage} | extra

    async def _choice(self, index: int, emit: Emit) -> tuple[Answer, Completion]:
        reader = AnswerReader(self._served.renderer, self._asked.tools, self._asked.params.stop)
        request = GenerateRequest(
            id=f"{self._id}-{index}",
            prompt_ids=self._prompt,
            params=self._params,
            seed=derive_seed("serve", self._asked.seed, index),
        )
        aborts: list[asyncio.Task[None]] = []
        begin: dict[str, object] = {"role": "assistant"}  # with the first chunk, so that an early error has its status

        def say(delta: dict[str, object], ending: dict[str, object] | None = None) -> None:
            if self._asked.stream and (delta or ending):
                emit(self._chunk(index, begin | delta, ending))
                begin.clear()

        def hear(token_ids: Sequence[int]) -> None:
            if words := reader.push(token_ids):
                say({"content": words})
            if reader.stopped and not aborts:
                aborts.append(asyncio.ensure_future(self._served.engine.abort(request.id)))

        completion = await self._served.engine.generate(request, on_tokens=hear)
        await asyncio.gather(*aborts)
        last, answer = reader.finish(completion.token_ids, completion.finish_reason)
        if answer.finish_reason is FinishReason.ABORT:
            raise EngineError(f"request {request.id} was aborted")
        say({"content": last} if last else {})
        say({"tool_calls": self._calls(index, answer, numbered=True)} if answer.calls else {})
        say({}, self._ending(answer, completion))
        return answer, completion

    # ---- shapes
    def _envelope(self, kind: str) -> dict[str, object]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._asked.model}

    def _chunk(self, index: int, delta: dict[str, object], ending: dict[str, object] | None = None) -> object:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | (ending or {})
        return self._envelope("chat.completion.chunk") | {"choices": [choice]}

    def _whole(self, index: int, answer: Answer, completion: Completion) -> object:
        message: dict[str, object] = {"role": "assistant", "content": answer.content}
        if answer.calls:
            message |= {"content": answer.content or None, "tool_calls": self._calls(index, answer)}
        return {"index": index, "message": message} | self._ending(answer, completion)

    def _ending(self, answer: Answer, completion: Completion) -> dict[str, object]:
        ending: dict[str, object] = {"finish_reason": answer.finish_reason.value, "logprobs": None}
        kept = completion.token_ids[: answer.num_tokens]
        if self._asked.logprobs:
            logprobs = completion.logprobs[: answer.num_tokens]
            ending["logprobs"] = {"content": [self._logprob(*pair) for pair in zip(kept, logprobs, strict=True)]}
        if self._asked.token_ids:
            ending["token_ids"] = kept.tolist()
        return ending

    def _logprob(self, token_id: int, logprob: float) -> dict[str, object]:
        text = self._served.renderer.tokenizer.decode([token_id])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}

    def _calls(self, index: int, answer: Answer, *, numbered: bool = False) -> list[dict[str, object]]:
        stem = f"call_{self._id[-12:]}_{index}"
        calls: list[dict[str, object]] = []
        for number, call in enumerate(answer.calls):
            function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
            made: dict[str, object] = {"id": f"{stem}_{number}", "type": "function", "function": function}
            calls.append({"index": number} | made if numbered else made)
        return calls

    def _usage(self, answers: Sequence[Answer], first: Completion) -> dict[str, object]:
        made = sum(answer.num_tokens for answer in answers)
        return {
            "prompt_tokens": len(self._prompt),
            "completion_tokens": made,
            "total_tokens": len(self._prompt) + made,
            "prompt_tokens_details": {"cached_tokens": first.num_cached_tokens},
        }
