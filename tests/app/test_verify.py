"""The checks of a recipe: they pass on sound methods, and each kind of fault is found."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
import torch
from bare_methods import GRPO
from torch import Tensor

from tandem.algorithms.losses import LossTokens, TokenLosses, token_losses
from tandem.algorithms.spec import AlgorithmSpec
from tandem.app.verify import examine, verify
from tandem.config.load import load
from tandem.engine.train import learner, value
from tandem.models.loader import init_model
from tandem.models.saver import save_model
from tests.numerics.test_parity import FAMILIES


def small(*words: str):
    return load(flags=["--model.path", "tiny", "--model.dtype", "float32", "--engine.threads", "1", *words])[0]


@pytest.mark.parametrize(
    "words",
    [("--algorithm.name", "gspo"), ("--algorithm.name", "dpo"), ("--algorithm.name", "reward"),
     ("--algorithm.name", "ppo", "--optimizer.decay", "cosine"),
     ("--lora.rank", "4", "--lora.dora", "true", "--model.dtype", "bfloat16")],
    ids=["gspo", "dpo", "reward", "ppo", "dora in bfloat16"],
)  # fmt: skip
def test_a_sound_recipe_has_no_broken_line(words, capsys) -> None:
    assert verify(small(*words)) == 0
    shown = capsys.readouterr().out
    assert "BROKEN" not in shown and "equal bits" in shown and "0 broken" in shown
    assert ("2 processes" in shown) is ("reward" not in words)
    for knob in ("learning_rate", "weight_decay", "max_grad_norm", "warmup_steps", "decay", "beta1", "beta2"):
        assert f"optimizer.{knob} from" in shown
    assert ("rollout.temperature" in shown) is not bool({"dpo", "reward"} & set(words))
    assert ("algorithm.discount" in shown) is ("optimizer.min_ratio" in shown) is ("ppo" in words)
    for knob in ("critic: algorithm.discount", "critic: algorithm.decay", "critic.clip", "critic.learning_rate"):
        assert (f"{knob} from" in shown) is ("ppo" in words)
    assert "balance_weight" not in shown


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


def test_an_optimizer_that_stands_still_is_found() -> None:
    checks = asyncio.run(examine(small("--optimizer.learning-rate", "0"), num_ranks=1))
    assert [check.name for check in checks if not check.holds] == ["optimizer.learning_rate is 0"]


def plain_squares(values: Tensor, returns: Tensor, old: Tensor, clip: float | None) -> Tensor:
    return 0.5 * (values - returns).square()


def test_a_critics_knobs_that_change_nothing_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value, "value_losses", plain_squares)
    checks = asyncio.run(examine(small("--algorithm.name", "ppo", "--critic.learning-rate", "0"), num_ranks=1))
    assert [check.name for check in checks if not check.holds] == [
        "critic.clip from 0.2 to 0.02", "critic.learning_rate is 0",
    ]  # fmt: skip


def mixture(folder: Path) -> str:
    """The folder of a model with experts; weights are drawn anew for every recipe."""
    save_model(init_model(FAMILIES["qwen3_moe"], seed=0, dtype=torch.float32), folder / "moe", tokenizer_from=None)
    return str(folder / "moe")


def test_the_balance_of_experts_is_turned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small("--model.path", mixture(tmp_path), "--engine.train.balance-weight", "0.5")
    name = "engine.train.balance_weight from 0.5 to 1.5"
    checks = {check.name: check.holds for check in asyncio.run(examine(recipe, num_ranks=1))}
    assert checks[name] and all(checks.values())
    monkeypatch.setattr(learner, "imbalance", lambda chances, *_: 0.0 * chances.sum())
    assert [check.name for check in asyncio.run(examine(recipe, num_ranks=1)) if not check.holds] == [name]


def test_a_loss_that_normalises_within_its_micro_batch_is_found() -> None:
    assert broken(own_normaliser, num_ranks=2) == {
        "gradient: micro-batches of one sample", "gradient: micro-batches of 60 tokens", "gradient: 2 processes",
    }  # fmt: skip
