"""A tokenizer as Gemma's, made of a few pieces."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers

PIECES = ["he", "ll", "hel", "hell", "\u2581w", "or", "\u2581wor", "hello", "\u2581\u2581"]


def pieces_tokenizer(folder: Path) -> Path:
    """A tokenizer of pieces, as Gemma's: bytes for what it does not know, all ways to make a piece in its rank."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    letters = [*map(chr, range(97, 123)), "\u2581", *"THQ.,?0123456789"]
    texts = [*special, "\n", *(f"<0x{number:02X}>" for number in range(256)), *PIECES, *letters]
    vocab = {text: number for number, text in enumerate(texts)}
    cuts = [(one[:at], one[at:]) for one in PIECES for at in range(1, len(one))]
    ways = [cut for cut in cuts if vocab.keys() >= set(cut)]
    rules = tokenizers.models.BPE(vocab, ways, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend = tokenizers.Tokenizer(rules)
    backend.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    steps = tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()
    backend.decoder = tokenizers.decoders.Sequence(list(steps))
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    backend.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in special])
    backend.add_tokens([tokenizers.AddedToken("\n", normalized=False)])
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    config = names | {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
