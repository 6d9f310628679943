"""Text of messages on its way through a chat template.

Owns: that a special token written in a message stays ordinary characters, while the template's own become ids.
"""

from __future__ import annotations

import re

from tandem.core.types import Ids, ids
from tandem.text.tokenizer import Tokenizer

_GUARD = "\U000f0000"


class Guarded:
    """Special tokens in messages become placeholders, and ordinary characters again once the template's own
    special tokens have been found. One object for one rendering."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._hidden: list[str] = []

    def escape(self, text: str) -> str:
        if _GUARD in text:
            text = text.replace(_GUARD, self._hide(_GUARD))
        for token in dict.fromkeys(self._tokenizer.find_special(text)):
            text = text.replace(token, self._hide(token))
        return text

    def escape_value(self, value: object) -> object:
        """``escape`` for all strings inside a JSON value."""
        if isinstance(value, str):
            return self.escape(value)
        if isinstance(value, dict):
            return {self.escape(str(key)): self.escape_value(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.escape_value(item) for item in value]
        return value

    def _hide(self, text: str) -> str:
        self._hidden.append(text)
        return f"{_GUARD}{len(self._hidden) - 1}{_GUARD}"

    def encode(self, text: str) -> Ids:
        """Ids of a template's text, with what was hidden as ordinary characters."""
        if not self._hidden:
            return self._tokenizer.encode(text, special=True)
        out = ids()
        for piece, special_id in self._tokenizer.split_special(text):
            if special_id is not None:
                out.append(special_id)
            else:
                shown = re.sub(f"{_GUARD}(\\d+){_GUARD}", lambda found: self._hidden[int(found.group(1))], piece)
                out += self._tokenizer.encode(shown)
        return out
