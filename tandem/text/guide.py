"""Guided decoding: which tokens may come next, so that an answer fits a JSON schema or a regular expression.

The grammars are those of the ``llguidance`` library. Owns: making a guide for one answer. Refuses: sampling.
Invariant: only the model's end tokens may follow a whole answer, and nothing that the grammar cannot go on from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property

import llguidance
import llguidance.hf
import llguidance.numpy
import numpy as np

from tandem.core.errors import ConfigError
from tandem.text.tokenizer import Tokenizer


class Guide:
    """One answer on its way through a grammar (``core.protocols.TokenGuide``)."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, ends: Sequence[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ends = list(ends)
        self._mask = llguidance.numpy.allocate_token_bitmask(1, vocab_size)

    def allowed(self) -> np.ndarray:
        """A bool for each token id."""
        if not self._matcher.is_stopped():
            llguidance.numpy.fill_next_token_bitmask(self._matcher, self._mask)
            flags = np.unpackbits(self._mask.view(np.uint8), bitorder="little")[: self._vocab_size].astype(bool)
            if flags.any():
                return flags
        flags = np.zeros(self._vocab_size, bool)  # the answer is whole, or the grammar gave up: it ends here
        flags[self._ends] = True
        return flags

    def advance(self, token_id: int) -> None:
        if not self._matcher.is_stopped() and token_id not in self._ends:
            self._matcher.consume_token(token_id)


class Guides:
    """Makes guides for one tokenizer; ``ends`` are the ids that end an answer."""

    def __init__(self, tokenizer: Tokenizer, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ends = tuple(ends)

    def json_schema(self, schema: Mapping[str, object]) -> Guide:
        """Raises ConfigError: the schema is broken, or says what the library does not know."""
        return self._guide(lambda: llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema)), "JSON schema")

    def json_object(self) -> Guide:
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def regex(self, pattern: str) -> Guide:
        """The whole answer matches ``pattern``. Raises ConfigError: it is no regular expression, or uses look-around
        or back references."""
        return self._guide(lambda: llguidance.LLMatcher.grammar_from_regex(pattern), "regular expression")

    def lark(self, grammar: str) -> Guide:
        """The whole answer fits a grammar in the library's form of Lark. Raises ConfigError: it is none."""
        return self._guide(lambda: llguidance.LLMatcher.grammar_from_lark(grammar), "grammar")

    def _guide(self, grammar, what: str) -> Guide:
        try:
            made = grammar()
            problem = llguidance.LLMatcher.validate_grammar(made, self._vocabulary)
        except (ValueError, TypeError) as error:
            problem = str(error)
            made = ""
        if problem:
            raise ConfigError(f"the {what} cannot be followed: {problem.splitlines()[0][:300]}")
        matcher = llguidance.LLMatcher(self._vocabulary, made)
        return Guide(matcher, self._tokenizer.vocab_size, self._ends)

    @cached_property
    def _vocabulary(self) -> llguidance.LLTokenizer:
        """Takes a second for a large vocabulary, so it is made at first use."""
        return llguidance.hf.from_tokenizer(
            self._tokenizer.library, n_vocab=self._tokenizer.vocab_size, eos_token=list(self._ends)
        )
