"""Token ids to the words, calls and finish reason of an answer, as they come.

Owns: stop strings that lie across tokens, text that may be the beginning of a tool call, and the true reason of the
end. Invariant: the pieces given out, joined, are the content that the finished answer has; no text is lost, none is
given out that a stop string or a call would take back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.types import FinishReason, Ids, ToolCall, ToolSpec, ids
from tandem.text.render import Renderer
from tandem.text.tool_format import after_reasoning


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A finished answer. ``num_tokens`` of the completion belong to it: none after the one that completed a stop
    string."""

    content: str
    calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    num_tokens: int


class StopStrings:
    """Text in, text out, until one of ``stops`` is complete; what may be the beginning of one waits.

    Of several stops the one that is complete first counts, whatever pieces the text comes in.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        kept = longest_tail(text, self._stops)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def finish(self) -> str:
        """The text that waited, when no stop string came."""
        held, self._held = self._held, ""
        return held


def longest_tail(text: str, words: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that is a beginning, but not the whole, of one of ``words``."""
    longest = max((len(word) for word in words), default=0) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(word.startswith(text[-length:]) for word in words if len(word) > length):
            return length
    return 0


class AnswerReader:
    """Reads one answer while it is made: ``push`` ids as they come, then ``finish``."""

    def __init__(
        self, renderer: Renderer, tools: Sequence[ToolSpec], stops: Sequence[str], *, one_call: bool = False
    ) -> None:
        """``one_call``: the answer ends with the token that completes its first call."""
        self._one_call = one_call and bool(tools)
        self._called = False
        self._renderer = renderer
        self._tools = tuple(tools)
        self._stream = renderer.tokenizer.stream()
        self._stops = StopStrings(stops)
        self._ends = ids()  # end tokens at the end so far: only what follows makes them text
        self._text = ""
        self._given = 0  # characters of the content that were given out
        self._num_tokens = 0

    @property
    def stopped(self) -> bool:
        """A stop string, or the one call, is complete: nothing that follows belongs to the answer."""
        return self._stops.stopped or self._called

    def push(self, token_ids: Sequence[int]) -> str:
        """Read more ids; returns the words that are now certain."""
        for token_id in token_ids:
            if self.stopped:
                break
            self._num_tokens += 1
            self._ends.append(token_id)
            if token_id not in self._renderer.stop_token_ids:
                fresh, self._ends = self._ends, ids()
                self._text += self._stops.push(self._stream.push(fresh))
                if self._one_call and self._renderer.format.opening in self._text:
                    self._called = bool(self._renderer.format.parse(self._text, self._tools).calls)
        return self._give(self._certain())

    def finish(self, completion_ids: Ids, reason: FinishReason) -> tuple[str, Answer]:
        """Read what is left of the completion; returns the last words and the whole answer."""
        first = self.push(completion_ids[self._num_tokens :])
        if not self._stops.stopped:
            self._text += self._stops.push(self._stream.finish()) + self._stops.finish()
        content, calls, reason = self._text, (), FinishReason.STOP if self._stops.stopped else reason
        if self._tools:
            found = self._renderer.format.parse(self._text, self._tools)
            if found.calls:
                content, calls = found.content, found.calls
                cut = reason is FinishReason.LENGTH and bool(found.failures)
                reason = reason if cut else FinishReason.TOOL_CALLS
            content = content.lstrip()
        last = first + self._give(content)
        return last, Answer(content=content, calls=calls, finish_reason=reason, num_tokens=self._num_tokens)

    def _certain(self) -> str:
        """The beginning of the content that no later token changes. Where tools are on offer, content begins with
        its first visible character, and a call takes back the blank before it."""
        if not self._tools:
            return self._text
        text, opening = self._text.lstrip(), self._renderer.format.opening
        call = text.find(opening, after_reasoning(text))
        certain = call if call >= 0 else len(text) - longest_tail(text, [opening])
        return text[:certain].rstrip()

    def _give(self, content: str) -> str:
        fresh = content[self._given :]
        self._given = max(self._given, len(content))
        return fresh
