"""The tiny model's vocabulary."""

from __future__ import annotations

from pathlib import Path

from conversations import tokenizer

from tandem.text.tiny_tokenizer import write_tiny_tokenizer


def test_it_is_the_same_every_time(tmp_path: Path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_tiny_tokenizer(tmp_path / name, vocab_size=400)
    one, two = (sorted((tmp_path / name).iterdir()) for name in ("one", "two"))
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]


def test_digits_stand_alone_and_common_words_are_whole():
    pieces = [tokenizer().decode([token]) for token in tokenizer().encode("Answer: 1234")]
    assert pieces == ["Answer", ":", " ", "1", "2", "3", "4"]
