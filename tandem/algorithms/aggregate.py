"""One normaliser for the whole step: how much each token's loss counts.

Invariant: the share of a token depends on its sequence and the step, never on the micro-batch, the rank or
the padding it travels with; the loss of the step is the plain sum of share x weight x token loss.
"""

from __future__ import annotations

from tandem.algorithms.spec import Aggregate, AlgorithmSpec


def token_share(spec: AlgorithmSpec, *, sequence_tokens: int, num_loss_tokens: int, num_sequences: int) -> float:
    """The factor of one token's loss in a sequence with ``sequence_tokens`` loss tokens, in a step that has
    ``num_loss_tokens`` and ``num_sequences`` in all (every micro-batch and rank together)."""
    if sequence_tokens == 0:
        return 0.0
    match spec.aggregate:
        case Aggregate.TOKEN_MEAN:
            return 1.0 / num_loss_tokens
        case Aggregate.SEQUENCE_MEAN:
            return 1.0 / (sequence_tokens * num_sequences)
        case Aggregate.SEQUENCE_SUM:
            return 1.0 / num_sequences
        case Aggregate.CONSTANT_LENGTH:
            return 1.0 / (spec.length_cap * num_sequences)
        case Aggregate.PAIR_MEAN:
            return 2.0 / num_sequences
