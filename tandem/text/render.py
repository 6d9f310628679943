"""Messages to ids and back, with exact spans.

Owns: the append-only rule. A conversation's first prompt is the chat template's text; every later prompt is the
old prompt, the completion's own ids, and ``continuation``: ids rendered from the new messages alone, as the
template writes them after a fixed dummy turn. So nothing in the history is tokenised again, and a template that
rewrites its history (drops reasoning, say) does not get to.
Refuses: a template whose text after an assistant turn depends on what came before it (``ConfigError``).
Invariant: special tokens come from the template only; written in a message they are ordinary characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tandem.core.errors import ConfigError
from tandem.core.types import Ids, Mask, Message, Role, ToolResult, ToolSpec, ids, mask
from tandem.text.guard import Guarded
from tandem.text.prefixes import common_length
from tandem.text.reasoning import find_reasoning
from tandem.text.roles import RoleRules, TemplateMessage, template_message
from tandem.text.tokenizer import Tokenizer
from tandem.text.tool_format import find_format

_MARK = "\U000f0001MARK\U000f0001"  # stands for an assistant's words where only what follows them matters


class Span(NamedTuple):
    """Tokens ``start`` to ``end`` of a conversation came from message number ``message``."""

    message: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A completion as a message, and the answers to calls in it that could not be read."""

    message: Message
    failures: tuple[ToolResult, ...] = ()


