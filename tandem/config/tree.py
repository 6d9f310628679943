"""The root of the configuration, and the checks that cross sections."""

from __future__ import annotations

from pydantic import model_validator

from tandem.config.sections.algorithm import AlgorithmSection
from tandem.config.sections.critic import CriticSection
from tandem.config.sections.data import DataSection
from tandem.config.sections.engine import EngineSection
from tandem.config.sections.environment import EnvironmentSection
from tandem.config.sections.lora import LoraSection
from tandem.config.sections.model import ModelSection
from tandem.config.sections.optimizer import OptimizerSection
from tandem.config.sections.record import RecordSection
from tandem.config.sections.reward_model import RewardModelSection
from tandem.config.sections.rollout import RolloutSection
from tandem.config.sections.sandbox import SandboxSection
from tandem.config.sections.section import Section
from tandem.config.sections.trainer import TrainerSection
from tandem.config.sections.warmup import WarmupSection


class Recipe(Section):
    """A whole run. Every table has defaults; an empty recipe is the demo."""

    model: ModelSection = ModelSection()
    lora: LoraSection = LoraSection()
    environment: EnvironmentSection = EnvironmentSection()
    data: DataSection = DataSection()
    rollout: RolloutSection = RolloutSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    critic: CriticSection = CriticSection()
    reward_model: RewardModelSection = RewardModelSection()
    trainer: TrainerSection = TrainerSection()
    optimizer: OptimizerSection = OptimizerSection()
    warmup: WarmupSection = WarmupSection()
    engine: EngineSection = EngineSection()
    sandbox: SandboxSection = SandboxSection()
    record: RecordSection = RecordSection()

    @model_validator(mode="after")
    def _crossing(self) -> Recipe:
        # W5: a truncated support in the sampler and a full one in the trainer scales every ratio.
        if self.trainer.steps and (self.rollout.top_p < 1 or self.rollout.top_k > 0):
            raise ValueError(
                "rollout.top_p and rollout.top_k truncate the sampler's support, but the trainer computes full-support "
                "log-probabilities; set rollout.top_p = 1 and rollout.top_k = 0 to train"
            )
        if self.engine.name != "tandem":
            self._check_foreign()
        if self.engine.infer.swap_tokens and not self.engine.infer.prefix_cache:
            raise ValueError(
                "engine.infer.swap_tokens: what was swapped is found by its prefix, and engine.infer.prefix_cache is "
                "off; turn that on or set swap_tokens = 0"
            )
        if self.trainer.deterministic and self.rollout.staleness:
            raise ValueError("trainer.deterministic needs rollout.staleness = 0: overlap depends on timing")
        if self.engine.train.hand_over and self.rollout.staleness:
            raise ValueError("engine.train.hand_over needs rollout.staleness = 0: sampling goes on while a step trains")
        if self.rollout.max_turn_tokens >= self.model.max_context_tokens:
            raise ValueError(
                f"rollout.max_turn_tokens ({self.rollout.max_turn_tokens}) must be below model.max_context_tokens "
                f"({self.model.max_context_tokens})"
            )
        return self

    def _check_foreign(self) -> None:
        """What only our own engine does is refused here, by name."""
        lacks = {
            'engine.quantize = "int8"': self.engine.quantize != "none",
            "engine.infer.swap_tokens": self.engine.infer.swap_tokens > 0,
            "trainer.deterministic": self.trainer.deterministic,
            "engine.train.hand_over": self.engine.train.hand_over,
            "lora": bool(self.lora.rank or self.lora.path),
        }
        for what, is_asked in lacks.items():
            if is_asked:
                raise ValueError(f"engine.name = \"{self.engine.name}\" has no {what}; leave out one of them")
