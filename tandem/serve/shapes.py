"""How replies look: chat completions and text completions, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tandem.core.types import Ids, Top
from tandem.serve.answer import Answer
from tandem.serve.generation import Made, envelope
from tandem.serve.requests import Asked
from tandem.text.tokenizer import Tokenizer


class ChatShape:
    """``chat.completion`` and its chunks."""

    def __init__(self, asked: Asked, tokenizer: Tokenizer, prompt: Ids) -> None:
        self._asked, self._tokenizer, self._prompt = asked, tokenizer, prompt
        self._base = envelope("chat.completion", "chatcmpl", asked.model)
        self._opened: set[int] = set()

    @property
    def id(self) -> str:
        return str(self._base["id"])

    def opening(self, index: int) -> None:
        """The role comes with the first content, as one chunk."""

    def words(self, index: int, text: str) -> object:
        return self._chunk(index, {"content": text})

    def ending(self, made: Made) -> list[object]:
        calls = self.calls(made.index, made.answer, numbered=True)
        chunks = [self._chunk(made.index, {"tool_calls": calls})] if calls else []
        return [*chunks, self._chunk(made.index, {}, self._end(made))]

    def usage(self, usage: dict[str, object]) -> object:
        return self._base | {"object": "chat.completion.chunk", "choices": [], "usage": usage}

    def whole(self, choices: Sequence[Made], usage: dict[str, object]) -> object:
        extra = {"prompt_token_ids": self._prompt.tolist()} if self._asked.token_ids else {}
        return self._base | {"choices": [self._whole(made) for made in choices], "usage": usage} | extra

    def calls(self, index: int, answer: Answer, *, numbered: bool = False) -> list[dict[str, object]]:
        """The calls of an answer; their ids are the same streamed and whole."""
        stem = f"call_{self.id[-12:]}_{index}"
        calls: list[dict[str, object]] = []
        for number, call in enumerate(answer.calls):
            function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
            made: dict[str, object] = {"id": f"{stem}_{number}", "type": "function", "function": function}
            calls.append({"index": number} | made if numbered else made)
        return calls

    def _chunk(self, index: int, delta: dict[str, object], ending: dict[str, object] | None = None) -> object:
        if index not in self._opened:
            self._opened.add(index)
            delta = {"role": "assistant"} | delta
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | (ending or {})
        return self._base | {"object": "chat.completion.chunk", "choices": [choice]}

    def _whole(self, made: Made) -> object:
        answer = made.answer
        message: dict[str, object] = {"role": "assistant", "content": answer.content}
        if answer.calls:
            message |= {"content": answer.content or None, "tool_calls": self.calls(made.index, answer)}
        return {"index": made.index, "message": message} | self._end(made)

    def _end(self, made: Made) -> dict[str, object]:
        ending: dict[str, object] = {"finish_reason": made.answer.finish_reason.value, "logprobs": None}
        if self._asked.logprobs:
            count = made.answer.num_tokens
            tops = made.completion.tops[:count] if made.completion.tops is not None else [None] * count
            entries = zip(made.token_ids, made.completion.logprobs[:count], tops, strict=True)
            ending["logprobs"] = {"content": [self._logprob(*entry) for entry in entries]}
        if self._asked.token_ids:
            ending["token_ids"] = made.token_ids.tolist()
        return ending

    def _logprob(self, token_id: int, logprob: float, top: Top | None) -> dict[str, object]:
        pairs = zip(top.token_ids, top.logprobs, strict=True) if top is not None else ()
        return self._entry(token_id, logprob) | {"top_logprobs": [self._entry(*pair) for pair in pairs]}

    def _entry(self, token_id: int, logprob: float) -> dict[str, object]:
        text = self._tokenizer.decode([token_id])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class TextShape:
    """``text_completion`` and its chunks. ``echoes``: the prompts' texts, written before the answers; else empty."""

    def __init__(self, asked: Asked, tokenizer: Tokenizer, prompts: Sequence[Ids], echoes: Sequence[str]) -> None:
        self._asked, self._tokenizer, self._prompts, self._echoes = asked, tokenizer, prompts, echoes
        self._base = envelope("text_completion", "cmpl", asked.model)

    @property
    def id(self) -> str:
        return str(self._base["id"])

    def opening(self, index: int) -> object | None:
        echo = self._echo(index)
        return self.words(index, echo) if echo else None

    def words(self, index: int, text: str) -> object:
        return self._base | {"choices": [self._choice(index, text)]}

    def ending(self, made: Made) -> list[object]:
        return [self._base | {"choices": [self._choice(made.index, "", made, offset=len(made.answer.content))]}]

    def usage(self, usage: dict[str, object]) -> object:
        return self._base | {"choices": [], "usage": usage}

    def whole(self, choices: Sequence[Made], usage: dict[str, object]) -> object:
        made = [self._choice(one.index, self._echo(one.index) + one.answer.content, one) for one in choices]
        return self._base | {"choices": made, "usage": usage}

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._asked.num_choices] if self._echoes else ""

    def _choice(self, index: int, text: str, made: Made | None = None, *, offset: int = 0) -> dict[str, object]:
        choice: dict[str, object] = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        if made is None:
            return choice
        choice["finish_reason"] = made.answer.finish_reason.value
        if self._asked.logprobs:
            choice["logprobs"] = self._logprobs(made, index)
        if self._asked.token_ids:
            prompt = self._prompts[index // self._asked.num_choices]
            choice |= {"token_ids": made.token_ids.tolist(), "prompt_token_ids": prompt.tolist()}
        return choice

    def _logprobs(self, made: Made, index: int) -> dict[str, object]:
        """The older schema: parallel lists; offsets are characters from the beginning of the choice's text. With echo
        the prompt's tokens come first, and nothing predicts its first one."""
        count, completion = made.answer.num_tokens, made.completion
        token_ids, values = list(made.token_ids), list[float | None](completion.logprobs[:count])
        tops: list[Top | None] = list(completion.tops[:count]) if completion.tops is not None else [None] * count
        if self._echoes and completion.prompt_logprobs is not None:
            prompt = self._prompts[index // self._asked.num_choices]
            token_ids, values = [*prompt, *token_ids], [None, *completion.prompt_logprobs, *values]
            tops = [None, *(completion.prompt_tops or [None] * (len(prompt) - 1)), *tops]
        tokens, offsets, start = [], [], 0
        for token_id in token_ids:
            text = self._tokenizer.decode([token_id])
            tokens.append(text)
            offsets.append(start)
            start += len(text)
        wanted = self._asked.params.top_logprobs > 0
        shown = [self._top(top) for top in tops] if wanted else None
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": shown, "text_offset": offsets}

    def _top(self, top: Top | None) -> dict[str, float] | None:
        if top is None:
            return None
        pairs = zip(top.token_ids, top.logprobs, strict=True)
        return {self._tokenizer.decode([token_id]): value for token_id, value in pairs}
