"""What a training method is: a record that names its credit and loss functions.

Owns: the fields of a method, the table of built-in methods, and how the `[algorithm]` section adjusts one.
Refuses: computing anything; torch (a loss is named by string and loaded by the engine).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

from tandem.config.sections.algorithm import AlgorithmSection
from tandem.core.errors import ConfigError
from tandem.core.registry import Registry


class Ratio(StrEnum):
    """What the probability of new to old policy is taken over."""

    NONE = "none"  # plain policy gradient: the log-probability itself
    TOKEN = "token"
    SEQUENCE = "sequence"  # exp of the mean log-ratio of the sequence


class Aggregate(StrEnum):
    """How per-token losses become one number. All three are one weight per token, fixed for the whole step."""

    TOKEN_MEAN = "token_mean"  # 1 / loss tokens of the step
    SEQUENCE_MEAN = "sequence_mean"  # 1 / (sequences of the step x loss tokens of this sequence)
    CONSTANT_LENGTH = "constant_length"  # 1 / (sequences of the step x length cap)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSpec:
    """One method. ``credit`` maps the rewards of a group to advantages (None: supervised, no rewards);
    both ``credit`` and ``loss`` are ``module:attribute`` names."""

    name: str
    summary: str
    credit: str | None
    aggregate: Aggregate
    loss: str = "tandem.algorithms.losses:token_losses"
    ratio: Ratio = Ratio.TOKEN
    clip_low: float | None = None  # None: the ratio is not clipped
    clip_high: float | None = None
    clip_dual: float | None = None  # None: nothing bounds the ratio where the advantage is negative
    kl_weight: float = 0.0
    drop_flat: bool = False  # a group whose advantages are all 0 does not count in the normaliser
    length_cap: int = 0  # of CONSTANT_LENGTH

    @property
    def needs_reference(self) -> bool:
        """Whether samples must carry log-probabilities of the reference weights."""
        return self.kl_weight > 0


BUILTIN = {
    "sft": "tandem.algorithms.catalog.sft:SFT",
    "grpo": "tandem.algorithms.catalog.grpo:GRPO",
    "dr_grpo": "tandem.algorithms.catalog.grpo:DR_GRPO",
    "dapo": "tandem.algorithms.catalog.grpo:DAPO",
    "gspo": "tandem.algorithms.catalog.grpo:GSPO",
    "rloo": "tandem.algorithms.catalog.grpo:RLOO",
}


def algorithms() -> Registry:
    """Every known method by name."""
    return Registry("algorithm", BUILTIN)


def resolve(section: AlgorithmSection) -> AlgorithmSpec:
    """The method that the section names, with the section's knobs in place of the method's own.

    Raises:
        PluginError: no such method. ConfigError: the name leads to something else, or a knob does not apply.
    """
    found = algorithms().resolve(section.name)
    if not isinstance(found, AlgorithmSpec):
        raise ConfigError(f"algorithm.name = {section.name!r} is of type {type(found).__name__}, not AlgorithmSpec")
    changes: dict[str, object] = {}
    sides = {"clip_low": section.clip_low, "clip_high": section.clip_high, "clip_dual": section.clip_dual}
    for side, value in sides.items():
        if value is None:
            continue
        if found.clip_low is None:
            raise ConfigError(
                f"algorithm.{side} is set, but {found.name} does not clip",
                hint=f"remove algorithm.{side} or choose grpo",
            )
        changes[side] = value
    if section.kl_weight and found.credit is None:
        raise ConfigError(f"algorithm.kl_weight is set, but {found.name} has no policy-gradient tokens to weigh")
    changes["kl_weight"] = section.kl_weight or found.kl_weight
    if found.aggregate is Aggregate.CONSTANT_LENGTH:
        changes["length_cap"] = section.length_cap
    return dataclasses.replace(found, **changes)  # type: ignore[arg-type]


def function_named(target: str) -> Callable[..., object]:
    """Load a credit or loss function by ``module:attribute``."""
    return cast("Callable[..., object]", Registry("algorithm", {}).resolve(target))
