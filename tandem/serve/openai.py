"""The OpenAI face of an engine: chat and text completions, models, health, metrics, and recorded sessions.

Owns: routes, who is let in, and when a client is told to come again. Refuses: loading models.
A path that begins with ``/sessions/NAME`` has the same routes and is recorded under that name.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route

from tandem.core.errors import ConfigError, PromptTooLong
from tandem.core.types import Ids, Message, Role, StopReason
from tandem.serve.body import read_away, whole_body
from tandem.serve.branches import read_branch
from tandem.serve.chat import ChatBody, ChatRequest, checked
from tandem.serve.completions import read_completion
from tandem.serve.connection import Emit, Exchange, describe, error_body, json_response
from tandem.serve.generation import Generation, Made, Served
from tandem.serve.requests import Asked, BadRequest, GuideSpec, decode
from tandem.serve.sessions import RecordedSession, Sessions
from tandem.serve.shapes import ChatShape, TextShape
from tandem.text.history import Prompt, first_prompt

Endpoint = Callable[[Request], Awaitable[Response | Exchange]]


def make_app(served: Served) -> Starlette:
    """The application. The engine is the caller's to close."""
    face = _Face(served, served.sessions or Sessions(served.renderer))
    api = [
        Route("/v1/chat/completions", face.endpoint(face.chat), methods=["POST"]),
        Route("/v1/completions", face.endpoint(face.completions), methods=["POST"]),
        Route("/v1/models", face.endpoint(face.models)),
        Route("/v1/models/{model:path}", face.endpoint(face.model)),
    ]
    sessions = [
        Route("/", face.endpoint(face.session), methods=["GET"]),
        Route("/", face.endpoint(face.close_session), methods=["DELETE"]),
        Route("/v1/branches", face.endpoint(face.branches), methods=["POST"]),
        *api,
    ]
    return Starlette(
        routes=[
            *api,
            Mount("/sessions/{session}", routes=sessions),
            Route("/health", face.endpoint(face.health, open_to_all=True)),
            Route("/metrics", face.endpoint(face.metrics, open_to_all=True)),
        ],
        exception_handlers={HTTPException: _http_error},
    )


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    body = error_body(message, kind="invalid_request_error")
    return json_response(body, error.status_code, close=not await read_away(request))


