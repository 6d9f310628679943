"""Methods without their reference: for tests of what is the same with one, where a second model only takes time."""

from __future__ import annotations

import dataclasses

from tandem.algorithms.catalog import grpo, ppo

GRPO = dataclasses.replace(grpo.GRPO, kl_weight=0.0)
PPO = dataclasses.replace(ppo.PPO, kl_reward_weight=0.0)
