"""A tokenizer in the metadata of a GGUF file.

Owns: recognising how a tokenizer cuts text before it merges. GGUF holds no rules, only the name of rules that readers
know, so a tokenizer that cuts text in another way is refused: a file that makes other ids would be worse than none.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType

from tandem.core.errors import ModelError, boundary
from tandem.models.spec import ModelSpec
from tandem.text.tokenizer import load_tokenizer

# The cut of each model whose name readers know, as its authors' tokenizer.json spells it.
_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
NO_SCORE = -1000.0  # of tokens that text never merges to
Rows = list[tuple[str, TokenType]]
Merges = list[tuple[str, ...]]
PATTERNS = {_CUT % r"\p{N}": "qwen2", _CUT % r"\p{N}{1,3}": "llama-bpe"}


def write_tokenizer(writer: GGUFWriter, folder: Path, spec: ModelSpec) -> None:
    """Write vocabulary, merges or scores, special ids and chat template of the tokenizer in ``folder``.

    Raises:
        ModelError: no ``tokenizer.json``, or one whose rules have no name in GGUF.
    """
    file = folder / "tokenizer.json"
    with boundary(ModelError, f"{file} is not readable"):
        content = json.loads(file.read_text())
    model, added = content["model"], content.get("added_tokens", [])
    if model.get("type") != "BPE":
        raise ModelError(f"{file}: only BPE tokenizers are written as GGUF", hint="--format hf")
    tokens = {number: (text, TokenType.NORMAL) for text, number in model["vocab"].items()}
    for token in added:
        kind = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
        tokens[token["id"]] = (token["content"], kind)
    outside = [number for number in tokens if number >= spec.vocab_size]
    if outside:
        raise ModelError(f"{file} has id {max(outside)}, the model only {spec.vocab_size} rows")
    rows = [tokens.get(number, (f"[PAD{number}]", TokenType.UNUSED)) for number in range(spec.vocab_size)]
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
    if model.get("byte_fallback"):
        _write_pieces(writer, rows, merges, content, file)
    else:
        _write_byte_level(writer, rows, merges, content, file)
    tokenizer = load_tokenizer(folder)
    begin = tokenizer.opening[0] if tokenizer.opening else spec.bos_id
    if begin is not None:
        writer.add_bos_token_id(begin)
    ends = list(dict.fromkeys((*tokenizer.eos_ids, *spec.eos_ids)))
    for end, add in zip(ends, (writer.add_eos_token_id, writer.add_eot_token_id), strict=False):
        add(end)
    if spec.pad_id is not None:
        writer.add_pad_token_id(spec.pad_id)
    # Of texts that stand by themselves; templates write what a conversation begins with.
    writer.add_add_bos_token(bool(tokenizer.opening))
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


def _write_byte_level(writer: GGUFWriter, rows: Rows, merges: Merges, content: dict[str, Any], file: Path) -> None:
    """Text is cut by rules, and bytes merge in the order of the list."""
    if content.get("normalizer") not in (None, {"type": "NFC"}):
        raise ModelError(f"{file}: a tokenizer that rewrites text has no name in GGUF", hint="--format hf")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_cut_name(content.get("pre_tokenizer"), file))
    writer.add_token_list([text for text, _ in rows])
    writer.add_token_types([kind for _, kind in rows])
    writer.add_token_merges([" ".join(merge) for merge in merges])


def _write_pieces(writer: GGUFWriter, rows: Rows, merges: Merges, content: dict[str, Any], file: Path) -> None:
    """SentencePiece's form: characters of uncut text merge to the neighbouring pair of the highest score, whichever way
    a piece can be put together. A list of merges says that where it has all ways, piece after piece."""
    cut = content.get("pre_tokenizer")
    if content.get("normalizer") != SPACES or not (cut is None or cut.get("pattern") == {"String": " "}):
        raise ModelError(f"{file}: only pieces of uncut text have a name in GGUF", hint="--format hf")
    ranks: dict[str, int] = {}
    before = ""
    for left, right in merges:
        piece = left + right
        if piece != before and piece in ranks:
            raise ModelError(f"{file}: merges to {piece!r} have several ranks, GGUF holds one", hint="--format hf")
        ranks.setdefault(piece, len(ranks))
        before = piece
    known = {text for text, _ in rows}
    ways = sum(piece[:at] in known and piece[at:] in known for piece in ranks for at in range(1, len(piece)))
    if ways != len(merges):
        raise ModelError(f"{file}: {ways - len(merges)} ways to make a piece are not merges", hint="--format hf")
    kinds = [
        TokenType.BYTE if kind is TokenType.NORMAL and BYTE.fullmatch(text) else kind for text, kind in rows
    ]
    scores = [
        float(-ranks.get(text, len(ranks) + number)) if kind is TokenType.NORMAL else NO_SCORE
        for number, ((text, _), kind) in enumerate(zip(rows, kinds, strict=True))
    ]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([text for text, _ in rows])
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_add_space_prefix(False)
    unknown = content["model"].get("unk_token")
    if unknown is not None:
        writer.add_unk_token_id([text for text, _ in rows].index(unknown))


def _cut_name(rules: dict[str, Any] | None, file: Path) -> str:
    steps = rules.get("pretokenizers", []) if rules and rules.get("type") == "Sequence" else [rules or {}]
    if steps and steps[-1].get("type") == "ByteLevel" and not steps[-1].get("add_prefix_space"):
        by_regex, before = steps[-1].get("use_regex", True), steps[:-1]
        if by_regex and not before:
            return "gpt-2"
        if by_regex and before == [{"type": "Digits", "individual_digits": True}]:
            return "smollm"
        if not by_regex and len(before) == 1 and before[0].get("type") == "Split" and not before[0].get("invert"):
            name = PATTERNS.get(before[0].get("pattern", {}).get("Regex", ""))
            if name and before[0].get("behavior") == "Isolated":
                return name
    raise ModelError(
        f"{file}: how this tokenizer cuts text has no name in GGUF",
        hint=f"known: gpt-2, smollm, {', '.join(PATTERNS.values())}; or --format hf",
    )
