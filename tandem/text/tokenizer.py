"""A model's tokenizer: text to ids, ids to text.

Owns: loading (the tokenizer library is imported here, at the first use, because it is slow), the difference
between text that may hold special tokens and text that may not, and decoding piece by piece.
Refuses: chat structure (``render``). Invariant: ids that a policy made are decoded for reading only; nothing here
turns them into text and back.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.core.errors import ConfigError, ModelError, boundary
from tandem.core.types import Ids, ids

if TYPE_CHECKING:
    import tokenizers

REPLACEMENT = "\ufffd"


def _byte_symbols() -> dict[str, int]:
    """The byte that each letter stands for in byte-level vocabularies (GPT-2's table): printable ones stand for
    themselves, the others for the letters from 256 on, in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_SYMBOLS = _byte_symbols()


class Tokenizer:
    """A thin face over a fast tokenizer. Safe to share between threads."""

    def __init__(self, loaded: Any, *, name: str, more_eos: Sequence[int] = ()) -> None:
        """``loaded`` is a fast tokenizer of the transformers library."""
        if not loaded.is_fast:
            raise ModelError(f"{name}: the tokenizer has no fast implementation (tokenizer.json)")
        self.name = name
        own = [] if loaded.eos_token_id is None else [loaded.eos_token_id]
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys([*own, *more_eos]))
        template = loaded.chat_template
        if isinstance(template, dict):  # several named templates
            template = template.get("tool_use") or template.get("default")
        self.chat_template: str | None = template or None
        self._loaded = loaded
        self._backend: tokenizers.Tokenizer = loaded.backend_tokenizer
        self._plain = _plain_copy(self._backend)
        alone, whole = (self._backend.encode("a", add_special_tokens=added).ids for added in (False, True))
        self.opening = ids(whole[: whole.index(alone[0])] if alone else [])
        """What stands before every text: the begin token of those models that were trained with one."""
        added = self._backend.get_added_tokens_decoder()
        self.special_tokens = {token.content: number for number, token in added.items() if token.special}
        self.longest_token = max(map(len, loaded.get_vocab()), default=1)  # characters
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)) if longest_first else r"(?!)")

    @property
    def library(self) -> Any:
        """The tokenizer of the transformers library behind this one."""
        return self._loaded

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included (a model may have more rows than this)."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, special: bool = False) -> Ids:
        """Ids of ``text``, nothing added. Special tokens written in the text become their ids only where
        ``special`` is true; else they are ordinary characters, so that no text can open or close a turn."""
        backend = self._backend if special else self._plain
        return ids(backend.encode(text, add_special_tokens=False).ids)

    def encode_document(self, text: str) -> Ids:
        """Ids of a text that stands by itself: as ``encode``, behind the ``opening``."""
        return self.opening + self.encode(text)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of ids, special tokens included. Bytes that are no text show as U+FFFD."""
        return self._backend.decode(list(token_ids), skip_special_tokens=False)

    def bytes_of(self, token_id: int) -> bytes:
        """What one token adds to a text, also where that is a part of a character."""
        text = self.decode([token_id])
        if REPLACEMENT not in text:
            return text.encode()
        token = self._backend.id_to_token(token_id) or ""
        if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):  # a tokenizer that falls back to bytes
            return bytes([int(token[3:5], 16)])
        if all(symbol in BYTE_SYMBOLS for symbol in token):  # one that writes all bytes as letters
            return bytes(BYTE_SYMBOLS[symbol] for symbol in token)
        return text.encode()

    def token_id(self, token: str) -> int | None:
        """The id of one token by its text."""
        return self._backend.token_to_id(token)

    def find_special(self, text: str) -> list[str]:
        """The special tokens written in ``text``, in order."""
        return self._special_pattern.findall(text)

    def split_special(self, text: str) -> list[tuple[str, int | None]]:
        """``text`` cut at its special tokens: pieces of (text, id of the special token or None)."""
        pieces: list[tuple[str, int | None]] = []
        start = 0
        for match in self._special_pattern.finditer(text):
            if match.start() > start:
                pieces.append((text[start : match.start()], None))
            pieces.append((match.group(), self.special_tokens[match.group()]))
            start = match.end()
        if start < len(text):
            pieces.append((text[start:], None))
        return pieces

    def render_chat(
        self, messages: Sequence[dict[str, object]], *, tools: Sequence[dict[str, object]] = (), open_turn: bool
    ) -> str:
        """The chat template's text of a conversation; with ``open_turn`` the assistant's next turn is begun.

        Raises:
            ConfigError: the model has no template, or its template refuses the conversation.
        """
        if self.chat_template is None:
            raise ConfigError(
                f"{self.name} has no chat template", hint="use an instruction-tuned model, or add chat_template.jinja"
            )
        with boundary(ConfigError, f"the chat template of {self.name} refuses this conversation"):
            return self._loaded.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                chat_template=self.chat_template,
                add_generation_prompt=open_turn,
                tokenize=False,
            )

    def stream(self) -> TextStream:
        """A decoder for ids that arrive one by one."""
        return TextStream(self)


class TextStream:
    """Ids in, text out, as soon as it is sure: a character whose bytes are split over tokens waits for its last
    byte. What all calls return, joined, is the text of all ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: array = ids()
        self._start = 0  # first id of the window that is decoded again
        self._done = 0  # ids whose text was given out

    def push(self, token_ids: Sequence[int]) -> str:
        """Add ids and return the text that is now certain."""
        self._ids.extend(token_ids)
        before = self._tokenizer.decode(self._ids[self._start : self._done])
        now = self._tokenizer.decode(self._ids[self._start :])
        if now.endswith(REPLACEMENT) or len(now) <= len(before):
            return ""
        # The window always begins at a token whose text was complete, so that a decoder which looks at its left
        # neighbour (leading spaces) sees the same one.
        self._start, self._done = self._done, len(self._ids)
        return now[len(before) :]

    def finish(self) -> str:
        """The text still held back."""
        before = self._tokenizer.decode(self._ids[self._start : self._done])
        now = self._tokenizer.decode(self._ids[self._start :])
        self._start = self._done = len(self._ids)
        return now[len(before) :]


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Load the tokenizer of a Hugging Face model folder.

    Raises:
        ModelError: there is none, or it has no fast implementation.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError(f"model folder not found: {folder}")
    with boundary(ModelError, f"{folder}: the tokenizer does not load"):
        if _is_generic(folder):
            from transformers import PreTrainedTokenizerFast as loader
        else:
            from transformers import AutoTokenizer as loader  # looks into the model's class: a second of imports
        loaded = loader.from_pretrained(str(folder), local_files_only=True)
    return Tokenizer(loaded, name=str(folder), more_eos=_generation_eos(folder))


