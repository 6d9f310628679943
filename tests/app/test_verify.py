"""The checks of a recipe: they pass on sound methods, and each kind of fault is found."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from tandem.algorithms.catalog.grpo import GRPO
from tandem.algorithms.losses import LossTokens, TokenLosses, token_losses
from tandem.algorithms.spec import AlgorithmSpec
from tandem.app.verify import examine, verify
from tandem.config.load import load


def small(*words: str):
    return load(flags=["--model.path", "tiny", "--model.dtype", "float32", "--engine.threads", "1", *words])[0]


@pytest.mark.parametrize(
    "words",
    [("--algorithm.name", "gspo"), ("--algorithm.name", "dpo"),
     ("--lora.rank", "4", "--lora.dora", "true", "--model.dtype", "bfloat16")],
    ids=["gspo", "dpo", "dora in bfloat16"],
)  # fmt: skip
def test_a_sound_recipe_has_no_broken_line(words, capsys) -> None:
    assert verify(small(*words)) == 0
    shown = capsys.readouterr().out
    assert "BROKEN" not in shown and "equal bits" in shown and "2 processes" in shown and "0 broken" in shown


def without_clip(spec: AlgorithmSpec, tokens: LossTokens) -> TokenLosses:
    return token_losses(dataclasses.replace(spec, clip_low=None, clip_high=None), tokens)


def own_normaliser(spec: AlgorithmSpec, tokens: LossTokens) -> TokenLosses:
    whole = token_losses(spec, tokens)
    return dataclasses.replace(whole, loss=whole.loss / tokens.rl_shares_N.sum())


def broken(loss, num_ranks: int = 1) -> set[str]:
    spec = dataclasses.replace(GRPO, loss=f"{__file__}:{loss.__name__}")
    checks = asyncio.run(examine(small(), algorithm=spec, num_ranks=num_ranks))
    return {check.name for check in checks if not check.holds}


def test_a_clip_that_changes_nothing_is_found() -> None:
    assert {name.split(" ")[0] for name in broken(without_clip)} == {
        "algorithm.clip_low", "algorithm.clip_high", "algorithm.clip_dual",
    }  # fmt: skip


def test_a_loss_that_normalises_within_its_micro_batch_is_found() -> None:
    assert broken(own_normaliser, num_ranks=2) == {
        "gradient: micro-batches of one sample", "gradient: micro-batches of 60 tokens", "gradient: 2 processes",
    }  # fmt: skip
