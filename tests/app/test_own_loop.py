"""A loop of the user's own: what it samples, trains, scores and saves is the run's own, and the example learns."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from app_pieces import ROOT, TINY

from tandem import Trainer
from tandem.app.run import recipe_of, train
from tandem.core.errors import ConfigError, RecordError, TandemError
from tandem.engine.train.value import CriticEngine
from tandem.models.loader import load_model
from tandem.record.metrics import fold
from tandem.record.replay import read

EXAMPLE = ROOT / "examples" / "own_loop.py"
OPTIONS = {
    "environment.name": f"{EXAMPLE}:brief", "environment.num_eval_tasks": 2, "rollout.max_turn_tokens": 8,
    "rollout.max_turns": 1, "rollout.reward_processes": 1, "engine.threads": 1, "model.max_context_tokens": 128,
    "warmup.steps": 0,
}  # fmt: skip


def test_the_example_learns():
    spec = importlib.util.spec_from_file_location("own_loop_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    rewards = asyncio.run(example.main(steps=4))
    assert len(rewards) == 4 and rewards[-1] > rewards[0]


def test_the_verbs(tmp_path: Path):
    async def loop() -> None:
        async with Trainer(TINY, options=OPTIONS, folder=tmp_path / "run") as trainer:
            groups = await trainer.rollout(2, group_size=3)
            assert [len(each.group.episodes) for each in groups] == [3, 3]
            assert groups[0].group.task.id != groups[1].group.task.id
            again = await trainer.rollout(tasks=[groups[0].group.task], group_size=1)
            trajectories = [each for group in groups for each in group.trajectories]
            for trajectory, scored in zip(trajectories, await trainer.score(trajectories), strict=True):
                sampled = np.frombuffer(trajectory.loss_mask, np.int8) != 0
                assert np.array_equal(np.array(scored)[sampled], np.array(trajectory.logprobs)[sampled])
            assert len({each.group.id for each in [*groups, *again]}) == 3

            samples = [trainer.sample(each, 1.0) for each in trajectories]
            before = await trainer.score(trajectories)
            result = await trainer.train(samples, loss=lambda tokens: -tokens.logprobs_N * tokens.advantages_N)
            after = await trainer.score(trajectories)
            assert result.step == trainer.step == 1 and trainer.version.number == 1
            assert sum(map(sum, after)) > sum(map(sum, before))
            fresh = await trainer.rollout(1, group_size=1)
            versions = {number for each in fresh[0].trajectories for number in each.versions}
            assert versions == {-1, 1}
            assert fresh[0].group.task.id not in {each.group.task.id for each in groups}

            with pytest.raises(ConfigError, match=r"shape \(\) for"):
                await trainer.train(samples, loss=lambda tokens: tokens.logprobs_N.mean())
            with pytest.raises(ConfigError, match="no samples"):
                await trainer.train([])
            assert trainer.step == 1 and await trainer.score(trajectories) == after
            outcome = await trainer.evaluate()
            assert outcome.num_tasks == 2
            path = await trainer.save(tmp_path / "out")
            saved = dict(load_model(path, dtype=torch.float32).named_parameters())
            here = trainer._here.parts.weights.model
            assert all(torch.equal(saved[name], each) for name, each in here.named_parameters())
        with pytest.raises(TandemError, match="not open"):
            await trainer.rollout(1)

    asyncio.run(loop())
    metrics = fold(read(tmp_path / "run"))
    assert metrics.finished is not None and (metrics.finished.reason, metrics.finished.step) == ("finished", 1)
    assert [each.step for each in metrics.steps] == [1] and len(metrics.evaluations) == 1
    assert metrics.episodes["train"].num_scored == 3 * 2 + 1 + 1
    with pytest.raises(ConfigError, match="not empty"):
        asyncio.run(Trainer(TINY, options=OPTIONS, folder=tmp_path / "run").__aenter__())


def test_the_methods_own_step_with_reference_and_passes():
    """The roles of the recipe's method come along: a KL in the loss has its reference, and passes are updates."""

    async def loop() -> None:
        options = {**OPTIONS, "algorithm.kl_weight": 0.1, "algorithm.passes": 2}
        async with Trainer(TINY, options=options) as trainer:
            groups = await trainer.rollout(1, group_size=2)
            samples = [trainer.sample(each, 1.0) for group in groups for each in group.trajectories]
            result = await trainer.train(samples)
            assert result.metrics["updates"] == 2.0
            assert result.metrics["kl_reference"] > 0.0  # the second update is off the reference

    asyncio.run(loop())