def save_gguf_tokenizer(file: Path, folder: Path) -> None:
    """Write the tokenizer and chat template inside a GGUF file as Hugging Face files."""
    from transformers import AutoTokenizer

    with boundary(ModelError, f"{file}: the tokenizer inside does not load"):
        loaded = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)
        loaded.save_pretrained(str(folder))
    # The class that every version of the library has, and none of the facts about how it was loaded here.
    place = folder / "tokenizer_config.json"
    config = json.loads(place.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name in ("backend", "is_local", "local_files_only"):
        config.pop(name, None)
    place.write_text(json.dumps(config, indent=2) + "\n")


def _is_generic(folder: Path) -> bool:
    """Whether the files say everything, and no class of a model's own adds to them."""
    config = folder / "tokenizer_config.json"
    if not config.is_file() or not (folder / "tokenizer.json").is_file():
        return False
    return json.loads(config.read_text()).get("tokenizer_class") == "PreTrainedTokenizerFast"


def _generation_eos(folder: Path) -> list[int]:
    file = folder / "generation_config.json"
    if not file.is_file():
        return []
    with boundary(ModelError, f"{file} is broken"):
        eos = json.loads(file.read_text()).get("eos_token_id")
    return eos if isinstance(eos, list) else [] if eos is None else [eos]


def _plain_copy(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    copy = type(backend).from_str(backend.to_str())
    copy.encode_special_tokens = True  # the library's name for: special tokens in the text are plain text
    return copy
