"""What a request changes in its logits before they are sampled: bias, penalties, a guide's mask, min-p.

Invariant: a row depends on its own request alone, and a request that asks for nothing is not touched.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from tandem.engine.infer.request import Request


def is_shaped(request: Request) -> bool:
    """Whether ``shape`` would change anything."""
    params = request.params
    return bool(
        params.logit_bias
        or params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
        or params.min_p
        or request.guide is not None
    )


def shape(logits_V: Tensor, request: Request) -> None:
    """Change one row of float32 logits in place."""
    params = request.params
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(request.tokens[: request.num_tokens]).astype(np.int64)).to(logits_V.device)
        values = logits_V[seen]
        penalty = params.repetition_penalty
        logits_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if params.frequency_penalty or params.presence_penalty:
        answer = request.tokens[request.num_prompt : request.num_tokens]
        tokens, counts = np.unique(answer, return_counts=True)
        where = torch.from_numpy(tokens.astype(np.int64)).to(logits_V.device)
        off = params.frequency_penalty * counts + params.presence_penalty
        logits_V[where] -= torch.from_numpy(off.astype(np.float32)).to(logits_V.device)
    if params.logit_bias:
        tokens_B = torch.tensor([token for token, _ in params.logit_bias], device=logits_V.device)
        logits_V.index_add_(0, tokens_B, torch.tensor([bias for _, bias in params.logit_bias], device=logits_V.device))
    if request.guide is not None:
        allowed = np.asarray(request.guide.allowed(), dtype=bool)
        mask = np.zeros(logits_V.shape[0], bool)  # a model may have more rows than its tokenizer has ids
        mask[: len(allowed)] = allowed[: len(mask)]
        logits_V.masked_fill_(torch.from_numpy(~mask).to(logits_V.device), -torch.inf)
    if params.min_p:
        least = logits_V.max() + (params.temperature or 1.0) * math.log(params.min_p)
        logits_V.masked_fill_(logits_V < least, -torch.inf)
