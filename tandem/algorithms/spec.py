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
    """How per-token losses become one number. All are one weight per token, fixed for the whole step."""

    TOKEN_MEAN = "token_mean"  # 1 / loss tokens of the step
    SEQUENCE_MEAN = "sequence_mean"  # 1 / (sequences of the step x loss tokens of this sequence)
    SEQUENCE_SUM = "sequence_sum"  # 1 / sequences of the step: an answer is one action
    CONSTANT_LENGTH = "constant_length"  # 1 / (sequences of the step x length cap)
    PAIR_MEAN = "pair_mean"  # 2 / sequences of the step: each pair counts once


class Data(StrEnum):
    """What a method learns from."""

    EPISODES = "episodes"  # groups of rollouts with rewards
    DEMONSTRATIONS = "demonstrations"  # finished conversations
    PREFERENCES = "preferences"  # pairs of a better and a worse answer


class Importance(StrEnum):
    """How the weight of old to sampler's policy is bounded, where samples are stale or of another engine."""

    NONE = "none"  # no such weight: the sampler's log-probabilities are the old policy's
    TRUNCATED = "truncated"  # at most the cap
    MASKED = "masked"  # outside [1 / cap, cap] the token (or sequence) has no loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Default:
    """Where the value of a knob is from."""

    knob: str
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSpec:
    """One method. ``credit`` maps the rewards of a group to advantages (None: supervised, no rewards);
    both ``credit`` and ``loss`` are ``module:attribute`` names. ``source`` is the paper it follows, ``formula`` the
    loss in its notation, ``defaults`` where the values of its knobs are from."""

    name: str
    summary: str
    credit: str | None
    aggregate: Aggregate
    source: str = ""
    formula: str = ""
    defaults: tuple[Default, ...] = ()
    data: Data = Data.EPISODES
    loss: str = "tandem.algorithms.losses:token_losses"
    ratio: Ratio = Ratio.TOKEN
    clip_low: float | None = None  # None: the ratio is not clipped from below
    clip_high: float | None = None
    clip_dual: float | None = None  # None: nothing bounds the ratio where the advantage is negative
    clip_weight: bool = False  # the clipped ratio is a constant weight of the log-probability (CISPO)
    kl_weight: float = 0.0  # of the KL to the reference, in the loss
    kl_reward_weight: float = 0.0  # of the KL to the reference, taken from the reward
    kl_estimator: str = "k3"  # of the KL in the loss
    entropy_weight: float = 0.0  # of the entropy bonus
    flat_learns: bool = False  # an advantage of 0 does not mean a gradient of 0
    drop_flat: bool = False  # a group whose advantages are all 0 does not count in the normaliser
    whiten: bool = False  # advantages of the step's tokens are brought to mean 0 and deviation 1
    critic: bool = False  # advantages come from values (GAE), and a value model is trained beside
    discount: float = 1.0  # gamma of GAE
    decay: float = 1.0  # lambda of GAE
    teacher: bool = False  # the reference is another model, and the advantage its log-ratio to the sampler
    length_cap: int = 0  # of CONSTANT_LENGTH
    overlong_cap: int = 0  # over-long shaping: answers from here on have their reward lowered by 1; 0: none
    overlong_buffer: int = 0  # ... and by less in the last so many tokens before
    importance: Importance = Importance.NONE
    importance_level: Ratio = Ratio.TOKEN  # SEQUENCE: the product over the sequence
    importance_cap: float = 2.0
    beta: float = 0.1  # strength of the implicit KL of preference methods
    label_smoothing: float = 0.0  # share of preference labels taken to be wrong
    passes: int = 1  # optimizer passes over the samples of a step
    minibatches: int = 1  # optimizer updates in one pass

    @property
    def needs_reference(self) -> bool:
        """Whether samples must carry log-probabilities of the reference weights."""
        return self.kl_weight > 0 or self.kl_reward_weight > 0 or self.teacher or self.loss.endswith("preference_loss")

    @property
    def needs_old(self) -> bool:
        """Whether samples must carry log-probabilities of the weights that a step begins with."""
        return self.importance is not Importance.NONE

    @property
    def updates_per_step(self) -> int:
        return self.passes * self.minibatches


