"""The alarm for a sampler whose log-probabilities are not the trainer's.

Owns: when a measured gap is told, and what can be done about it. Invariants: only tokens of the weights in training
count (older ones differ by right); it is told once when the limit is passed, and again only after a step within it.
"""

from __future__ import annotations

from collections.abc import Mapping

WHERE = "sampler against trainer"
INEXACT_LIMIT = 0.1  # mean nats a token; vLLM in bfloat16 was measured at 0.066 where the model is unsure


class GapAlarm:
    """Hears the metrics of each step. ``is_exact``: sampler and trainer should agree in every bit; ``is_corrected``:
    the algorithm weighs samples by what they differ."""

    def __init__(self, limit: float | None, *, is_exact: bool, is_corrected: bool) -> None:
        self._is_exact, self._is_corrected = is_exact, is_corrected
        self.limit = limit if limit is not None else 0.0 if is_exact else INEXACT_LIMIT
        self._is_on = False

    def hear(self, metrics: Mapping[str, float]) -> str | None:
        """What to tell, if anything. A step that measured no gap changes nothing."""
        mean = metrics.get("logprob_gap_mean")
        if mean is None:
            return None
        was_on, self._is_on = self._is_on, mean > self.limit
        if was_on or not self._is_on:
            return None
        outside = metrics.get("logprob_gap_outside", 0.0)
        most = metrics["logprob_gap_max"]
        return (
            f"log-probabilities of tokens of the current weights differ by {mean:.2g} on average, {most:.2g} at most, "
            f"{outside:.1%} of them by a ratio outside 1/2 to 2; the limit is {self.limit:g} (trainer.gap_alarm). "
            f"{self._remedy()}"
        )

    def _remedy(self) -> str:
        if self._is_exact:
            return "This engine should agree in every bit: run tandem verify on the recipe"
        if self._is_corrected:
            return "algorithm.importance corrects for it, at the price of variance; raise the limit if that is meant"
        return (
            'Set algorithm.importance = "truncated" or "masked", which weighs samples by that ratio, or sample exactly '
            '(engine.name = "tandem", numerics = "exact", quantize = "none")'
        )
