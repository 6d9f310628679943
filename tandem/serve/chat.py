"""A chat request: JSON to typed messages and tools, and how to answer.

Owns: what a client may say in a conversation. Refuses, naming the field, as ``requests`` does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from tandem.core.types import Message, Role, ToolSpec
from tandem.serve.requests import (
    MAX_TOPS,
    Asked,
    BadRequest,
    GuideSpec,
    SamplingBody,
    Struct,
    asked_of,
    decode,
    within,
)
from tandem.text.told_calls import call_as_told

TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
}


class TextPart(Struct, kw_only=True):
    type: Literal["text"]
    text: str


class FunctionCall(Struct, kw_only=True):
    name: str
    arguments: str


class CallBody(Struct, kw_only=True):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"
    index: int | None = None  # clients that put streamed pieces together leave it in


class MessageBody(Struct, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[CallBody] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    reasoning_content: str | None = None  # an assistant's, as it was told


class Function(Struct, kw_only=True):
    name: str
    description: str = ""
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class ToolBody(Struct, kw_only=True):
    function: Function
    type: Literal["function"] = "function"


class ChatBody(SamplingBody, kw_only=True):
    messages: list[MessageBody]
    tools: list[ToolBody] | None = None
    tool_choice: str | dict[str, object] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, object] | None = None


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that can be served."""

    asked: Asked
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    forced: tuple[ToolSpec, ...] = ()  # one of these must be called
    one_call: bool = False


def read_request(data: bytes) -> ChatRequest:
    """Decode and check a request body.

    Raises:
        BadRequest: the first thing that is wrong with it.
    """
    return checked(decode(data, ChatBody))


def checked(body: ChatBody) -> ChatRequest:
    """Raises ``BadRequest``."""
    tools = _tools(body.tools or [])
    forced = _forced(body.tool_choice, tools)
    tools = () if body.tool_choice == "none" else tools
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise BadRequest("give max_tokens or max_completion_tokens, not both", param="max_completion_tokens")
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    tops = body.top_logprobs or 0
    within("top_logprobs", tops, 0, MAX_TOPS)
    if tops and not body.logprobs:
        raise BadRequest("top_logprobs: needs logprobs = true", param="top_logprobs")
    asked = asked_of(
        body,
        max_tokens=limit,
        logprobs=bool(body.logprobs),
        top_logprobs=tops,
        max_tokens_field=field,
        guide=_response_format(body.response_format),
    )
    if asked.guide is not None and tools:
        raise BadRequest(f"{asked.guide.field}: not together with tools", param=asked.guide.field)
    return ChatRequest(
        asked=asked,
        messages=_messages(body.messages),
        tools=tools,
        forced=forced,
        one_call=body.parallel_tool_calls is False or isinstance(body.tool_choice, dict),
    )


def _forced(choice: str | dict[str, object] | None, tools: Sequence[ToolSpec]) -> tuple[ToolSpec, ...]:
    """The tools one of which must be called; none: the model is free."""
    match choice:
        case None | "auto" | "none":
            return ()
        case "required":
            named = list(tools)
        case {"type": "function", "function": {"name": str() as name}}:
            named = [tool for tool in tools if tool.name == name]
        case _:
            raise BadRequest(
                'tool_choice: must be "none", "auto", "required", or of type "function" with function.name',
                param="tool_choice",
            )
    if not named:
        raise BadRequest("tool_choice: no such tool is on offer in tools", param="tool_choice")
    return tuple(named)


def _response_format(given: dict[str, object] | None) -> GuideSpec | None:
    match given:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return GuideSpec(field="response_format", schema={"type": "object"})
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            return GuideSpec(field="response_format", schema=schema)
    raise BadRequest(
        'response_format: must be of type "text", "json_object", or "json_schema" with json_schema.schema',
        param="response_format",
    )


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
    if body.reasoning_content:
        if role is not Role.ASSISTANT:
            param = f"{place}.reasoning_content"
            raise BadRequest(f"{param}: only an assistant thinks", param=param)
        content = f"<think>\n{body.reasoning_content}\n</think>\n\n{content}"
    # Arguments that are no JSON come back as they were told: a call may be cut.
    calls = (call_as_told(call.id, call.function.name, call.function.arguments) for call in body.tool_calls or [])
    return Message(role=role, content=content, tool_calls=tuple(calls), name=body.name)


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
