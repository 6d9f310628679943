"""Samples to packed tensors (T: distinct tokens of a micro-batch, N: its loss tokens).

Owns: the layout. Common beginnings of the samples (a group's prompt, the turns before a branch) are laid out once;
each sample reads its own path through them. Refuses: padding; running a model.
Invariants: a token attends to exactly the tokens before it in its own sample, in order, whatever it is packed
with; loss token t of a sample is predicted by the hidden row of token t - 1, be that row shared or not; only
rows that predict a loss token go through the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.algorithms.aggregate import token_share
from tandem.algorithms.credit import num_loss_tokens
from tandem.algorithms.losses import LossTokens
from tandem.algorithms.spec import AlgorithmSpec
from tandem.core.routes import Routes, missing
from tandem.core.types import Floats, Ids, Sample, Trajectory
from tandem.kernels.ops import KeyIndex
from tandem.models.attention import AttentionContext
from tandem.models.routes import RouteReplay
from tandem.text.prefixes import SharedPrefix, longest_shared


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Packed streams. ``slots[s][t]`` is the packed row of token t of stream s."""

    ids_T: Tensor
    positions_T: Tensor
    keys: KeyIndex
    slots: list[np.ndarray]
    routes_TR: Tensor | None = None

    def context(self) -> AttentionContext:
        """What a forward pass over the layout attends to, and the experts that it is to take."""
        return AttentionContext(keys=self.keys, routes=RouteReplay(self.routes_TR))


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """Which hidden rows predict which tokens, at which temperature."""

    rows_N: Tensor
    targets_N: Tensor
    temperature_N: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward and backward pass. ``current_N`` marks tokens that the weights in training sampled."""

    layout: Layout
    predictions: Predictions
    sampled_N: Tensor
    reference_N: Tensor | None
    advantages_N: Tensor
    rl_shares_N: Tensor
    ce_shares_N: Tensor
    sequence_N: Tensor
    current_N: Tensor
    num_sequences: int
    old_N: Tensor | None

    def loss_tokens(self, logprobs_N: Tensor, entropy_N: Tensor | None = None) -> LossTokens:
        """What the loss function sees."""
        return LossTokens(
            logprobs_N=logprobs_N,
            sampled_N=self.sampled_N,
            reference_N=self.reference_N,
            advantages_N=self.advantages_N,
            rl_shares_N=self.rl_shares_N,
            ce_shares_N=self.ce_shares_N,
            sequence_N=self.sequence_N,
            num_sequences=self.num_sequences,
            old_N=self.old_N,
            entropy_N=entropy_N,
        )


def lay_out(
    streams: Sequence[Ids], *, share_prefixes: bool, device: torch.device, routes: Sequence[Routes | None] = ()
) -> Layout:
    """Pack streams of ids, each after the one it shares its beginning with. ``routes``: one a stream, or none at all;
    a token that several streams share goes through the experts that the first of them has."""
    slots: list[np.ndarray] = []
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    starts: list[np.ndarray] = []
    num_rows, num_listed = 0, 0
    for index, stream in enumerate(streams):
        shared = longest_shared(stream, streams[:index]) if share_prefixes else SharedPrefix(parent=-1, length=0)
        own = np.arange(num_rows, num_rows + len(stream) - shared.length, dtype=np.int32)
        before = slots[shared.parent][: shared.length] if shared.length else own[:0]
        slots.append(np.concatenate([before, own]))
        ids.append(np.frombuffer(stream, dtype=np.int32)[shared.length :])
        positions.append(np.arange(shared.length, len(stream), dtype=np.int64))
        # The key list of a row is the head of its sample's whole path, so one list serves all rows of a sample.
        starts.append(np.full(len(own), num_listed, dtype=np.int64))
        num_rows += len(own)
        num_listed += len(stream)
    positions_T, starts_T = torch.from_numpy(np.concatenate(positions)), torch.from_numpy(np.concatenate(starts))
    counts_T = (positions_T + 1).int()
    width = next((each.width for each in routes if each is not None), 0)
    noted = [
        np.frombuffer((each or missing(width, len(stream))).rows(len(stream) - len(own), len(stream)).experts, np.int16)
        for each, stream, own in zip(routes, streams, positions, strict=True)
    ] if width else []  # fmt: skip
    return Layout(
        ids_T=torch.from_numpy(np.concatenate(ids).astype(np.int64)).to(device),
        positions_T=positions_T.to(device),
        keys=KeyIndex(
            slots_L=torch.from_numpy(np.concatenate(slots)).to(device),
            starts_T=starts_T.to(device),
            counts_T=counts_T.to(device),
            host=(starts_T, counts_T),
        ),
        slots=slots,
        routes_TR=torch.from_numpy(np.concatenate(noted).reshape(-1, width)).to(device) if width else None,
    )


def predict(
    layout: Layout, trajectories: Sequence[Trajectory], wanted: Sequence[np.ndarray], device: torch.device
) -> Predictions:
    """Pair each wanted token (indices from 1 on, per trajectory) with the row before it."""
    rows, targets, temperatures = [], [], []
    for trajectory, slots, tokens in zip(trajectories, layout.slots, wanted, strict=True):
        rows.append(slots[tokens - 1])
        targets.append(np.frombuffer(trajectory.token_ids, dtype=np.int32)[tokens])
        temperatures.append(np.full(len(tokens), trajectory.temperature, dtype=np.float32))
    return Predictions(
        rows_N=torch.from_numpy(np.concatenate(rows).astype(np.int64)).to(device),
        targets_N=torch.from_numpy(np.concatenate(targets).astype(np.int64)).to(device),
        temperature_N=torch.from_numpy(np.concatenate(temperatures)).to(device),
    )


def make_micro_batch(
    samples: Sequence[Sample],
    spec: AlgorithmSpec,
    *,
    num_loss_tokens_of_step: int,
    num_sequences_of_step: int,
    version: int,
    share_prefixes: bool,
    device: torch.device,
) -> MicroBatch:
    """Pack the samples of one row of a plan, with every token's share of the step's loss."""
    trajectories = [sample.trajectory for sample in samples]
    wanted, advantages, rl_shares, ce_shares, sampled, current = [], [], [], [], [], []
    for sample in samples:
        rl = np.frombuffer(sample.rl_weights, dtype=np.float32)
        ce = np.frombuffer(sample.ce_weights, dtype=np.float32)
        tokens = np.flatnonzero((rl != 0) | (ce != 0))
        share = token_share(
            spec,
            sequence_tokens=num_loss_tokens(sample),
            num_loss_tokens=num_loss_tokens_of_step,
            num_sequences=num_sequences_of_step,
        )
        wanted.append(tokens)
        advantages.append(np.frombuffer(sample.advantages, dtype=np.float32)[tokens])
        rl_shares.append(np.float32(share) * rl[tokens])
        ce_shares.append(np.float32(share) * ce[tokens])
        sampled.append(np.frombuffer(sample.trajectory.logprobs, dtype=np.float32)[tokens])
        current.append(np.frombuffer(sample.trajectory.versions, dtype=np.int32)[tokens] == version)
    # What comes after a sample's last loss token, and that token itself, predicts nothing.
    streams = [
        t.token_ids[: int(tokens[-1]) if len(tokens) else 0] for t, tokens in zip(trajectories, wanted, strict=True)
    ]
    routes = [trajectory.routes for trajectory in trajectories]
    layout = lay_out(streams, share_prefixes=share_prefixes, device=device, routes=routes)
    sequence = np.repeat(np.arange(len(samples)), [len(tokens) for tokens in wanted])

    def joined(parts: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device)

    def stream(name: str, buffers: list[Floats | None]) -> Tensor | None:
        given = [buffer for buffer in buffers if buffer is not None]
        if given and len(given) != len(buffers):
            raise ValueError(f"{len(given)} of {len(buffers)} samples carry {name} log-probabilities: all or none")
        parts = [np.frombuffer(buffer, dtype=np.float32)[tokens] for buffer, tokens in zip(given, wanted, strict=False)]
        return joined(parts) if parts else None

    return MicroBatch(
        layout=layout,
        predictions=predict(layout, trajectories, wanted, device),
        sampled_N=joined(sampled),
        reference_N=stream("reference", [sample.reference_logprobs for sample in samples]),
        advantages_N=joined(advantages),
        rl_shares_N=joined(rl_shares),
        ce_shares_N=joined(ce_shares),
        sequence_N=torch.from_numpy(sequence).to(device),
        current_N=joined(current),
        num_sequences=len(samples),
        old_N=stream("old", [sample.old_logprobs for sample in samples]),
    )