EXACT = {
    **OPTIONS, "environment.num_eval_tasks": 0, "trainer.deterministic": True, "trainer.steps": 4,
    "optimizer.decay": "linear", "optimizer.warmup_steps": 2, "optimizer.learning_rate": 1e-3,
}  # fmt: skip
KINDS = {
    "adapters and reference": {"lora.rank": 4, "algorithm.kl_weight": 0.1},
    "all weights and critic": {"algorithm.name": "ppo", "critic.learning_rate": 1e-3},
}


async def loop_to(last: int, folder: Path, options: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """A loop with a curriculum of its own and a draw from the global generator, to step ``last``; it saves after every
    step but the second. Returns all that was trained."""
    torch.manual_seed(9 if folder.exists() else 8)  # a resumed loop has the generator of its checkpoint
    async with Trainer(TINY, options=options, folder=folder, resume=True) as trainer:
        while trainer.step < last:
            groups = await trainer.rollout(2, group_size=2 + trainer.state.setdefault("extra", 0))
            trainer.state["extra"] = (trainer.step + 1) % 3
            drawn = [trainer.sample(each, float(torch.randn(()))) for group in groups for each in group.trajectories]
            # A critic learns from rewards.
            await trainer.train(trainer.credit(groups) if trainer.recipe.algorithm.name == "ppo" else drawn)
            if trainer.step != 2:
                await trainer.checkpoint()
        here = trainer._here
        found = dict(here.engine.optimizer.weights()) | here.engine.optimizer.moments()
        if isinstance(here.critic, CriticEngine):
            found |= {f"critic.{name}": each for name, each in here.critic.optimizer.weights().items()}
        return {name: tensor.clone() for name, tensor in found.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_that_was_interrupted_ends_with_the_same_bits(kind: str, tmp_path: Path):
    options = EXACT | KINDS[kind]
    whole = asyncio.run(loop_to(3, tmp_path / "whole", options))
    asyncio.run(loop_to(1, tmp_path / "parts", options))
    asyncio.run(loop_to(2, tmp_path / "parts", options))  # step 2 is lost, and made again
    again = asyncio.run(loop_to(3, tmp_path / "parts", options))
    assert whole.keys() == again.keys() and any(name.startswith("exp_avg.") for name in whole)
    assert all(torch.equal(each, again[name]) for name, each in whole.items())
    one, other = fold(read(tmp_path / "whole")), fold(read(tmp_path / "parts"))
    assert [each.step for each in one.steps] == [each.step for each in other.steps] == [1, 2, 3]
    assert [each.loss for each in one.steps] == [each.loss for each in other.steps]


def test_a_folder_is_gone_on_with_by_its_own_recipe_only(tmp_path: Path):
    folder = tmp_path / "run"

    async def one_step() -> None:
        async with Trainer(TINY, options=OPTIONS, folder=folder, resume=True) as trainer:
            trainer.state["best"] = [0.5, {"at": 1}]
            await trainer.train([trainer.sample(each, 1.0) for each in (await trainer.rollout(1))[0].trajectories])
            trainer.state["bad"] = object()
            with pytest.raises(ConfigError, match=r"trainer\.state cannot be saved"):
                await trainer.checkpoint()
            del trainer.state["bad"]
            await trainer.checkpoint()

    asyncio.run(one_step())
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000001"]

    async def entered(**changes: object) -> dict[str, object]:
        async with Trainer(TINY, options=OPTIONS | changes, folder=folder, resume=True) as trainer:
            assert trainer.step == 1
            return trainer.state

    assert asyncio.run(entered()) == {"best": [0.5, {"at": 1}]}
    with pytest.raises(ConfigError, match=r"other values of optimizer\.learning_rate"):
        asyncio.run(entered(**{"optimizer.learning_rate": 0.5}))
    (folder / "checkpoints" / "step-000001" / "state.bin").unlink()
    with pytest.raises(RecordError, match=r"no checkpoint .* can be used: step-000001: state\.bin"):
        asyncio.run(entered())
    with pytest.raises(ConfigError, match="own loop"):
        recipe, origins = recipe_of(folder)
        train(recipe, origins, resume=folder)
    with pytest.raises(ConfigError, match="without a folder"):
        Trainer(TINY, options=OPTIONS, resume=True)


def test_a_trainer_without_a_folder_takes_no_checkpoint():
    async def loop() -> None:
        async with Trainer(TINY, options=OPTIONS) as trainer:
            with pytest.raises(ConfigError, match="no folder"):
                await trainer.checkpoint()

    asyncio.run(loop())


def test_what_is_refused_says_what_to_do(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no option --rollout\.group-sice|group_sice"):
        Trainer(TINY, options={"rollout.group_sice": 4})
    trainer = Trainer(TINY, options={"algorithm.name": "sft", "data.path": str(tmp_path)})
    with pytest.raises(ConfigError, match="learns from data"):
        asyncio.run(trainer.__aenter__())
