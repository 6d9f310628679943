"""What is done with the experts that a pass chooses: noted beside keys and values, or replaced by noted ones.

Owns: the numbers of experts by layer and token. Refuses: the router, whose weights of the experts stay the pass's own.
Invariant: ``settle`` may be called twice for a layer (a recomputing backward pass does), gives the same both times, and
keeps what the first call gave: a loss on it belongs to the graph of the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from tandem.core.routes import MISSING


class Settles(Protocol):
    """Has the last word on a layer's experts."""

    def settle(self, place: int, own_TK: Tensor, chances_TX: Tensor) -> Tensor:
        """The experts to take for layer number ``place`` of those that have experts, ``[T, K]`` like its own choice.
        ``chances_TX`` are the router's probabilities of all experts."""
        ...


@dataclass(frozen=True, slots=True)
class RouteLog:
    """Notes each token's experts in the slot that its keys and values have. ``pool_SR`` is ``[slots, layers x K]``."""

    pool_SR: Tensor
    slots_T: Tensor

    def settle(self, place: int, own_TK: Tensor, chances_TX: Tensor) -> Tensor:
        per_token = own_TK.shape[1]
        columns = self.pool_SR[:, place * per_token : (place + 1) * per_token]
        columns.index_copy_(0, self.slots_T, own_TK.to(self.pool_SR.dtype))
        return own_TK


@dataclass(frozen=True, slots=True)
class Routed:
    """One layer's experts ``[T, K]`` and its router's probabilities ``[T, X]``, with gradient."""

    chosen_TK: Tensor
    chances_TX: Tensor


@dataclass(frozen=True, slots=True)
class RouteReplay:
    """The routes of a training pass. Takes the noted experts, ``given_TR`` ``[T, layers x K]``, and a token's own
    choice where none are noted (Ma et al. 2025, arXiv:2510.11370, rollout routing replay); None: nobody noted any.
    ``others`` holds, by layer, which tokens would have chosen otherwise; ``routed`` what the layers did."""

    given_TR: Tensor | None
    others: dict[int, Tensor] = field(default_factory=dict)
    routed: dict[int, Routed] = field(default_factory=dict)

    def settle(self, place: int, own_TK: Tensor, chances_TX: Tensor) -> Tensor:
        chosen_TK = own_TK
        if self.given_TR is not None:
            per_token = own_TK.shape[1]
            given_TK = self.given_TR[:, place * per_token : (place + 1) * per_token].to(own_TK.dtype)
            known_T = given_TK[:, 0] != MISSING
            self.others[place] = known_T & (given_TK != own_TK).any(dim=1)
            chosen_TK = torch.where(known_T[:, None], given_TK, own_TK)
        self.routed.setdefault(place, Routed(chosen_TK, chances_TX))
        return chosen_TK
