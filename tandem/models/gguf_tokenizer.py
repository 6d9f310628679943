"""A tokenizer in the metadata of a GGUF file.

Owns: recognising how a tokenizer cuts text before it merges. GGUF holds no rules, only the name of rules that readers
know, so a tokenizer that cuts text in another way is refused: a file that makes other ids would be worse than none.
"""

from __future__ import annotations

import json
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
PATTERNS = {_CUT % r"\p{N}": "qwen2", _CUT % r"\p{N}{1,3}": "llama-bpe"}


def write_tokenizer(writer: GGUFWriter, folder: Path, spec: ModelSpec) -> None:
    """Write vocabulary, merges, special ids and chat template of the tokenizer in ``folder``.

    Raises:
        ModelError: no ``tokenizer.json``, or one whose rules have no name in GGUF.
    """
    file = folder / "tokenizer.json"
    with boundary(ModelError, f"{file} is not readable"):
        content = json.loads(file.read_text())
    model, added = content["model"], content.get("added_tokens", [])
    plain = content.get("normalizer") in (None, {"type": "NFC"})
    if model.get("type") != "BPE" or model.get("byte_fallback") or not plain:
        raise ModelError(f"{file}: only byte-level BPE tokenizers are written as GGUF", hint="--format hf")
    tokens = {number: (text, TokenType.NORMAL) for text, number in model["vocab"].items()}
    for token in added:
        kind = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
        tokens[token["id"]] = (token["content"], kind)
    outside = [number for number in tokens if number >= spec.vocab_size]
    if outside:
        raise ModelError(f"{file} has id {max(outside)}, the model only {spec.vocab_size} rows")
    rows = [tokens.get(number, (f"[PAD{number}]", TokenType.UNUSED)) for number in range(spec.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_cut_name(content.get("pre_tokenizer"), file))
    writer.add_token_list([text for text, _ in rows])
    writer.add_token_types([kind for _, kind in rows])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    tokenizer = load_tokenizer(folder)
    if spec.bos_id is not None:
        writer.add_bos_token_id(spec.bos_id)
    if tokenizer.eos_ids or spec.eos_ids:
        writer.add_eos_token_id((*tokenizer.eos_ids, *spec.eos_ids)[0])
    if spec.pad_id is not None:
        writer.add_pad_token_id(spec.pad_id)
    writer.add_add_bos_token(False)  # templates write what a conversation begins with
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


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
