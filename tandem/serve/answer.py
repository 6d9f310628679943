"""Token ids to the words, calls and finish reason of an answer, as they come.

Owns: stop strings that lie across tokens, text that may be the beginning of a tool call, and the true reason of the
end. Invariant: the pieces given out, joined, are the content that the finished answer has; no text is lost, none is
given out that a stop string or a call would take back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.types import FinishReason, Ids, ToolSpec, ids
from tandem.text.call_stream import CallPiece, CallStream
from tandem.text.reasoning import Reasoning, ReasoningSplit
from tandem.text.render import Renderer
from tandem.text.tails import longest_tail
from tandem.text.told_calls import ToldCall, merged
from tandem.text.tool_format import after_reasoning


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A finished answer. ``num_tokens`` of the completion belong to it: none after the one that completed a stop
    string; the first ``num_reasoning_tokens`` of them are its thoughts, the tags included."""

    content: str
    calls: tuple[ToldCall, ...]
    finish_reason: FinishReason
    num_tokens: int
    reasoning: str = ""
    num_reasoning_tokens: int = 0


class StopStrings:
    """Text in, text out, until one of ``stops`` is complete; what may be the beginning of one waits.

    Of several stops the one that is complete first counts, whatever pieces the text comes in.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    @property
    def num_held(self) -> int:
        return len(self._held)

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


class AnswerReader:
    """Reads one answer while it is made: ``push`` ids as they come, then ``finish``. Thoughts are apart: stop strings
    and calls are looked for behind them."""

    def __init__(
        self,
        renderer: Renderer,
        tools: Sequence[ToolSpec],
        stops: Sequence[str],
        *,
        one_call: bool = False,
        reasoning: Reasoning | None = None,
    ) -> None:
        """``one_call``: the answer ends with the token that completes its first call."""
        self._split = ReasoningSplit(reasoning)
        self._reasoning = self._fresh_reasoning = ""
        self._num_reasoning_tokens = 0
        self._one_call = one_call and bool(tools)
        self._called = False
        self._renderer = renderer
        self._tools = tuple(tools)
        self._stream = renderer.tokenizer.stream()
        self._stops = StopStrings(stops)
        self._ends = ids()  # end tokens at the end so far: only what follows makes them text
        self._num_characters = 0  # that the tokens so far have
        self._begins: list[int] = []  # the character at which each token begins, but for those in ``_ends``
        self._reaches: list[int] = []  # and the one behind it, for those whose last character is whole
        self._text = ""
        self._num_waiting = 0  # characters of the text that may be a call
        self._follower = renderer.format.follow(self._tools) if self._tools else CallStream()
        self._followed_from = -1  # where it began, behind any thoughts that are part of the text; -1: not yet
        self._fed = 0  # characters of the text that the follower had
        self._pieces: list[CallPiece] = []
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
            if self._split.is_thinking:
                self._num_reasoning_tokens = self._num_tokens
            self._ends.append(token_id)
            if token_id not in self._renderer.stop_token_ids:
                fresh, self._ends = self._ends, ids()
                for each in fresh:
                    self._begins.append(self._num_characters)
                    self._read(self._stream.push([each]))
                self._follow()
                if self._one_call and self._renderer.format.opening in self._text:
                    self._called = bool(self._renderer.format.parse(self._text, self._tools).calls)
        return self._give(self._certain())

    def take_calls(self) -> list[CallPiece]:
        """The pieces of calls that have become certain since the last call."""
        fresh, self._pieces = self._pieces, []
        return fresh

    def take_reasoning(self) -> str:
        """The thoughts that have become certain since the last call."""
        fresh, self._fresh_reasoning = self._fresh_reasoning, ""
        return fresh

    @property
    def places(self) -> list[int]:
        """Of each token so far, the character at which it begins; thoughts and whatever the content lacks count."""
        return self._begins + [self._num_characters] * len(self._ends)

    @property
    def num_out(self) -> int:
        """Tokens, from the first on, of whose text nothing waits."""
        waiting = self._split.num_held + self._stops.num_held + self._num_waiting
        return bisect_right(self._reaches, self._num_characters - waiting)

    def _read(self, text: str) -> None:
        self._num_characters += len(text)
        if text:
            self._reaches += [self._num_characters] * (len(self._begins) - len(self._reaches))
        self._take(*self._split.push(text))

    def _take(self, thoughts: str, answer: str) -> None:
        self._reasoning += thoughts
        self._fresh_reasoning += thoughts
        self._text += self._stops.push(answer)

    def finish(self, completion_ids: Ids, reason: FinishReason) -> tuple[str, Answer]:
        """Read what is left of the completion; returns the last words and the whole answer."""
        first = self.push(completion_ids[self._num_tokens :])
        if not self._stops.stopped:
            self._read(self._stream.finish())
            self._take(*self._split.finish())
            self._text += self._stops.finish()
        content, calls, reason = self._text, (), FinishReason.STOP if self._stops.stopped else reason
        if self._tools:
            self._follow()
            self._pieces += self._follower.finish()
            content, calls, reason = self._with_calls(reason)
        self._num_waiting = 0
        last = first + self._give(content)
        thoughts = self._num_reasoning_tokens if self._split.has_thought else 0
        return last, Answer(
            content=content,
            calls=calls,
            finish_reason=reason,
            num_tokens=self._num_tokens,
            reasoning=self._reasoning,
            num_reasoning_tokens=thoughts,
        )

    def _with_calls(self, reason: FinishReason) -> tuple[str, tuple[ToldCall, ...], FinishReason]:
        """Content, calls and reason of a whole answer where tools are on offer."""
        found = self._renderer.format.parse(self._text, self._tools)
        calls = merged(self._follower.calls, found)
        if not calls:
            return self._text.lstrip(), (), reason
        content, certain = found.content.lstrip(), self._certain()
        if not (found.calls or found.failures) or not content.startswith(certain):
            content = certain  # it reads the whole otherwise than what was told
        is_cut = not calls[-1].is_whole or bool(found.failures)
        if not any(call.is_whole for call in calls) or (is_cut and reason is FinishReason.LENGTH):
            return content, calls, reason
        return content, calls, FinishReason.TOOL_CALLS

    def _follow(self) -> None:
        """Show the follower what the text has behind thoughts that nobody split off."""
        if not self._tools:
            return
        if self._followed_from < 0:
            words, end = self._text.lstrip(), self._text.find("</think>")
            thinks = words.startswith("<think>")
            if "<think>".startswith(words) or (thinks and end < 0):
                return
            self._followed_from = self._fed = end + len("</think>") if thinks else 0
        self._pieces += self._follower.push(self._text[self._fed :])
        self._fed = len(self._text)

    def _certain(self) -> str:
        """The beginning of the content that no later token changes. Where tools are on offer, content begins with
        its first visible character, and a call takes back the blank before it."""
        if not self._tools:
            return self._text
        form, text = self._renderer.format, self._text.lstrip()
        if self._follower.calls:
            call = self._followed_from + self._follower.first - len(self._text) + len(text)
        else:
            call = text.find(form.opening, after_reasoning(text))
        certain = text[:call] if call >= 0 else text[: len(text) - longest_tail(text, [form.opening, form.lead])]
        certain = certain.rstrip().removesuffix(form.lead).rstrip()
        self._num_waiting = len(text) - len(certain)
        if self._follower.calls:
            self._num_waiting = len(self._text) - self._followed_from - self._follower.num_out
        return certain

    def _give(self, content: str) -> str:
        fresh = content[self._given :]
        self._given = max(self._given, len(content))
        return fresh
