"""One rank's part of a step: micro-batches forward and backward, on its own copy or shard of the model.

Owns: what happens between a row of samples and its gradient. Refuses: which rows, when, and the update.
Invariant: a micro-batch adds its samples' shares of the step's loss and nothing else, so the sum over micro-batches
and ranks is the gradient of the step however the samples are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from tandem.algorithms.losses import LossTokens, OwnLoss, TokenLosses, imbalance, own_losses
from tandem.algorithms.spec import AlgorithmSpec, function_named
from tandem.config.sections.engine import TrainSection
from tandem.core.errors import ConfigError
from tandem.core.types import Sample
from tandem.engine.train.batch import MicroBatch, make_micro_batch
from tandem.engine.train.statistics import measure
from tandem.kernels.ops import KeyIndex
from tandem.models.attention import AttentionContext
from tandem.models.causal_lm import CausalLM
from tandem.models.routes import RouteReplay


@dataclass(frozen=True, slots=True, kw_only=True)
class Normaliser:
    """What every micro-batch of a step divides by, on every rank, and the version that is being trained."""

    num_loss_tokens: int
    num_sequences: int
    version: int


class Learner:
    """Differentiates the algorithm's loss on one model."""

    def __init__(self, model: CausalLM, *, train: TrainSection, algorithm: AlgorithmSpec) -> None:
        if train.balance_weight and model.spec.experts is None:
            raise ConfigError(
                f"engine.train.balance_weight = {train.balance_weight}: a {model.spec.family} model has no experts",
                hint="set engine.train.balance_weight = 0",
            )
        self.model = model
        self._train = train
        self._algorithm = algorithm
        self._loss = cast("Callable[[AlgorithmSpec, LossTokens], TokenLosses]", function_named(algorithm.loss))

    def micro_batch(self, row: Sequence[Sample], step: Normaliser, own: OwnLoss | None = None) -> Tensor:
        """Forward and backward of one row; gradients are on the weights, the measurements are returned. ``own`` takes
        the place of the method's loss."""
        model = self.model
        batch = make_micro_batch(
            row,
            self._algorithm,
            num_loss_tokens_of_step=step.num_loss_tokens,
            num_sequences_of_step=step.num_sequences,
            version=step.version,
            share_prefixes=self._train.share_prefixes,
            device=model.device,
        )
        context = batch.layout.context()
        hidden_TD = model(
            batch.layout.ids_T, batch.layout.positions_T, context, checkpoint=self._train.checkpoint_activations
        )
        logprobs_N, entropy_N = model.ops.token_logprobs(
            hidden_TD.index_select(0, batch.predictions.rows_N),
            model.head_weight,
            batch.predictions.targets_N,
            batch.predictions.temperature_N,
        )
        tokens = batch.loss_tokens(logprobs_N, entropy_N)
        losses = self._loss(self._algorithm, tokens) if own is None else own_losses(own, tokens)
        uneven = self._imbalance(batch, context, step.num_sequences)
        (losses.loss if uneven is None else losses.loss + self._train.balance_weight * uneven).backward()
        return measure(batch, logprobs_N, entropy_N, losses, context.routes, uneven)

    def _imbalance(self, batch: MicroBatch, context: AttentionContext, num_sequences_of_step: int) -> Tensor | None:
        """This micro-batch's part of how unevenly the experts are used; None: nobody weighs it."""
        if not self._train.balance_weight or not isinstance(context.routes, RouteReplay):
            return None
        rows_N = batch.predictions.rows_N
        layers = [
            imbalance(each.chances_TX[rows_N], each.chosen_TK[rows_N], batch.sequence_N, batch.num_sequences)
            for _, each in sorted(context.routes.routed.items())
        ]
        return torch.stack(layers).mean() / num_sequences_of_step

    def idle(self) -> None:
        """A pass that adds nothing: where the weights are sharded, a rank without samples must take part in every
        exchange of the others. Without gradients only the forward pass runs."""
        device = self.model.device
        keys = KeyIndex(
            slots_L=torch.zeros(1, dtype=torch.int32, device=device),
            starts_T=torch.zeros(1, dtype=torch.int64, device=device),
            counts_T=torch.ones(1, dtype=torch.int32, device=device),
        )
        first = torch.zeros(1, dtype=torch.int64, device=device)
        hidden_TD = self.model(first, first, AttentionContext(keys=keys), checkpoint=self._train.checkpoint_activations)
        if torch.is_grad_enabled():
            (hidden_TD.sum() * 0.0).backward()
