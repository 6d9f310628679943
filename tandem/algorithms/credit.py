"""Trajectories to samples: advantages and weights along every token.

Owns: which tokens of a trajectory learn, and from what. Refuses: tensors, packing, normalising.
Invariants: a token that the policy did not make has weight 0 and advantage 0; an episode without a reward
makes no sample; the first token of a trajectory has no predecessor and never learns.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import cast

import numpy as np

from tandem.algorithms.spec import AlgorithmSpec, function_named
from tandem.core.types import Floats, Group, Ids, Mask, Sample, Trajectory, floats, ids


def pack_floats(values: np.ndarray) -> Floats:
    """A NumPy vector as the packed buffer that core records carry."""
    return array("f", np.ascontiguousarray(values, dtype=np.float32).tobytes())


def _learns(trajectory: Trajectory) -> np.ndarray:
    flags = np.frombuffer(trajectory.loss_mask, dtype=np.int8).astype(np.float32)
    if flags.size and flags[0]:
        raise ValueError(f"trajectory of {trajectory.episode_id}: its first token is marked, but nothing predicts it")
    return flags


def stamp(spec: AlgorithmSpec, group: Group, trajectories: Sequence[Trajectory]) -> list[Sample]:
    """Give every trajectory of a scored episode the advantage that ``spec`` computes from the group.

    Trajectories come in any number per episode; those of episodes without a reward are left out.
    """
    if spec.credit is None:
        raise ValueError(f"{spec.name} gives no credit for rewards; its samples are demonstrations")
    rewards = [episode.reward for episode in group.episodes]
    credit = function_named(spec.credit)
    advantages = cast("list[float | None]", credit(rewards))
    if len(advantages) != len(rewards):
        raise ValueError(f"{spec.credit} gave {len(advantages)} advantages for {len(rewards)} episodes of {group.id}")
    by_episode = {episode.id: advantage for episode, advantage in zip(group.episodes, advantages, strict=True)}
    samples = []
    for trajectory in trajectories:
        if trajectory.episode_id not in by_episode:
            raise ValueError(f"trajectory of {trajectory.episode_id} belongs to no episode of group {group.id}")
        advantage = by_episode[trajectory.episode_id]
        if advantage is None:
            continue
        learns = _learns(trajectory)
        samples.append(
            Sample(
                trajectory=trajectory,
                advantages=pack_floats(learns * np.float32(advantage)),
                rl_weights=pack_floats(learns),
                ce_weights=floats([0.0]) * len(learns),
            )
        )
    return samples


def demonstration(sample_id: str, token_ids: Ids, mask: Mask) -> Sample:
    """A finished conversation that nobody sampled: cross-entropy on the tokens that ``mask`` marks."""
    trajectory = Trajectory(
        episode_id=sample_id,
        group_id=sample_id,
        token_ids=token_ids,
        loss_mask=mask,
        logprobs=floats([0.0]) * len(token_ids),
        versions=ids([-1]) * len(token_ids),
        num_prompt_tokens=next((index for index, flag in enumerate(mask) if flag), len(mask)),
    )
    learns = _learns(trajectory)
    nothing = floats([0.0]) * len(learns)
    return Sample(trajectory=trajectory, advantages=nothing, rl_weights=nothing, ce_weights=pack_floats(learns))


def num_loss_tokens(sample: Sample) -> int:
    """Tokens of a sample that carry any loss weight: what the normaliser counts."""
    rl = np.frombuffer(sample.rl_weights, dtype=np.float32)
    ce = np.frombuffer(sample.ce_weights, dtype=np.float32)
    return int(np.count_nonzero((rl != 0) | (ce != 0)))


def has_gradient(spec: AlgorithmSpec, sample: Sample) -> bool:
    """Whether a forward pass over the sample can change any weight. Without contrast (advantage 0) and without
    a KL penalty it cannot; such samples still count in the normaliser."""
    if np.frombuffer(sample.ce_weights, dtype=np.float32).any():
        return True
    rl = np.frombuffer(sample.rl_weights, dtype=np.float32)
    if spec.needs_reference:
        return bool(rl.any())
    return bool((rl * np.frombuffer(sample.advantages, dtype=np.float32)).any())
