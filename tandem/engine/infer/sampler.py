"""From logits to tokens: truncation, the log-probabilities of what is really sampled, and counter-based draws.

Invariants: a row's token and log-probability depend on its own logits, parameters, seed and index only. Without
truncation the log-probabilities are the very operation that training applies, so they have its bits.
Ties at the edge of top-k or top-p stay together: what is kept does not depend on how a sort breaks ties.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.core.types import Top, floats, ids
from tandem.kernels.functions import row_logprobs

GOLDEN, MIX_1, MIX_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
SHORTLIST = 1024  # largest logits that top-p looks at before it sorts a whole row


@dataclass(slots=True)
class Draws:
    """Sampling parameters of N rows; ``index_N`` counts the tokens that a request has sampled before."""

    temperature_N: np.ndarray
    top_k_N: np.ndarray
    top_p_N: np.ndarray
    seed_N: np.ndarray
    index_N: np.ndarray


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * MIX_1
    x = (x ^ (x >> np.uint64(27))) * MIX_2
    return x ^ (x >> np.uint64(31))


def uniforms(seed_N: np.ndarray, index_N: np.ndarray) -> np.ndarray:
    """A number in [0, 1) for each (seed, index), float64: two rounds of a 64-bit mixer, no state."""
    seed, index = seed_N.astype(np.uint64), index_N.astype(np.uint64)
    mixed = _mix(_mix(seed + GOLDEN) + (index + np.uint64(1)) * GOLDEN)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(logits_NV: Tensor, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
    """One token a row (int64) and its log-probability (float32)."""
    return choose(logits_NV, draws)[:2]


def choose(logits_NV: Tensor, draws: Draws) -> tuple[np.ndarray, np.ndarray, Tensor]:
    """As ``sample``, with all log-probabilities of the distributions that were sampled (float32 ``[N, V]``)."""
    greedy = draws.temperature_N == 0
    temperature_N = torch.from_numpy(np.where(greedy, np.float32(1), draws.temperature_N)).to(logits_NV.device)
    truncated = ~greedy & ((draws.top_k_N > 0) | (draws.top_p_N < 1))
    if truncated.any():
        _truncate(logits_NV, temperature_N, np.flatnonzero(truncated), draws)
    logp_NV = row_logprobs(logits_NV, temperature_N)
    tokens_N = torch.empty(len(greedy), dtype=torch.int64, device=logits_NV.device)
    for rows, pick in ((np.flatnonzero(greedy), _greedy), (np.flatnonzero(~greedy), _draw)):
        if len(rows) == len(greedy):
            tokens_N = pick(logp_NV, logits_NV, draws)
        elif len(rows):
            where = torch.from_numpy(rows).to(logits_NV.device)
            part = Draws(*(getattr(draws, name)[rows] for name in Draws.__slots__))
            tokens_N[where] = pick(logp_NV[where], logits_NV[where], part)
    logprobs_N = logp_NV.gather(1, tokens_N[:, None])[:, 0]
    return tokens_N.cpu().numpy(), logprobs_N.cpu().numpy(), logp_NV


def likeliest(logp_V: Tensor, count: int) -> Top:
    """The ``count`` likeliest tokens of one row; those that cannot come are not among them."""
    best = torch.topk(logp_V, min(count, logp_V.shape[0]))
    possible = torch.isfinite(best.values)
    return Top(token_ids=ids(best.indices[possible].tolist()), logprobs=floats(best.values[possible].tolist()))


def _greedy(logp_NV: Tensor, logits_NV: Tensor, draws: Draws) -> Tensor:
    return logits_NV.argmax(1)


def _draw(logp_NV: Tensor, logits_NV: Tensor, draws: Draws) -> Tensor:
    """Invert each row's cumulative distribution, in float64 so that small probabilities count."""
    cumulative_NV = logp_NV.exp().cumsum(1, dtype=torch.float64)
    total_N = cumulative_NV[:, -1]
    u_N = torch.from_numpy(uniforms(draws.seed_N, draws.index_N)).to(logp_NV.device)
    # Strictly below the total: the token found then has a probability above zero.
    aim_N = torch.minimum(u_N * total_N, torch.nextafter(total_N, torch.zeros_like(total_N)))
    return torch.searchsorted(cumulative_NV, aim_N[:, None], right=True)[:, 0]


def _truncate(logits_NV: Tensor, temperature_N: Tensor, rows: np.ndarray, draws: Draws) -> None:
    """Set what top-k and then top-p (of what top-k left) exclude to -inf, in place."""
    for row in rows.tolist():  # rows differ in everything, and a sort of one row is what costs
        logits_V = logits_NV[row]
        k = int(draws.top_k_N[row])
        top_p = float(draws.top_p_N[row])
        if 0 < k < logits_V.shape[0]:
            least = torch.topk(logits_V, k).values[-1]
            logits_V.masked_fill_(logits_V < least, -torch.inf)
        if top_p < 1:
            least = _nucleus_edge(logits_V, temperature_N[row], top_p)
            logits_V.masked_fill_(logits_V < least, -torch.inf)


def _nucleus_edge(logits_V: Tensor, temperature: Tensor, top_p: float) -> Tensor:
    """The smallest logit of the fewest largest ones whose probabilities reach ``top_p``."""
    scaled_V = logits_V / temperature
    log_total = torch.logsumexp(scaled_V.double(), 0)
    for count in (min(SHORTLIST, len(logits_V)), len(logits_V)):
        best = torch.topk(logits_V, count).values
        mass = ((best / temperature).double() - log_total).exp().cumsum(0)
        place = torch.searchsorted(mass, torch.tensor(top_p, dtype=torch.float64, device=mass.device))
        if place < count:
            return best[place]
    return best[-1]
