"""Trajectories to samples: advantages and weights along every token.

Owns: which tokens of a trajectory learn, and from what. Refuses: tensors, packing, normalising.
Invariants: a token that the policy did not make has weight 0 and advantage 0; an episode without a reward
makes no sample; the first token of a trajectory has no predecessor and never learns.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from typing import cast

import numpy as np

from tandem.algorithms.advantages import generalised, leave_one_out, overlong, whitened
from tandem.algorithms.spec import Aggregate, AlgorithmSpec, Data, function_named
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
    rewards = _shaped(spec, group, trajectories)
    credit = function_named(spec.credit)
    advantages = cast("list[float | None]", credit(rewards))
    if len(advantages) != len(rewards):
        raise ValueError(f"{spec.credit} gave {len(advantages)} advantages for {len(rewards)} episodes of {group.id}")
    by_episode = {episode.id: advantage for episode, advantage in zip(group.episodes, advantages, strict=True)}
    shaped = {episode.id: reward for episode, reward in zip(group.episodes, rewards, strict=True)}
    samples = []
    for trajectory in trajectories:
        if trajectory.episode_id not in by_episode:
            raise ValueError(f"trajectory of {trajectory.episode_id} belongs to no episode of group {group.id}")
        advantage = by_episode[trajectory.episode_id]
        if advantage is None:
            continue
        samples.append(credited(trajectory, advantage, reward=shaped[trajectory.episode_id]))
    return samples


def credited(trajectory: Trajectory, advantage: float | Sequence[float], *, reward: float | None = None) -> Sample:
    """A trajectory whose sampled tokens learn from one advantage, or from one each (as long as the trajectory; those
    of other tokens are not read)."""
    learns = _learns(trajectory)
    return Sample(
        trajectory=trajectory,
        advantages=pack_floats(learns * np.asarray(advantage, dtype=np.float32)),
        rl_weights=pack_floats(learns),
        ce_weights=floats([0.0]) * len(learns),
        reward=reward,
    )


def _shaped(spec: AlgorithmSpec, group: Group, trajectories: Sequence[Trajectory]) -> list[float | None]:
    """The rewards of a group, those of over-long answers lowered."""
    rewards = [episode.reward for episode in group.episodes]
    if not spec.overlong_cap:
        return rewards
    lengths = dict.fromkeys((episode.id for episode in group.episodes), 0)
    for trajectory in trajectories:
        if trajectory.episode_id in lengths:
            lengths[trajectory.episode_id] = max(lengths[trajectory.episode_id], sum(trajectory.loss_mask))
    punished = [
        overlong(lengths[episode.id], cap=spec.overlong_cap, buffer=spec.overlong_buffer) for episode in group.episodes
    ]
    return [None if reward is None else reward + less for reward, less in zip(rewards, punished, strict=True)]


def needs_settling(spec: AlgorithmSpec) -> bool:
    """Whether credit depends on streams or on the whole step, not on a group's rewards alone."""
    return spec.critic or spec.whiten or spec.teacher or spec.kl_reward_weight > 0


def settle(spec: AlgorithmSpec, samples: Sequence[Sample]) -> list[Sample]:
    """Finish the credit of all samples of a step, once they carry the streams that ``spec`` needs.

    A KL in the reward is k1 of sampler against reference, token by token: a token is charged for itself and for the
    policy's tokens after it (REINFORCE++; with a critic GAE does the same). Where an answer is one action (RLOO) all of
    it is charged for all of it, less what its siblings pay. Whitening is last.
    """
    if not needs_settling(spec):
        return list(samples)
    if spec.aggregate is Aggregate.SEQUENCE_SUM:
        return _charged_whole(spec, samples)
    settled = [_settled(spec, sample) for sample in samples]
    if not spec.whiten:
        return settled
    learn = [np.frombuffer(sample.rl_weights, dtype=np.float32) != 0 for sample in settled]
    streams = [np.frombuffer(sample.advantages, dtype=np.float32).astype(np.float64) for sample in settled]
    if not streams:
        return settled
    even = whitened(np.concatenate([stream[flags] for stream, flags in zip(streams, learn, strict=True)]))
    begin = 0
    for stream, flags in zip(streams, learn, strict=True):
        stream[flags] = even[begin : begin + int(flags.sum())]
        begin += int(flags.sum())
    return [
        dataclasses.replace(sample, advantages=pack_floats(stream))
        for sample, stream in zip(settled, streams, strict=True)
    ]


