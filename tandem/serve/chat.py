"""A chat request: JSON to typed messages, tools and sampling parameters.

Owns: what a client may ask for. Refuses, naming the field: wrong types, values out of range, unknown fields, and known
fields that would change the answer but are not supported. Nothing a client sends is repaired or dropped in silence.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import secrets
from collections.abc import Sequence
from typing import Literal

import msgspec

from tandem.core.types import Message, Role, SamplingParams, ToolCall, ToolSpec

MAX_CHOICES, MAX_STOPS = 128, 16
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
}


class BadRequest(Exception):
    """The client's mistake: ``param`` is the field, as the client wrote its path."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.param, self.code, self.status = message, param, code, status


class _Struct(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Unknown keys are errors."""


class TextPart(_Struct):
    type: Literal["text"]
    text: str


class FunctionCall(_Struct):
    name: str
    arguments: str


class CallBody(_Struct):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"
    index: int | None = None  # clients that put streamed pieces together leave it in


class MessageBody(_Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[CallBody] | None = None
    tool_call_id: str | None = None
    refusal: None = None


class Function(_Struct):
    name: str
    description: str = ""
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class ToolBody(_Struct):
    function: Function
    type: Literal["function"] = "function"


class StreamOptions(_Struct):
    include_usage: bool = False


class ChatBody(_Struct):
    model: str
    messages: list[MessageBody]
    tools: list[ToolBody] | None = None
    tool_choice: str | dict[str, object] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    return_token_ids: bool | None = False  # extension: the ids of prompt and answer
    parallel_tool_calls: bool | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, object] | None = None
    # These say something about the client, not about the answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that can be served. ``max_tokens`` None: as many as the context holds."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    stream: bool
    include_usage: bool
    max_tokens: int | None
    params: SamplingParams
    num_choices: int
    seed: int
    logprobs: bool
    token_ids: bool


def read_request(data: bytes) -> ChatRequest:
    """Decode and check a request body.

    Raises:
        BadRequest: the first thing that is wrong with it.
    """
    body = _decode(data)
    _check_unsupported(body)
    tools = () if body.tool_choice == "none" else _tools(body.tools or [])
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise BadRequest("give max_tokens or max_completion_tokens, not both", param="max_completion_tokens")
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens is not None:
        _within(field, max_tokens, 1, 2**31 - 1)
    num_choices = 1 if body.n is None else body.n
    _within("n", num_choices, 1, MAX_CHOICES)
    if body.seed is not None:
        _within("seed", body.seed, -(2**63), 2**63 - 1)
    return ChatRequest(
        model=body.model,
        messages=_messages(body.messages),
        tools=tools,
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        max_tokens=max_tokens,
        params=_params(body),
        num_choices=num_choices,
        seed=secrets.randbits(62) if body.seed is None else body.seed,
        logprobs=bool(body.logprobs),
        token_ids=bool(body.return_token_ids),
    )


def _decode(data: bytes) -> ChatBody:
    try:
        return msgspec.json.decode(data, type=ChatBody)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$")
        param = place.rstrip("`").lstrip(".") or None
        if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", reason, re.DOTALL):
            param = f"{param}.{unknown[1]}" if param else unknown[1]
            near = difflib.get_close_matches(unknown[1], ChatBody.__struct_fields__, n=1)
            reason = "no such field" + (f"; did you mean {near[0]!r}?" if near else "")
        elif missing := re.fullmatch(r"Object missing required field `(.*)`", reason):
            param = f"{param}.{missing[1]}" if param else missing[1]
            reason = "this field is required"
        raise BadRequest(f"{param or 'body'}: {reason}", param=param) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error


def _check_unsupported(body: ChatBody) -> None:
    """Fields that are known and would change the answer, but are not there."""
    neutral = {
        "frequency_penalty": body.frequency_penalty in (None, 0),
        "presence_penalty": body.presence_penalty in (None, 0),
        "logit_bias": not body.logit_bias,
        "response_format": body.response_format in (None, {"type": "text"}),
        "top_logprobs": body.top_logprobs in (None, 0),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "tool_choice": body.tool_choice in (None, "auto", "none"),
    }
    for field, is_neutral in neutral.items():
        if not is_neutral:
            raise BadRequest(f"{field}: this value is not supported", param=field, code="unsupported_value")
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options: needs stream = true", param="stream_options")


def _within(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise BadRequest(f"{field}: must be from {low} to {high}, got {value}", param=field)


def _params(body: ChatBody) -> SamplingParams:
    temperature = 1.0 if body.temperature is None else body.temperature
    if not (math.isfinite(temperature) and 0 <= temperature <= 100):
        raise BadRequest(f"temperature: must be from 0 to 100, got {temperature}", param="temperature")
    top_p = 1.0 if body.top_p is None else body.top_p
    if not 0 < top_p <= 1:
        raise BadRequest(f"top_p: must be above 0 and at most 1, got {top_p}", param="top_p")
    top_k = 0 if body.top_k is None or body.top_k == -1 else body.top_k  # -1 is other servers' word for all
    _within("top_k", top_k, 0, 2**31 - 1)
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stop) > MAX_STOPS or not all(stop):
        raise BadRequest(f"stop: at most {MAX_STOPS} texts, none of them empty", param="stop")
    return SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, stop=tuple(stop))


def _messages(bodies: Sequence[MessageBody]) -> tuple[Message, ...]:
    if not bodies:
        raise BadRequest("messages: at least one is needed", param="messages")
    names: dict[str, str] = {}  # the tool that each call so far was for
    messages = []
    for number, body in enumerate(bodies):
        place = f"messages[{number}]"
        message = _message(body, place, names)
        names |= {call.id: call.name for call in message.tool_calls}
        messages.append(message)
    if messages[-1].role is Role.ASSISTANT:
        place = f"messages[{len(messages) - 1}].role"
        raise BadRequest(f"{place}: the last message must not be the assistant's; it speaks next", param=place)
    return tuple(messages)


def _message(body: MessageBody, place: str, names: dict[str, str]) -> Message:
    role = ROLES[body.role]
    content = body.content if isinstance(body.content, str) else "".join(part.text for part in body.content or [])
    if body.content is None and not body.tool_calls:
        raise BadRequest(f"{place}.content: this field is required", param=f"{place}.content")
    if body.tool_calls and role is not Role.ASSISTANT:
        raise BadRequest(f"{place}.tool_calls: only an assistant calls tools", param=f"{place}.tool_calls")
    if role is Role.TOOL:
        if body.tool_call_id not in names:
            param = f"{place}.tool_call_id"
            raise BadRequest(f"{param}: must be the id of an earlier call, got {body.tool_call_id!r}", param=param)
        return Message(role=role, content=content, tool_call_id=body.tool_call_id, name=names[body.tool_call_id])
    calls = (_call(call, f"{place}.tool_calls[{index}]") for index, call in enumerate(body.tool_calls or []))
    return Message(role=role, content=content, tool_calls=tuple(calls), name=body.name)


def _call(body: CallBody, place: str) -> ToolCall:
    param = f"{place}.function.arguments"
    try:
        arguments = json.loads(body.function.arguments)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{param}: not JSON: {error}", param=param) from error
    if not isinstance(arguments, dict):
        raise BadRequest(f"{param}: must be a JSON object", param=param)
    return ToolCall(id=body.id, name=body.function.name, arguments=arguments)


def _tools(bodies: Sequence[ToolBody]) -> tuple[ToolSpec, ...]:
    tools: dict[str, ToolSpec] = {}
    for number, body in enumerate(bodies):
        function, param = body.function, f"tools[{number}].function.name"
        if not TOOL_NAME.fullmatch(function.name):
            raise BadRequest(
                f"{param}: letters, digits, _ . and - only, at most 64, got {function.name!r}", param=param
            )
        if function.name in tools:
            raise BadRequest(f"{param}: two tools are named {function.name!r}", param=param)
        schema = function.parameters or {"type": "object", "properties": {}}
        tools[function.name] = ToolSpec(name=function.name, description=function.description, parameters=schema)
    return tuple(tools.values())
