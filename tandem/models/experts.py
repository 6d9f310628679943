"""A mixture of experts whose rows do not see each other.

Owns: the router and the order of sums. Refuses: capacity limits and dropped tokens, which would make a token depend
on its batch; a loss on the router, which is the trainer's (``algorithms.losses.imbalance``).
Invariants: the router's product, softmax and weights are float32, whatever the model's type; a row's experts are
added in ascending order of their numbers in float32 and rounded once. So a row's bits depend on that row alone.
"""

from __future__ import annotations

import torch
from torch import nn

from tandem.kernels.ops import Ops
from tandem.models.layers import GatedMLP, Linear
from tandem.models.routes import Settles
from tandem.models.spec import ModelSpec


class Mixture(nn.Module):
    """Each row through the ``per_token`` experts of the largest router probability (Shazeer et al. 2017,
    arXiv:1701.06538, without noise; probabilities before the choice as in Qwen3-MoE)."""

    def __init__(
        self, spec: ModelSpec, layer: int, ops: Ops, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        experts = spec.mixture(layer)
        assert experts is not None
        self.place = spec.mixtures.index(layer)
        self.ops = ops
        self.spec = experts
        self.router = Linear(spec.hidden_size, experts.num_experts, ops, bias=False, dtype=dtype, device=device)
        self.experts = nn.ModuleList(
            GatedMLP(spec, experts.intermediate_size, ops, dtype=dtype, device=device)
            for _ in range(experts.num_experts)
        )

    def route(self, x_TE: torch.Tensor, routes: Settles | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each row in ascending order, ``[T, per_token]``, and their weights, float32. ``routes`` has
        the last word on the experts; the weights are those that the router gives them."""
        scores_TX = self.ops.linear(x_TE.float(), self.router.weight.float())
        chances_TX = scores_TX.softmax(dim=1)
        chosen_TK = chances_TX.topk(self.spec.per_token, dim=1).indices.sort(dim=1).values
        if routes is not None:
            chosen_TK = routes.settle(self.place, chosen_TK, chances_TX)
        weights_TK = chances_TX.gather(1, chosen_TK)
        if self.spec.normalised:
            # Added one by one: how a reduction orders its terms may depend on the number of rows.
            total_T = weights_TK[:, 0]
            for place in range(1, self.spec.per_token):
                total_T = total_T + weights_TK[:, place]
            weights_TK = weights_TK / total_T[:, None]
        return chosen_TK, weights_TK

    def forward(self, x_TE: torch.Tensor, routes: Settles | None = None) -> torch.Tensor:
        chosen_TK, weights_TK = self.route(x_TE, routes)
        out_TE = torch.zeros(x_TE.shape, dtype=torch.float32, device=x_TE.device)
        for number in chosen_TK.unique().tolist():  # ascending; an expert nobody chose costs nothing
            rows, places = (chosen_TK == number).nonzero(as_tuple=True)
            given = self.experts[number](x_TE[rows]).float() * weights_TK[rows, places, None]
            out_TE = out_TE.index_add(0, rows, given)  # a row is there once, so this adds one term to it
        return out_TE.to(x_TE.dtype)
