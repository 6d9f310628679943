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
from tandem.kernels.functions import draw, row_logprobs

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


def sample(logits_NV: Tensor, draws: Draws, *, portable: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """One token a row (int64) and its log-probability (float32). What truncation excludes becomes -inf in the logits.
    ``portable``: by the kernels that run everywhere (``Ops.portable``).

    Raises:
        EngineError: a row has no finite distribution.
    """
    greedy = draws.temperature_N == 0
    temperature_N = _temperatures(logits_NV, draws)
    truncated = ~greedy & ((draws.top_k_N > 0) | (draws.top_p_N < 1))
    if truncated.any():
        _truncate(logits_NV, temperature_N, np.flatnonzero(truncated), draws)
    u_N = torch.from_numpy(np.where(greedy, -1.0, uniforms(draws.seed_N, draws.index_N))).to(logits_NV.device)
    tokens_N, logprobs_N = draw(logits_NV, temperature_N, u_N, portable=portable)
    return tokens_N.cpu().numpy(), logprobs_N.cpu().numpy()


def likeliest(logits_NV: Tensor, draws: Draws, row: int, count: int, *, portable: bool = False) -> Top:
    """The ``count`` likeliest tokens of a row that ``sample`` has seen; those that cannot come are not among them."""
    temperature_N = _temperatures(logits_NV, draws)
    logp_1V = row_logprobs(logits_NV[row : row + 1], temperature_N[row : row + 1], portable=portable)
    return largest(logp_1V[0], count)


def largest(logp_V: Tensor, count: int) -> Top:
    """The ``count`` largest finite log-probabilities of one row."""
    best = torch.topk(logp_V, min(count, logp_V.shape[0]))
    possible = torch.isfinite(best.values)
    return Top(token_ids=ids(best.indices[possible].tolist()), logprobs=floats(best.values[possible].tolist()))


def _temperatures(logits_NV: Tensor, draws: Draws) -> Tensor:
    """What log-probabilities are taken at: 1 where the likeliest token is wanted."""
    temperature_N = np.where(draws.temperature_N == 0, np.float32(1), draws.temperature_N)
    return torch.from_numpy(temperature_N.astype(np.float32)).to(logits_NV.device)


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
