"""Text to ids and back, whole and in pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
from conversations import tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.errors import ModelError
from tandem.text.tokenizer import load_tokenizer

TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40)


@given(TEXTS)
@settings(max_examples=100, deadline=None)
def test_every_text_comes_back(text: str):
    assert tokenizer().decode(tokenizer().encode(text)) == text


@given(TEXTS, st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_streamed_text_is_the_whole_text(text: str, step: int):
    token_ids = tokenizer().encode(text)
    stream = tokenizer().stream()
    parts = [stream.push(token_ids[at : at + step]) for at in range(0, len(token_ids), step)]
    assert "".join(parts) + stream.finish() == text


def test_a_split_character_waits_for_its_last_byte():
    token_ids = tokenizer().encode("世")
    assert len(token_ids) == 3
    stream = tokenizer().stream()
    assert [stream.push([token]) for token in token_ids] == ["", "", "世"]
    cut = tokenizer().stream()
    assert cut.push(token_ids[:2]) == ""
    assert cut.finish() == "\ufffd"


def test_special_tokens_are_ids_only_where_asked():
    end = tokenizer().token_id("<|im_end|>")
    assert list(tokenizer().encode("<|im_end|>", special=True)) == [end]
    assert end not in tokenizer().encode("<|im_end|>")
    assert tokenizer().decode(tokenizer().encode("<|im_end|>")) == "<|im_end|>"
    assert tokenizer().split_special("a<|im_end|>b") == [("a", None), ("<|im_end|>", end), ("b", None)]


def test_missing_and_broken_folders_are_model_errors(tmp_path: Path):
    with pytest.raises(ModelError, match="model folder not found"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="the tokenizer does not load"):
        load_tokenizer(tmp_path)