class _Face:
    """What the routes do."""

    def __init__(self, served: Served, sessions: Sessions) -> None:
        self._served = served
        self._sessions = sessions
        self._started = int(time.time())

    def endpoint(self, run: Endpoint, *, open_to_all: bool = False) -> Endpoint:
        """The boundary to the client: every error becomes a status and a sentence."""

        async def guarded(request: Request) -> Response | Exchange:
            try:
                if not open_to_all:
                    self._let_in(request)
                return await run(request)
            except Exception as error:
                status, body = describe(error, request.url.path)
                response = json_response(body, status, close=not await read_away(request))
                if status == 429:
                    response.headers["retry-after"] = "1"
                return response

        return guarded

    # ---- generation
    async def chat(self, request: Request) -> Exchange:
        asked = checked(decode(await whole_body(request), ChatBody))
        asked = msgspec.structs.replace(asked, asked=self._in_line(request, asked.asked))
        self._admit(asked.asked)
        session = self._session(request)
        prompt = await asyncio.to_thread(self._chat_prompt, session, asked)
        return Exchange(self._chat_work(asked, prompt, session), stream=asked.asked.stream)

    async def completions(self, request: Request) -> Exchange:
        if "session" in request.path_params:
            raise BadRequest("a session records conversations: use /v1/chat/completions", status=404)
        tokenizer = self._served.renderer.tokenizer
        asked = read_completion(await whole_body(request), vocabulary=tokenizer.vocab_size)
        asked = msgspec.structs.replace(asked, asked=self._in_line(request, asked.asked))
        self._admit(asked.asked)
        self._check_length((each for each in asked.prompts if isinstance(each, str)), field="prompt")
        prompts = [tokenizer.encode_document(each) if isinstance(each, str) else each for each in asked.prompts]
        if empty := [number for number, prompt in enumerate(prompts) if not prompt]:
            raise BadRequest(f"prompt: number {empty[0]} has no token", param="prompt")
        texts = [each if isinstance(each, str) else tokenizer.decode(each) for each in asked.prompts]
        shape = TextShape(asked.asked, tokenizer, prompts, texts if asked.echo else ())
        generation = Generation(self._served, asked.asked, prompts, shape, request_id=shape.id)
        return Exchange(generation.run, stream=asked.asked.stream)

    async def branches(self, request: Request) -> Response | Exchange:
        """Fork a recorded conversation into several, each of which goes on by itself."""
        asked = read_branch(await whole_body(request))
        chat = msgspec.structs.replace(asked.chat, asked=self._in_line(request, asked.chat.asked))
        self._admit(chat.asked)
        session = self._session(request)
        assert session is not None
        prompt = await asyncio.to_thread(self._chat_prompt, session, chat)
        if asked.recorded and prompt.parent < 0:
            raise BadRequest("messages: no answer of this session ends where the fork begins", param="messages")
        return Exchange(self._chat_work(chat, prompt, session, forks=True), stream=False)

    def _chat_prompt(self, session: RecordedSession | None, asked: ChatRequest) -> Prompt:
        self._check_length((message.content for message in asked.messages), field="messages")
        try:
            self._served.renderer.format.check(asked.tools)
        except ConfigError as error:
            raise BadRequest(f"tools: {error.message}", param="tools", code="unsupported_value") from error
        if session is not None:
            return session.prompt(asked.messages, asked.tools)
        stream = first_prompt(self._served.renderer, asked.messages, asked.tools)
        return Prompt(token_ids=stream, parent=-1)

    def _check_length(self, texts: Iterable[str], *, field: str) -> None:
        """Refuse, before the work of making tokens, a text that cannot fit: the tokenizer holds the interpreter, and
        with it every other request, for a second a megabyte."""
        limit = self._served.max_context_tokens
        longest = max((len(text) for text in texts), default=0)
        if longest > limit * self._served.renderer.tokenizer.longest_token:
            message = f"{field}: a text of {longest} characters has more than the {limit} tokens of the context"
            raise BadRequest(message, param=field, code="context_length_exceeded")

    def _chat_work(
        self, chat: ChatRequest, prompt: Prompt, session: RecordedSession | None, *, forks: bool = False
    ) -> Callable[[Emit], Awaitable[object]]:
        asked = chat.asked if session is None else _on_terms(chat.asked, session, prompt.token_ids, self._served)
        if chat.forced:
            asked = msgspec.structs.replace(asked, guide=self._call_guide(chat))
        shape = ChatShape(asked, self._served.renderer.tokenizer, prompt.token_ids)
        try:
            generation = Generation(
                self._served,
                asked,
                [prompt.token_ids],
                shape,
                request_id=shape.id,
                tools=chat.tools,
                one_call=chat.one_call,
                forks=forks,
                reasoning=self._served.renderer.reasoning,
                max_context_tokens=session.terms.max_context_tokens if session else None,
                on_made=None if session is None else lambda made: _keep(session, chat, prompt, made),
            )
        except PromptTooLong:
            if session is not None and session.turns:
                session.over = StopReason.CONTEXT_FULL
            raise
        return generation.run

    def _call_guide(self, chat: ChatRequest) -> GuideSpec:
        """Raises BadRequest: the model's way of writing calls cannot be forced."""
        try:
            grammar = self._served.renderer.format.grammar(chat.forced, several=not chat.one_call)
        except ConfigError as error:
            raise BadRequest(f"tool_choice: {error.message}", param="tool_choice", code="unsupported_value") from error
        return GuideSpec(field="tool_choice", lark=grammar)

    # ---- sessions
    def _session(self, request: Request) -> RecordedSession | None:
        name = request.path_params.get("session")
        return None if name is None else self._sessions.enter(name)

    async def session(self, request: Request) -> Response:
        return json_response(self._sessions.get(request.path_params["session"]).shown())

    async def close_session(self, request: Request) -> Response:
        return json_response(self._sessions.close(request.path_params["session"]).shown())

    # ---- about the server
    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model(name) for name in self._served.names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        self._check_model(name)
        return json_response(self._model(name))

    async def health(self, request: Request) -> Response:
        stats = self._served.engine.stats()
        return json_response({"status": "ok", "running": stats.num_running, "waiting": stats.num_waiting,
                              "weight_version": stats.version})  # fmt: skip

    async def metrics(self, request: Request) -> Response:
        """The engine's counters in the Prometheus text format."""
        stats = dataclasses.asdict(self._served.engine.stats())
        lines = [
            f"# TYPE tandem_engine_{name} gauge\ntandem_engine_{name} {value}"
            for name, value in stats.items()
            if value is not None  # what the engine does not tell is not there, rather than zero
        ]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    # ---- who and when
    def _let_in(self, request: Request) -> None:
        if self._served.keys and self._key(request) is None:
            raise BadRequest("the API key is missing or wrong", code="invalid_api_key", status=401)

    def _key(self, request: Request) -> int | None:
        """The number of the key that the request has."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        held = [number for number, key in enumerate(self._served.keys) if hmac.compare_digest(given, key.encode())]
        return held[0] if held else None

    def _in_line(self, request: Request, asked: Asked) -> Asked:
        """Whose share of the engine it takes: its key's, where there are keys, else its group's, else its session's.
        Who is let in by a key cannot take more than the key's share, only less."""
        if not self._served.keys:
            group = asked.group or request.path_params.get("session", "")
            return msgspec.structs.replace(asked, group=group)
        for field, beyond in (("group", bool(asked.group)), ("priority", asked.priority > 0)):
            if beyond:
                raise BadRequest(f"{field}: a request's share is that of its API key here", param=field)
        return msgspec.structs.replace(asked, group=f"key {self._key(request)}")

    def _admit(self, asked: Asked) -> None:
        self._check_model(asked.model)
        waiting = self._served.engine.stats().num_waiting
        if waiting >= self._served.max_waiting:
            raise BadRequest(f"{waiting} requests wait already; try again soon", code="overloaded", status=429)

    def _check_model(self, name: str) -> None:
        if name not in self._served.names:
            message = f"model: no model {name!r}; served: {', '.join(self._served.names)}"
            raise BadRequest(message, param="model", code="model_not_found", status=404)

    def _model(self, name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": self._started, "owned_by": "tandem",
                "max_model_len": self._served.max_context_tokens}  # fmt: skip