_GRPO = "tandem.algorithms.catalog.grpo"
_PAIRS = "tandem.algorithms.catalog.preference"
BUILTIN = {
    "sft": "tandem.algorithms.catalog.sft:SFT",
    "grpo": f"{_GRPO}:GRPO",
    "dr_grpo": f"{_GRPO}:DR_GRPO",
    "dapo": f"{_GRPO}:DAPO",
    "gspo": f"{_GRPO}:GSPO",
    "rloo": f"{_GRPO}:RLOO",
    "cispo": f"{_GRPO}:CISPO",
    "reinforce_pp": "tandem.algorithms.catalog.reinforce:REINFORCE_PP",
    "reinforce_pp_baseline": "tandem.algorithms.catalog.reinforce:REINFORCE_PP_BASELINE",
    "ppo": "tandem.algorithms.catalog.ppo:PPO",
    "distil": "tandem.algorithms.catalog.distil:DISTIL",
    "dpo": f"{_PAIRS}:DPO",
    "cdpo": f"{_PAIRS}:CDPO",
    "ipo": f"{_PAIRS}:IPO",
    "reward": f"{_PAIRS}:REWARD",
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
    own = section.model_dump(exclude={"name", "teacher"})
    given = {key: value for key, value in own.items() if value is not None}
    for key, value in given.items():
        if value != getattr(found, key) and (reason := _does_not_apply(found, key)):
            raise ConfigError(
                f"algorithm.{key} is set, but {found.name} {reason}",
                hint=f"remove algorithm.{key}, or choose another method",
            )
    for key, kind in (("importance", Importance), ("importance_level", Ratio)):
        if key in given:
            given[key] = kind(given[key])
    spec = dataclasses.replace(found, **given)  # type: ignore[arg-type]
    _check(spec, section)
    return spec


def _does_not_apply(spec: AlgorithmSpec, key: str) -> str:
    """Why a knob would change nothing; empty when it binds."""
    episodes = spec.data is Data.EPISODES
    match key:
        case "clip_low":
            return "" if spec.clip_low is not None else "does not clip there"
        case "clip_high":
            return "" if spec.clip_high is not None else "does not clip"
        case "clip_dual":
            return "" if spec.clip_low is not None and not spec.clip_weight else "does not clip there"
        case "length_cap":
            return "" if spec.aggregate is Aggregate.CONSTANT_LENGTH else "divides by no constant length"
        case "beta":
            return "" if spec.loss.endswith("preference_loss") else "is no method with an implicit KL"
        case "label_smoothing":
            return "" if spec.data is Data.PREFERENCES and spec.name != "ipo" else "has no labels to smooth"
        case "kl_weight" | "kl_reward_weight" | "kl_estimator" | "entropy_weight":
            return "" if episodes else "has no policy-gradient tokens to weigh"
        case "discount" | "decay":
            return "" if spec.critic else "has no critic"
        case "passes" | "minibatches" | "importance" | "importance_level" | "importance_cap" | "whiten":
            return "" if episodes else "learns from no rollouts"
        case "overlong_cap" | "overlong_buffer":
            return "" if episodes and not spec.teacher else "has no rewards to shape"
    return ""


def _check(spec: AlgorithmSpec, section: AlgorithmSection) -> None:
    if spec.kl_weight and spec.kl_reward_weight:
        raise ConfigError(
            f"the KL to the reference is both in the loss (algorithm.kl_weight = {spec.kl_weight:g}) and in the reward "
            f"(algorithm.kl_reward_weight = {spec.kl_reward_weight:g})",
            hint="set one of the two to 0; what the recipe leaves out is the method's own",
        )
    if spec.kl_weight and spec.kl_estimator == "k1":
        raise ConfigError(
            "algorithm.kl_estimator = \"k1\" in the loss has a gradient of 0 on average: the penalty would not pull",
            hint="k2 or k3, or put the KL into the reward: algorithm.kl_reward_weight (always k1)",
        )
    if section.kl_estimator is not None and not spec.kl_weight:
        raise ConfigError("algorithm.kl_estimator is set, but algorithm.kl_weight is 0: it changes nothing")
    if spec.importance is Importance.NONE and (section.importance_cap or section.importance_level):
        raise ConfigError(
            "algorithm.importance_cap or importance_level is set, but algorithm.importance is none: they change nothing"
        )
    if spec.overlong_buffer > spec.overlong_cap:
        raise ConfigError(
            f"algorithm.overlong_buffer ({spec.overlong_buffer}) is above algorithm.overlong_cap ({spec.overlong_cap})"
        )
    if spec.teacher and not section.teacher:
        raise ConfigError(f"{spec.name} needs a teacher", hint="set algorithm.teacher to a model folder")
    if section.teacher and not spec.teacher:
        raise ConfigError(f"algorithm.teacher is set, but {spec.name} has none", hint="algorithm.name = \"distil\"")
    if spec.teacher and (spec.kl_weight or spec.kl_reward_weight):
        raise ConfigError(f"{spec.name} takes no KL penalty: its reference is the teacher")
    if spec.ratio is Ratio.NONE and spec.updates_per_step > 1:
        raise ConfigError(
            f"{spec.name} has no ratio of new to old policy: a second update on the same samples would be biased",
            hint="algorithm.passes = 1 and minibatches = 1, or a method with a ratio",
        )


def function_named(target: str) -> Callable[..., object]:
    """Load a credit or loss function by ``module:attribute``."""
    return cast("Callable[..., object]", Registry("algorithm", {}).resolve(target))
