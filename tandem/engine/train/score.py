"""Log-probabilities of given tokens under given weights, without gradient.

Owns: forward-only passes, for the current weights and for frozen copies of them (the reference of a KL penalty).
Invariant: the same numbers as the training forward pass gives, token for token.
"""

from __future__ import annotations

import copy
import functools
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import torch
from torch import nn

from tandem.config.sections.engine import TrainSection
from tandem.core.types import Floats, Trajectory
from tandem.engine.compute import ComputeQueue
from tandem.engine.train.batch import lay_out, predict
from tandem.models.causal_lm import CausalLM


def frozen_copy(model: CausalLM) -> CausalLM:
    """The weights as they are now, in tensors of their own; the op table is shared."""
    twin = copy.deepcopy(model, {id(model.ops): model.ops})
    return twin.requires_grad_(False)


def within_budget(trajectories: Sequence[Trajectory], tokens: int) -> list[list[Trajectory]]:
    """Cut trajectories, in order, into batches of at most so many tokens (a longer one is alone)."""
    batches: list[list[Trajectory]] = []
    room = 0
    for trajectory in trajectories:
        if not batches or len(trajectory.token_ids) > room:
            batches.append([])
            room = tokens
        batches[-1].append(trajectory)
        room -= len(trajectory.token_ids)
    return batches


class Parking:
    """Where frozen weights are while nobody asks: on their device, or (``parks``) in the memory of the CPU."""

    def __init__(self, model: nn.Module, *, parks: bool) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        self._parks = parks and self._device.type != "cpu"
        if self._parks:
            model.to("cpu")

    @asynccontextmanager
    async def used(self, compute: ComputeQueue) -> AsyncIterator[None]:
        """On their device for as long as this lasts."""
        if not self._parks:
            yield
            return
        await compute.run("train", lambda: self._model.to(self._device))
        try:
            yield
        finally:
            await compute.run("train", lambda: self._model.to("cpu"))


class Scorer:
    """Scores trajectories under the weights of one model, in jobs of the train lane."""

    def __init__(
        self, model: CausalLM, compute: ComputeQueue, section: TrainSection, *, replays: bool = False,
        parking: Parking | None = None,
    ) -> None:  # fmt: skip
        """``replays``: the model is the one that sampled, and takes the experts that were recorded then."""
        self._replays = replays
        self._parking = parking or Parking(model, parks=False)
        self._model = model
        self._compute = compute
        self._section = section

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Floats]:
        """One stream a trajectory, at its temperature; nothing predicts the first token, which gets 0."""
        streams: list[Floats] = []
        async with self._parking.used(self._compute):
            for batch in within_budget(trajectories, self._section.micro_batch_tokens):
                job = functools.partial(score_batch, self._model, batch, self._section, replays=self._replays)
                streams += await self._compute.run("train", job)
        return streams


@torch.no_grad()
def score_batch(
    model: CausalLM, trajectories: Sequence[Trajectory], section: TrainSection, *, replays: bool = False
) -> list[Floats]:
    """The same for trajectories of one forward pass, on this thread. ``replays``: through the experts that the
    trajectories have recorded, as in training."""
    device = model.device
    streams = [trajectory.token_ids[:-1] for trajectory in trajectories]
    routes = [trajectory.routes for trajectory in trajectories] if replays else []
    layout = lay_out(streams, share_prefixes=section.share_prefixes, device=device, routes=routes)
    wanted = [np.arange(1, len(trajectory.token_ids)) for trajectory in trajectories]
    predictions = predict(layout, trajectories, wanted, device)
    hidden_TD = model(layout.ids_T, layout.positions_T, layout.context())
    logprobs_N, _ = model.ops.token_logprobs(
        hidden_TD.index_select(0, predictions.rows_N),
        model.head_weight,
        predictions.targets_N,
        predictions.temperature_N,
    )
    parts = np.split(logprobs_N.float().cpu().numpy(), np.cumsum([len(tokens) for tokens in wanted])[:-1])
    return [array("f", np.concatenate([np.zeros(1, np.float32), part]).tobytes()) for part in parts]
