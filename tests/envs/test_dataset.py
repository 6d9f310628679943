"""Rows to streams: what is learned, and why a row is not."""

from __future__ import annotations

import json

import pytest

from tandem.config.sections.data import DataSection
from tandem.core.errors import ConfigError
from tandem.envs.dataset import Source, find_source, load_dataset, try_first_row
from tandem.models.builtin import resolve_model
from tandem.text.render import Renderer
from tandem.text.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(load_tokenizer(resolve_model("tiny")), "auto")


def load(rows, renderer, tmp_path, *, pairs: bool = False, max_tokens: int = 64, **section):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return load_dataset(DataSection(**section), Source(file), renderer, pairs=pairs, max_tokens=max_tokens)


def learned(stream, renderer) -> str:
    tokens, flags = stream
    assert len(tokens) == len(flags)
    return renderer.tokenizer.decode([token for token, flag in zip(tokens, flags, strict=True) if flag])


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_the_answers_are_learned(renderer, tmp_path) -> None:
    chat = [said("user", "q"), said("assistant", "one"), said("user", "r"), said("assistant", "two")]
    rows = [{"messages": chat}, {"prompt": "q", "completion": "three"}, {"prompt": chat[:3], "completion": "four"}]
    (whole,), (short,), (last,) = load(rows, renderer, tmp_path).streams
    assert "one" in learned(whole, renderer) and "two" in learned(whole, renderer)
    assert "three" in learned(short, renderer) and "q" not in learned(short, renderer)
    assert "four" in learned(last, renderer) and "one" not in learned(last, renderer)


def test_plain_text_is_learned_up_to_its_end_token(renderer, tmp_path) -> None:
    ((tokens, flags),) = load([{"text": "some words"}], renderer, tmp_path).streams[0]
    assert list(flags) == [0] + [1] * (len(tokens) - 1) and tokens[-1] == renderer.tokenizer.eos_ids[0]


def test_pairs_stand_after_the_same_prompt(renderer, tmp_path) -> None:
    prompt = [said("user", "q")]
    rows = [
        {"prompt": "q", "chosen": "yes", "rejected": "no"},
        {"chosen": [*prompt, said("assistant", "yes")], "rejected": [*prompt, said("assistant", "no")]},
        {"prompt": prompt, "chosen": [*prompt, said("assistant", "yes")], "rejected": [said("assistant", "no")]},
    ]
    pairs = load(rows, renderer, tmp_path, pairs=True).streams
    assert pairs[0] == pairs[1] == pairs[2]
    better, worse = pairs[0]
    assert "yes" in learned(better, renderer) and "no" in learned(worse, renderer)


def test_every_dropped_row_is_counted_with_its_reason(renderer, tmp_path) -> None:
    rows = [
        {"prompt": "q", "completion": "a"}, {"prompt": "q" * 500, "completion": "a"},
        {"prompt": "q", "completion": " "},
        {"other": 1}, {"messages": [said("user", "q")]}, {"messages": 3}, {"messages": [said("nobody", "q")]},
    ]  # fmt: skip
    loaded = load(rows, renderer, tmp_path)
    assert (loaded.num_rows, len(loaded.streams), loaded.dropped.total()) == (7, 1, 6)
    assert set(loaded.dropped) == {
        "too long", "empty answer", "no column to learn from", "does not end with an answer",
        "neither text nor messages", "a message without role or text",
    }  # fmt: skip
    same = [{"prompt": "q", "chosen": "a", "rejected": "a"}, {"prompt": "q", "chosen": "a", "rejected": "b"}]
    assert load(same, renderer, tmp_path, pairs=True).dropped == {"both answers alike": 1}


def test_columns_and_the_loader_hook_reach_other_shapes(renderer, tmp_path) -> None:
    hook = tmp_path / "hook.py"
    hook.write_text(
        "def change(row):\n    return None if row['n'] > 1 else {'question': str(row['n']), 'gold': 'x'}\n"
        "def broken(row):\n    return row['nothing']\n"
    )
    columns = {"prompt": "question", "completion": "gold"}
    rows = [{"n": 1}, {"n": 2}]
    loaded = load(rows, renderer, tmp_path, columns=columns, loader=f"{hook}:change")
    assert len(loaded.streams) == 1 and loaded.dropped == {"refused by the loader": 1}
    with pytest.raises(ConfigError, match=r"broken failed on a row with columns n"):
        try_first_row(DataSection(loader=f"{hook}:broken"), Source(tmp_path / "rows.jsonl"))


def test_nothing_left_tells_the_columns_there_are(renderer, tmp_path) -> None:
    with pytest.raises(ConfigError, match="none of 1 rows") as caught:
        load([{"question": "q"}], renderer, tmp_path)
    assert "question" in caught.value.hint
    with pytest.raises(ConfigError, match="no column of ours"):
        load([{"text": "q"}], renderer, tmp_path, columns={"answer": "x"})


def test_a_subset_and_its_splits_are_found(tmp_path) -> None:
    for folder in ("main", "other"):
        (tmp_path / folder).mkdir()
        for split in ("train", "test"):
            (tmp_path / folder / f"{split}-00000-of-00001.jsonl").write_text(json.dumps({"text": f"{folder} {split}"}))
    chosen = DataSection(subset="main")
    assert list(find_source(chosen, str(tmp_path), "").rows()) == [{"text": "main train"}]
    assert list(find_source(chosen, str(tmp_path), "test").rows()) == [{"text": "main test"}]
    with pytest.raises(ConfigError, match="several data sets: main, other"):
        find_source(DataSection(), str(tmp_path), "")