def _charged_whole(spec: AlgorithmSpec, samples: Sequence[Sample]) -> list[Sample]:
    """The KL of whole answers, to which the group's baseline belongs as to their rewards: leave-one-out is linear, so
    it may be taken of the two apart."""
    groups: dict[str, dict[str, float]] = {}
    for sample in samples:
        paid = groups.setdefault(sample.trajectory.group_id, {})
        episode = sample.trajectory.episode_id
        paid[episode] = paid.get(episode, 0.0) + float(_penalties(spec, sample).sum())
    charges = {
        episode: charge
        for paid in groups.values()
        for episode, charge in zip(paid, leave_one_out(list(paid.values())), strict=True)
    }
    return [
        dataclasses.replace(
            sample,
            advantages=pack_floats(
                np.frombuffer(sample.advantages, dtype=np.float32)
                - np.frombuffer(sample.rl_weights, dtype=np.float32) * (charges[sample.trajectory.episode_id] or 0.0)
            ),
        )
        for sample in samples
    ]


def _reference(spec: AlgorithmSpec, sample: Sample) -> np.ndarray:
    if sample.reference_logprobs is None:
        raise ValueError(f"{spec.name} needs reference log-probabilities, but {_name(sample)} carries none")
    return np.frombuffer(sample.reference_logprobs, dtype=np.float32).astype(np.float64)


def _penalties(spec: AlgorithmSpec, sample: Sample) -> np.ndarray:
    """What the KL to the reference takes from the reward, token by token."""
    learns = np.frombuffer(sample.rl_weights, dtype=np.float32) != 0
    sampled = np.frombuffer(sample.trajectory.logprobs, dtype=np.float32).astype(np.float64)
    return np.where(learns, spec.kl_reward_weight * (sampled - _reference(spec, sample)), 0.0)


def _settled(spec: AlgorithmSpec, sample: Sample) -> Sample:
    learns = np.frombuffer(sample.rl_weights, dtype=np.float32) != 0
    advantages = np.frombuffer(sample.advantages, dtype=np.float32).astype(np.float64)
    if spec.teacher:
        sampled = np.frombuffer(sample.trajectory.logprobs, dtype=np.float32).astype(np.float64)
        told = np.where(learns, _reference(spec, sample) - sampled, 0.0)
        return dataclasses.replace(sample, advantages=pack_floats(told))
    penalties = _penalties(spec, sample) if spec.kl_reward_weight else np.zeros(len(learns))
    if not spec.critic:
        later = np.cumsum(penalties[::-1])[::-1]
        return dataclasses.replace(sample, advantages=pack_floats(np.where(learns, advantages - later, 0.0)))
    if sample.values is None or sample.reward is None:
        raise ValueError(f"{spec.name} needs values and a reward, but {_name(sample)} lacks one of them")
    values = np.frombuffer(sample.values, dtype=np.float32).astype(np.float64)
    advantages = generalised(
        sample.reward, values, learns, discount=spec.discount, decay=spec.decay, penalties=penalties
    )
    returns = np.where(learns, advantages + np.where(learns, values, 0.0), 0.0)
    return dataclasses.replace(sample, advantages=pack_floats(advantages), returns=pack_floats(returns))


def _name(sample: Sample) -> str:
    return f"the sample of {sample.trajectory.episode_id}"


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


def preference(better: Sample, worse: Sample) -> tuple[Sample, Sample]:
    """Two demonstrations as one pair, in this order: the tokens that would be learned are compared instead."""
    return _compared(better, 1.0), _compared(worse, -1.0)


def _compared(sample: Sample, side: float) -> Sample:
    learns = np.frombuffer(sample.ce_weights, dtype=np.float32)
    return dataclasses.replace(
        sample,
        advantages=pack_floats(learns * np.float32(side)),
        rl_weights=sample.ce_weights,
        ce_weights=floats([0.0]) * len(learns),
    )


def num_loss_tokens(sample: Sample) -> int:
    """Tokens of a sample that carry any loss weight: what the normaliser counts."""
    rl = np.frombuffer(sample.rl_weights, dtype=np.float32)
    ce = np.frombuffer(sample.ce_weights, dtype=np.float32)
    return int(np.count_nonzero((rl != 0) | (ce != 0)))


def has_gradient(spec: AlgorithmSpec, sample: Sample) -> bool:
    """Whether a forward pass over the sample can change any weight. Without contrast (advantage 0) and without
    a KL penalty or entropy bonus it cannot; such samples still count in the normaliser."""
    if np.frombuffer(sample.ce_weights, dtype=np.float32).any():
        return True
    rl = np.frombuffer(sample.rl_weights, dtype=np.float32)
    if spec.flat_learns or spec.kl_weight > 0 or spec.entropy_weight > 0 or spec.data is Data.PREFERENCES:
        return bool(rl.any())
    return bool((rl * np.frombuffer(sample.advantages, dtype=np.float32)).any())
