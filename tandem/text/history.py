"""The tree of one agent's conversations: which ids a new request goes on from.

A client sends the whole conversation again with every request. What the model said in it was sampled as ids, and those
ids count, not the text that came back. So each answer is remembered with its conversation; a request that begins with
a remembered conversation, its answer included, goes on from those very ids, and one that begins with none starts anew.
Two requests that go on from one answer are branches.
Owns: the matching. Refuses: sampling. Invariant: the ids of a prompt begin with all ids of the answer it goes on from.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tandem.core.types import Ids, Message, Role, ToolSpec
from tandem.text.render import Renderer
from tandem.text.tool_format import after_reasoning


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Ids to continue; ``parent`` is the number of the answer they go on from, -1: none."""

    token_ids: Ids
    parent: int


@dataclass(frozen=True, slots=True)
class _Said:
    """An answer and the ids of everything up to its end."""

    stream: Ids
    completion_ids: Ids


class HistoryTree:
    """Answers are numbered in the order in which they were remembered."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._said: list[_Said] = []
        self._by_conversation: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._said)

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Prompt:
        """Raises ConfigError: the chat template or the tool format refuses the conversation."""
        ends = [index + 1 for index, message in enumerate(messages) if message.role is Role.ASSISTANT]
        for end in reversed(ends):
            number = self._by_conversation.get(_key(messages[:end], tools))
            if number is not None:
                said = self._said[number]
                return Prompt(
                    token_ids=_go_on(self._renderer, said.stream, said.completion_ids, messages[end:], tools),
                    parent=number,
                )
        return Prompt(token_ids=first_prompt(self._renderer, messages, tools), parent=-1)

    def remember(
        self,
        prompt: Prompt,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        *,
        reply: Message,
        completion_ids: Ids,
    ) -> int:
        """Keep an answer to ``messages`` as the client was told it; returns its number. Of two answers told in the
        same words the later one is gone on from."""
        number = len(self._said)
        told = (*messages, reply)
        self._said.append(_Said(prompt.token_ids + completion_ids, completion_ids))
        self._by_conversation[_key(told, tools)] = number
        return number


def first_prompt(renderer: Renderer, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Ids:
    """A conversation that nobody sampled here, on the road of training: an assistant's words are ids of their own and
    nothing is rendered over."""
    opening = next((i for i, message in enumerate(messages) if message.role is Role.ASSISTANT), len(messages))
    return _append(renderer, renderer.prompt(messages[:opening], tools), messages[opening:], tools)


def _go_on(
    renderer: Renderer, stream: Ids, completion_ids: Ids, messages: Sequence[Message], tools: Sequence[ToolSpec]
) -> Ids:
    following = next((i for i, message in enumerate(messages) if message.role is Role.ASSISTANT), len(messages))
    stream = stream + renderer.continuation(completion_ids, messages[:following])
    return _append(renderer, stream, messages[following:], tools)


def _append(renderer: Renderer, stream: Ids, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Ids:
    """The stream with messages that begin with an assistant's, whose turn it has opened; words that nobody sampled."""
    turns = [index for index, message in enumerate(messages) if message.role is Role.ASSISTANT]
    for turn, following in pairwise([*turns, len(messages)]):
        made = renderer.completion(messages[turn], tools)
        stream = stream + made + renderer.continuation(made, messages[turn + 1 : following])
    return stream


def _key(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> bytes:
    """What two conversations that the model would see alike have in common. Ids of calls are the server's and clients
    may make their own; blank ends of an answer get lost in many clients."""
    said = [_plain(message) for message in messages]
    offered = [[tool.name, tool.description, tool.parameters] for tool in tools]
    return json.dumps([said, offered], sort_keys=True).encode()


def _plain(message: Message) -> list[object]:
    words = message.content
    if message.role is Role.ASSISTANT:  # clients may send its thoughts back, or not
        thought = after_reasoning(words) if words.lstrip().startswith("<think>") else 0
        words = words[thought:].strip()
    calls = [[call.name, call.arguments, call.unread] for call in message.tool_calls]
    return [message.role.value, words, calls, message.name or ""]