def _on_terms(asked: Asked, session: RecordedSession, prompt: Ids, served: Served) -> Asked:
    """What the session's owner fixes, in place of what the client asked for."""
    terms = session.terms
    seed = session.begin()
    changes: dict[str, object] = {} if seed is None else {"seed": seed}
    if terms.group is not None:
        changes |= {"group": terms.group, "priority": terms.priority}
    if terms.params is not None:
        limit = min(served.max_context_tokens, terms.max_context_tokens or served.max_context_tokens)
        room = max(1, limit - len(prompt))
        fixed = replace(asked.params, temperature=terms.params.temperature, top_p=terms.params.top_p,
                        top_k=terms.params.top_k)  # fmt: skip
        most = min(terms.params.max_tokens, room)
        changes |= {"params": fixed, "max_tokens": most if asked.max_tokens is None else min(asked.max_tokens, most)}
    return msgspec.structs.replace(asked, **changes)


def _keep(session: RecordedSession, chat: ChatRequest, prompt: Prompt, made: Made) -> None:
    calls = tuple(told.call for told in made.answer.calls)
    reply = Message(role=Role.ASSISTANT, content=made.answer.content, tool_calls=calls)
    session.record(
        prompt,
        chat.messages,
        chat.tools,
        reply=reply,
        completion=made.completion,
        num_tokens=made.answer.num_tokens,
        finish_reason=made.answer.finish_reason,
    )