class Renderer:
    """One model's way of writing conversations. Stateless after construction.

    Raises:
        ConfigError: the model has no chat template, or one that can not be continued by appending.
    """

    def __init__(self, tokenizer: Tokenizer, tool_format: str = "auto", reasoning: str = "auto") -> None:
        self.tokenizer = tokenizer
        self.format, native = find_format(tool_format, chat_template=tokenizer.chat_template)
        self._roles = RoleRules(tokenizer, self.format, native=native)
        closing = self._after([], open_turn=False)
        ends = tokenizer.find_special(closing)
        if ends and closing.startswith(ends[0]):
            self._end_token, self._end_id = ends[0], tokenizer.special_tokens[ends[0]]
        elif tokenizer.eos_ids:
            # The template closes a turn with plain text: the model's end token stands before it.
            self._end_token, self._end_id = "", tokenizer.eos_ids[0]
        else:
            raise ConfigError(f"{tokenizer.name} has neither an end-of-turn token nor an end-of-text token")
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys((self._end_id, *tokenizer.eos_ids)))
        self._check_separable()
        self.reasoning = find_reasoning(
            reasoning, chat_template=tokenizer.chat_template, turn_opening=self._opening
        )

    # ---- messages to ids

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Ids:
        """Ids of a conversation with the assistant's next turn opened."""
        return self._render(messages, tools, open_turn=True)

    def continuation(self, completion_ids: Ids, messages: Sequence[Message]) -> Ids:
        """What to append after a completion: the turn is closed (if it was cut), the new messages follow, and the
        assistant's next turn is opened."""
        ended = len(completion_ids) > 0 and completion_ids[-1] == self._end_id
        return self._continue(messages, ended=ended, open_turn=True)

    def completion(self, message: Message, tools: Sequence[ToolSpec]) -> Ids:
        """Ids of an assistant message as a policy would have made them: words, calls, end token."""
        text = self.format.write(message.content, message.tool_calls, tools)
        guarded = Guarded(self.tokenizer)
        return self._encode_inside(guarded, guarded.escape(text)) + ids([self._end_id])

    def demonstration(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> tuple[Ids, Mask]:
        """A finished conversation, on the very road a sampled one takes; the mask is 1 on what the assistant
        wrote, end tokens included."""
        if not messages or messages[-1].role is not Role.ASSISTANT:
            raise ConfigError("a demonstration ends with an assistant message")
        stream, spans = self._conversation(messages, tools)
        made = mask(bytes(len(stream)))
        for span in spans:
            if messages[span.message].role is Role.ASSISTANT:
                made[span.start : span.end] = mask([1]) * (span.end - span.start)
        return stream, made

    def spans(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Span]:
        """Which tokens of a conversation came from which message. Of an assistant message exactly what the policy
        makes (words, calls, end token); of another its whole block. Tokens of no message (the opening of an
        assistant's turn) lie in the gaps."""
        return self._conversation(messages, tools)[1]

    # ---- ids to messages

    def parse(self, completion_ids: Ids, tools: Sequence[ToolSpec]) -> Parsed:
        """A completion as a message with its tool calls. ``tools`` are those on offer."""
        end = len(completion_ids)
        while end and completion_ids[end - 1] in self.stop_token_ids:
            end -= 1
        found = self.format.parse(self.tokenizer.decode(completion_ids[:end]), tools)
        message = Message(role=Role.ASSISTANT, content=found.content, tool_calls=found.calls)
        return Parsed(message=message, failures=found.failures)

    # ---- the append-only road

    def _conversation(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> tuple[Ids, list[Span]]:
        turns = [index for index, message in enumerate(messages) if message.role is Role.ASSISTANT]
        first = turns[0] if turns else len(messages)
        stream = self.prompt(messages[:first], tools)
        parts = [self._render_or_none(messages[:count], tools) for count in range(1, first + 1)]
        spans = _blocks(stream, parts, first_message=0, start=0, offset=0)
        for turn, following in zip(turns, [*turns[1:], None], strict=True):
            made = self.completion(messages[turn], tools)
            spans.append(Span(turn, len(stream), len(stream) + len(made)))
            stream = stream + made
            new = messages[turn + 1 : following]
            if not new and following is None:
                break
            added = self._continue(new, ended=True, open_turn=True)
            parts = [self._continue(new[:count], ended=True, open_turn=False) for count in range(len(new) + 1)]
            start = common_length(added, parts[0])
            spans += _blocks(added, parts[1:], first_message=turn + 1, start=start, offset=len(stream))
            stream = stream + added
        return stream, spans

    def _continue(self, messages: Sequence[Message], *, ended: bool, open_turn: bool) -> Ids:
        guarded = Guarded(self.tokenizer)
        text = self._after(self._roles.translate(messages, (), guarded), open_turn=open_turn)
        closing = ids() if ended else ids([self._end_id])
        return closing + self._encode_inside(guarded, text.removeprefix(self._end_token))

    def _after(self, messages: Sequence[TemplateMessage], *, open_turn: bool, history: int = 1) -> str:
        """The template's text from the end of an assistant's words on, when ``messages`` follow."""
        dummy: list[TemplateMessage] = []
        for number in range(history):
            dummy += [template_message(Role.USER, f"{number}"), template_message(Role.ASSISTANT, "-")]
        dummy[-1]["content"] = _MARK
        text = self.tokenizer.render_chat([*dummy, *messages], open_turn=open_turn)
        before, mark, after = text.partition(_MARK)
        if not mark or _MARK in after:
            raise ConfigError(f"the chat template of {self.tokenizer.name} does not show an assistant's words once")
        return after

    def _check_separable(self) -> None:
        tool = Message(role=Role.TOOL, content="A", tool_call_id="call_0", name="tool")
        for probe in ([], [tool], [tool, tool], [Message(role=Role.USER, content="B")]):
            rendered = self._roles.translate(probe, (), Guarded(self.tokenizer))
            texts = {
                self._after(rendered, open_turn=open_turn, history=history).removesuffix(opening)
                for history in (1, 2)
                for open_turn, opening in ((False, ""), (True, self._opening))
            }
            if len(texts) > 1:
                raise ConfigError(
                    f"the chat template of {self.tokenizer.name} can not be continued by appending: what follows an "
                    "assistant turn depends on the turns before it",
                    hint="give the model folder another chat_template.jinja",
                )

    @property
    def _opening(self) -> str:
        closed = self._after([], open_turn=False)
        return self._after([], open_turn=True).removeprefix(closed)

    # ---- template and tokens

    def _render(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, open_turn: bool) -> Ids:
        self.format.check(tools)
        guarded = Guarded(self.tokenizer)
        text = self.tokenizer.render_chat(
            self._roles.translate(messages, tools, guarded), tools=self._roles.shown_tools(tools), open_turn=open_turn
        )
        return guarded.encode(text)

    def _render_or_none(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Ids | None:
        try:
            return self._render(messages, tools, open_turn=False)
        except ConfigError:  # a template that wants a user message refuses a system message alone
            return None

    def _encode_inside(self, guarded: Guarded, text: str) -> Ids:
        """Ids of guarded text that stands inside a conversation. The end token goes before it while it is encoded,
        because some tokenizers treat the beginning of a text in another way."""
        if not text:
            return ids()
        anchor = self._end_token or self.tokenizer.decode([self._end_id])
        return guarded.encode(anchor + text)[1:]


def _blocks(stream: Ids, parts: Sequence[Ids | None], *, first_message: int, start: int, offset: int) -> list[Span]:
    """Spans of the messages that ``stream`` was rendered from; ``parts[n]`` renders the first n + 1 of them."""
    spans = []
    for number, part in enumerate(parts):
        end = start if part is None else max(start, common_length(stream, part))
        spans.append(Span(first_message + number, offset + start, offset + end))
        start = end
    return spans
