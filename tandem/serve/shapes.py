"""How replies look: chat completions and text completions, streamed and whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tandem.core.types import FinishReason, Ids, Top, ids
from tandem.serve.generation import Made, envelope
from tandem.serve.parts import Part, Scored
from tandem.serve.requests import Asked
from tandem.text.call_stream import CallPiece
from tandem.text.tokenizer import Tokenizer

NOTHING = Part(token_ids=ids(), logprobs=(), tops=(), places=())


class ChatShape:
    """``chat.completion`` and its chunks."""

    def __init__(self, asked: Asked, tokenizer: Tokenizer, prompt: Ids) -> None:
        self._asked, self._tokenizer, self._prompt = asked, tokenizer, prompt
        self._base = envelope("chat.completion", "chatcmpl", asked.model)
        self._opened: set[int] = set()
        self._num_calls: dict[int, int] = {}  # told so far, by choice

    @property
    def id(self) -> str:
        return str(self._base["id"])

    def opening(self, index: int, scored: Scored | None) -> None:
        """The role comes with the first content, as one chunk."""

    def words(self, index: int, text: str, part: Part) -> object:
        return self._chunk(index, {"content": text}, part)

    def thoughts(self, index: int, text: str, part: Part) -> object:
        return self._chunk(index, {"reasoning_content": text}, part)

    def call(self, index: int, piece: CallPiece, part: Part) -> object:
        if piece.name:
            self._num_calls[index] = piece.index + 1
            delta = {"index": piece.index} | self._call(index, piece.index, piece.name, "")
        else:
            delta = {"index": piece.index, "function": {"arguments": piece.arguments}}
        return self._chunk(index, {"tool_calls": [delta]}, part)

    def ending(self, made: Made, part: Part) -> list[object]:
        """With the calls that only the whole text told."""
        told = self._num_calls.get(made.index, 0)
        late = [{"index": told + place} | call for place, call in enumerate(self._calls(made)[told:])]
        chunks = [self._chunk(made.index, {"tool_calls": late}, NOTHING)] if late else []
        return [*chunks, self._chunk(made.index, {}, part, made.answer.finish_reason)]

    def usage(self, usage: dict[str, object]) -> object:
        return self._base | {"object": "chat.completion.chunk", "choices": [], "usage": usage}

    def whole(self, choices: Sequence[Made], usage: dict[str, object]) -> object:
        extra = {"prompt_token_ids": self._prompt.tolist()} if self._asked.token_ids else {}
        return self._base | {"choices": [self._whole(made) for made in choices], "usage": usage} | extra

    def _calls(self, made: Made) -> list[dict[str, object]]:
        calls = enumerate(made.answer.calls)
        return [self._call(made.index, number, told.call.name, told.text) for number, told in calls]

    def _call(self, index: int, number: int, name: str, arguments: str) -> dict[str, object]:
        """Its id is the same streamed and whole."""
        call_id = f"call_{self.id[-12:]}_{index}_{number}"
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _chunk(
        self, index: int, delta: dict[str, object], part: Part, finish_reason: FinishReason | None = None
    ) -> object:
        first = not self._opened
        if index not in self._opened:
            self._opened.add(index)
            delta = {"role": "assistant"} | delta
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason and finish_reason.value}
        chunk = self._base | {"object": "chat.completion.chunk", "choices": [choice | self._tokens(part)]}
        return chunk | ({"prompt_token_ids": self._prompt.tolist()} if first and self._asked.token_ids else {})

    def _whole(self, made: Made) -> object:
        answer = made.answer
        message: dict[str, object] = {"role": "assistant", "content": answer.content}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message |= {"content": answer.content or None, "tool_calls": self._calls(made)}
        choice = {"index": made.index, "message": message, "finish_reason": answer.finish_reason.value}
        return choice | self._tokens(made.part)

    def _tokens(self, part: Part) -> dict[str, object]:
        told: dict[str, object] = {"logprobs": None}
        if self._asked.logprobs:
            entries = zip(part.token_ids, part.logprobs, part.tops, strict=True)
            told["logprobs"] = {"content": [self._logprob(*entry) for entry in entries]}
        if self._asked.token_ids:
            told["token_ids"] = part.token_ids.tolist()
        return told

    def _logprob(self, token_id: int, logprob: float | None, top: Top | None) -> dict[str, object]:
        pairs = zip(top.token_ids, top.logprobs, strict=True) if top is not None else ()
        return self._entry(token_id, logprob) | {"top_logprobs": [self._entry(*pair) for pair in pairs]}

    def _entry(self, token_id: int, logprob: float | None) -> dict[str, object]:
        text = self._tokenizer.decode([token_id])
        return {"token": text, "logprob": logprob, "bytes": list(self._tokenizer.bytes_of(token_id))}


class TextShape:
    """``text_completion`` and its chunks. ``echoes``: the prompts' texts, written before the answers; else empty."""

    def __init__(self, asked: Asked, tokenizer: Tokenizer, prompts: Sequence[Ids], echoes: Sequence[str]) -> None:
        self._asked, self._tokenizer, self._prompts, self._echoes = asked, tokenizer, prompts, echoes
        self._base = envelope("text_completion", "cmpl", asked.model)
        self._opened: set[int] = set()

    @property
    def id(self) -> str:
        return str(self._base["id"])

    def opening(self, index: int, scored: Scored | None) -> object | None:
        if not (echo := self._echo(index)):
            return None
        return self._chunk(index, echo, NOTHING, echoed=self._echoed(index, scored))

    def words(self, index: int, text: str, part: Part) -> object:
        return self._chunk(index, text, self._moved(index, part))

    def thoughts(self, index: int, text: str, part: Part) -> object:
        raise AssertionError("a text is not split")

    def call(self, index: int, piece: CallPiece, part: Part) -> object:
        raise AssertionError("a text has no calls")

    def ending(self, made: Made, part: Part) -> list[object]:
        return [self._chunk(made.index, "", self._moved(made.index, part), made.answer.finish_reason)]

    def usage(self, usage: dict[str, object]) -> object:
        return self._base | {"choices": [], "usage": usage}

    def whole(self, choices: Sequence[Made], usage: dict[str, object]) -> object:
        return self._base | {"choices": [self._whole(made) for made in choices], "usage": usage}

    def _whole(self, made: Made) -> object:
        index, answer = made.index, made.answer
        text, part, echoed = answer.content, self._moved(index, made.part), self._echoed(index, made.completion)
        choice = self._choice(index, self._echo(index) + text, part, answer.finish_reason, echoed)
        return choice | self._prompt(index)

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._asked.num_choices] if self._echoes else ""

    def _prompt(self, index: int) -> dict[str, object]:
        if not self._asked.token_ids:
            return {}
        return {"prompt_token_ids": self._prompts[index // self._asked.num_choices].tolist()}

    def _moved(self, index: int, part: Part) -> Part:
        """The tokens of an answer behind its echo."""
        start = len(self._echo(index))
        return replace(part, places=[start + place for place in part.places])

    def _echoed(self, index: int, scored: Scored | None) -> Part:
        """The echoed tokens; nothing predicts the first one."""
        if not self._echoes or scored is None or scored.prompt_logprobs is None:
            return NOTHING
        prompt = self._prompts[index // self._asked.num_choices]
        stream, places, end = self._tokenizer.stream(), [], 0
        for token_id in prompt:
            places.append(end)
            end += len(stream.push([token_id]))
        # A begin token that the tokenizer put before the text is no part of it.
        start = len(self._echo(index)) - end - len(stream.finish())
        return Part(
            token_ids=prompt,
            logprobs=[None, *scored.prompt_logprobs],
            tops=[None, *(scored.prompt_tops or [None] * (len(prompt) - 1))],
            places=[max(start + place, 0) for place in places],
        )

    def _chunk(
        self,
        index: int,
        text: str,
        part: Part,
        finish_reason: FinishReason | None = None,
        echoed: Part = NOTHING,
    ) -> object:
        first = index not in self._opened
        self._opened.add(index)
        choice = self._choice(index, text, part, finish_reason, echoed)
        return self._base | {"choices": [choice | (self._prompt(index) if first else {})]}

    def _choice(
        self, index: int, text: str, part: Part, finish_reason: FinishReason | None, echoed: Part
    ) -> dict[str, object]:
        choice: dict[str, object] = {"index": index, "text": text, "logprobs": None}
        choice["finish_reason"] = finish_reason and finish_reason.value
        if self._asked.logprobs:
            choice["logprobs"] = self._logprobs(part.behind(echoed))
        if self._asked.token_ids:
            choice["token_ids"] = part.token_ids.tolist()
        return choice

    def _logprobs(self, part: Part) -> dict[str, object]:
        """The older schema: parallel lists; offsets are characters from the beginning of the choice's text."""
        return {
            "tokens": [self._tokenizer.decode([token_id]) for token_id in part.token_ids],
            "token_logprobs": list(part.logprobs),
            "top_logprobs": [self._top(top) for top in part.tops] if self._asked.params.top_logprobs else None,
            "text_offset": list(part.places),
        }

    def _top(self, top: Top | None) -> dict[str, float] | None:
        if top is None:
            return None
        pairs = zip(top.token_ids, top.logprobs, strict=True)
        return {self._tokenizer.decode([token_id]): value for token_id, value in pairs}
