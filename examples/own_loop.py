"""A training loop of one's own, with a loss of one's own: the parts are Tandem's, what happens when is not.

    python examples/own_loop.py

A model that knows nothing is trained to say few words: a few seconds on two cores.
"""

import asyncio
from pathlib import Path

import torch

from tandem import Trainer
from tandem.algorithms.losses import LossTokens
from tandem.core.types import Task
from tandem.envs.environment import Environment
from tandem.envs.reward import Reward
from tandem.envs.taskset import generated, task
from tandem.envs.workflow import tool_loop

RECIPE = Path(__file__).parents[1] / "recipes" / "tiny.toml"
OPTIONS = {
    "environment.name": f"{Path(__file__).parent / 'own_loop.py'}:brief",
    "rollout.max_turn_tokens": 12, "rollout.max_turns": 1, "optimizer.learning_rate": 3e-3, "warmup.steps": 0,
    "environment.num_eval_tasks": 16, "model.max_context_tokens": 128,
}  # fmt: skip


def clipped_loss(tokens: LossTokens) -> torch.Tensor:
    """PPO's loss of each token, written out: one number a token, without mean or sum."""
    ratio = (tokens.logprobs_N - tokens.sampled_N).exp()
    held = ratio.clamp(0.8, 1.2)
    return -torch.minimum(ratio * tokens.advantages_N, held * tokens.advantages_N)


async def main(steps: int = 12) -> list[float]:
    """Returns the mean reward of every step."""
    rewards: list[float] = []
    async with Trainer(RECIPE, options=OPTIONS) as trainer:
        print("before:", (await trainer.evaluate()).mean_reward)
        for step in range(steps):
            groups = await trainer.rollout(4, group_size=8)
            samples = trainer.credit(groups)  # or trainer.sample(trajectory, advantage) for each trajectory
            result = await trainer.train(samples, loss=clipped_loss)
            scored = [e.reward for each in groups for e in each.group.episodes if e.reward is not None]
            rewards.append(sum(scored) / len(scored))
            print(f"step {step + 1}: reward {rewards[-1]:.3f}, gradient {result.grad_norm:.3f}")
        print("after:", (await trainer.evaluate()).mean_reward)
    return rewards


# ---- the environment: no box, and a reward that even chance earns some of
def brevity(episode) -> float:
    """1 for an answer of one token, 0 for one that fills its turn."""
    return 1.0 - (len(episode.turns[-1].completion_ids) - 1) / 11


def make_task(seed: int, index: int) -> Task:
    """Task number ``index``."""
    return task(f"Be brief. {seed % 97 + index}", id=f"brief-{seed % 97}-{index}")


brief = Environment(
    name="brief",
    tasks=generated(make_task),
    eval_tasks=generated(make_task, held_out=True),
    workflow=tool_loop([]),
    rewards=[Reward(brevity)],
    template=None,
)

if __name__ == "__main__":
    asyncio.run(main())
