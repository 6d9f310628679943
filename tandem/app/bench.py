"""The bench of ``tandem verify``: a recipe's reduced model, episodes that it sampled, and gradients on them.

Owns: the model, which keeps the recipe's family, shapes of heads, numerics and adapters, but has few layers, a small
vocabulary and random weights; made-up rewards and streams. Refuses: judging (``verify``, ``knobs``).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.algorithms.credit import demonstration, pack_floats, preference, settle, stamp
from tandem.algorithms.spec import AlgorithmSpec, Data, Importance
from tandem.app.roles import critic_engine
from tandem.config.sections.engine import TrainSection
from tandem.config.sections.optimizer import OptimizerSection
from tandem.config.tree import Recipe
from tandem.core.types import (
    Completion,
    Episode,
    GenerateRequest,
    Group,
    Sample,
    SamplingParams,
    Task,
    Trajectory,
    floats,
    ids,
    mask,
)
from tandem.core.wire import derive_seed
from tandem.engine.compute import ComputeQueue
from tandem.engine.infer.loop import InferEngine
from tandem.engine.train.parallel import Setup
from tandem.engine.train.ranked import RankedTrainEngine
from tandem.engine.train.ranks import RankGroup
from tandem.engine.train.step import LocalTrainEngine
from tandem.engine.train.value import CriticEngine, RewardModelEngine, ValueModel
from tandem.engine.weights import PublishedWeights
from tandem.models.builtin import resolve_model
from tandem.models.causal_lm import CausalLM
from tandem.models.loader import init_model, read_spec
from tandem.models.lora import LoraSpec, adapters_of, add_adapters
from tandem.models.spec import ModelSpec
from tandem.trainer.batcher import make_plan

LAYERS, VOCABULARY, CONTEXT = 2, 512, 128
GROUPS, SIBLINGS, PROMPT = 2, 4, 12
CLOSE = 1e-5  # of the largest gradient, in float32: sums in another order
STILL = OptimizerSection(learning_rate=0.0, warmup_steps=0, beta1=0.0, max_grad_norm=0.0)
WHOLE = TrainSection(micro_batch_tokens=65536, share_prefixes=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the table."""

    name: str
    wanted: str
    found: str
    holds: bool


class Bench:
    """The reduced model of a recipe, and what is measured on it."""

    def __init__(self, recipe: Recipe, method: AlgorithmSpec, compute: ComputeQueue) -> None:
        self.recipe, self.method, self.compute = recipe, method, compute
        self.spec = reduced(read_spec(resolve_model(recipe.model.path)))
        self.rng = np.random.default_rng(derive_seed("verify", recipe.trainer.seed))
        self.prompts = [self.rng.integers(0, self.spec.vocab_size, PROMPT).tolist() for _ in range(GROUPS)]

    @property
    def whole(self) -> TrainSection:
        """The step in one piece, with what of the recipe belongs to the loss."""
        return WHOLE.model_copy(update={"balance_weight": self.recipe.engine.train.balance_weight})

    @property
    def adapters(self) -> LoraSpec | None:
        """The kind of adapters the recipe has."""
        lora = self.recipe.lora
        if not (lora.rank or lora.path):
            return None
        return LoraSpec(rank=lora.rank or 8, alpha=lora.alpha, targets=lora.targets, dora=lora.dora)

    def model(self, dtype: torch.dtype) -> CausalLM:
        """Always the same random weights, and where the recipe has adapters, some that do something."""
        model = init_model(self.spec, seed=0, dtype=dtype, numerics=self.recipe.engine.numerics)
        if self.adapters is None:
            return model
        add_adapters(model, self.adapters, seed=0)
        with torch.no_grad():
            for adapter in adapters_of(model).values():
                adapter.b.normal_(std=0.05, generator=torch.Generator().manual_seed(1))
        return model

    async def sample(self, model: CausalLM, which: Sequence[int] | None = None) -> list[Completion]:
        """Completions of the requests ``which`` (all), side by side in one engine."""
        weights = PublishedWeights(model)
        engine = InferEngine(
            model, weights, self.recipe.engine, self.compute, max_context_tokens=CONTEXT, eos_ids=()
        )
        try:
            requests = [self._request(number) for number in range(GROUPS * SIBLINGS)]
            chosen = [requests[number] for number in (range(len(requests)) if which is None else which)]
            return list(await asyncio.gather(*(engine.generate(request) for request in chosen)))
        finally:
            await engine.close()

    def _request(self, number: int) -> GenerateRequest:
        params = SamplingParams(max_tokens=4 + 3 * (number % SIBLINGS), temperature=self.recipe.rollout.temperature)
        prompt = ids(self.prompts[number // SIBLINGS])
        return GenerateRequest(id=f"r{number}", prompt_ids=prompt, params=params, seed=number)

    def trajectories(self, completions: Sequence[Completion]) -> list[Trajectory]:
        made = []
        for number, completion in enumerate(completions):
            prompt, n = ids(self.prompts[number // SIBLINGS]), len(completion.token_ids)
            made.append(
                Trajectory(
                    episode_id=f"e{number}",
                    group_id=f"g{number // SIBLINGS}",
                    token_ids=prompt + completion.token_ids,
                    loss_mask=mask([0] * PROMPT + [1] * n),
                    logprobs=floats([0.0] * PROMPT) + completion.logprobs,
                    versions=ids([-1] * PROMPT) + completion.versions,
                    num_prompt_tokens=PROMPT,
                    temperature=self.recipe.rollout.temperature,
                    routes=completion.routes,
                )
            )
        return made

    def samples(self, trajectories: Sequence[Trajectory], method: AlgorithmSpec, *, drift: float) -> list[Sample]:
        """Samples with made-up rewards and streams; ``drift`` is how far the sampler's log-probabilities are moved
        from the weights', so that ratios are not 1."""
        rng = np.random.default_rng(7)

        def stream(trajectory: Trajectory, scale: float) -> np.ndarray:
            return np.array(trajectory.logprobs) + np.array(trajectory.loss_mask) * rng.normal(0, scale, len(
                trajectory.logprobs))  # fmt: skip

        if method.data is not Data.EPISODES:
            made = [demonstration(t.episode_id, t.token_ids, t.loss_mask) for t in trajectories]
            if method.data is Data.PREFERENCES:
                made = [half for a, b in zip(made[::2], made[1::2], strict=True) for half in preference(a, b)]
        else:
            moved = [dataclasses.replace(t, logprobs=pack_floats(stream(t, drift))) for t in trajectories]
            made = []
            for group in range(GROUPS):
                own = moved[group * SIBLINGS : (group + 1) * SIBLINGS]
                episodes = tuple(
                    Episode(
                        id=t.episode_id, task_id="t", group_id=t.group_id, index=index, attempt=0, seed=0, turns=(),
                        reward=float(rng.normal()),
                    )
                    for index, t in enumerate(own)
                )  # fmt: skip
                made += stamp(method, Group(id=f"g{group}", task=Task(id="t", messages=()), episodes=episodes), own)
        dressed = [
            dataclasses.replace(
                sample,
                reference_logprobs=pack_floats(stream(t, 0.3)),
                old_logprobs=pack_floats(stream(t, 0.3)) if method.importance is not Importance.NONE else None,
                values=pack_floats(rng.normal(0, 0.3, len(t.token_ids))) if method.critic else None,
            )
            for sample, t in zip(made, trajectories, strict=True)
        ]
        return settle(method, dressed)

    async def gradient(
        self, method: AlgorithmSpec, samples: Sequence[Sample], section: TrainSection
    ) -> dict[str, Tensor]:
        """The step's gradient, in float32, read from the first moment of an optimizer that keeps no memory."""
        engine = self.engine(method, section, STILL, total_steps=1)
        await engine.step(make_plan(1, samples, method, section))
        return {name: value for name, value in engine.optimizer.moments().items() if name.startswith("exp_avg.")}

    @property
    def scores(self) -> bool:
        """Whether the recipe trains a reward model."""
        return self.method.loss.endswith(":bradley_terry")

    def engine(
        self, method: AlgorithmSpec, section: TrainSection, optimizer: OptimizerSection, *, total_steps: int
    ) -> LocalTrainEngine | RewardModelEngine:
        """A fresh engine on the float32 model; of a reward model with a head that does something."""
        model = self.model(torch.float32)
        if not self.scores:
            return LocalTrainEngine(
                PublishedWeights(model), self.compute, train=section, optimizer=optimizer, algorithm=method,
                total_steps=total_steps,
            )  # fmt: skip
        scoring = ValueModel(model)
        with torch.no_grad():
            scoring.head.weight.normal_(generator=torch.Generator().manual_seed(2))
        return RewardModelEngine(
            scoring, self.compute, train=section, optimizer=optimizer, algorithm=method, total_steps=total_steps
        )

    async def critic_gradient(self, recipe: Recipe, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """The gradient of a fresh critic with the knobs of ``recipe``, as ``gradient`` reads it."""
        still = recipe.model_copy(
            update={"optimizer": STILL, "critic": recipe.critic.model_copy(update={"learning_rate": 0.0})}
        )
        critic = self._critic(still)
        await critic.step(make_plan(1, samples, self.method, recipe.engine.train))
        return {name: value for name, value in critic.optimizer.moments().items() if name.startswith("exp_avg.")}

    async def critic_weights(self, recipe: Recipe, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """How far one update of a fresh critic moves its weights, past the warm-up."""
        critic = self._critic(recipe)
        start = {name: weight.clone() for name, weight in critic.optimizer.weights().items()}
        await critic.step(make_plan(recipe.optimizer.warmup_steps + 1, samples, self.method, recipe.engine.train))
        return {name: weight - start[name] for name, weight in critic.optimizer.weights().items()}

    def _critic(self, recipe: Recipe) -> CriticEngine:
        """With a head that does something: one of zeros has no gradient for the body."""
        critic = critic_engine(recipe, self.model(torch.float32), self.compute)
        with torch.no_grad():
            critic.model.head.weight.normal_(std=0.02, generator=torch.Generator().manual_seed(2))
        return critic

    async def ranked_gradient(self, samples: Sequence[Sample], ranks: RankGroup) -> dict[str, Tensor]:
        """The same by the processes of a group."""
        weights = PublishedWeights(self.model(torch.float32))
        setup = Setup(
            spec=self.spec, lora=self.adapters, dtype=torch.float32, numerics=self.recipe.engine.numerics,
            train=self.recipe.engine.train, optimizer=STILL, algorithm=self.method,
        )  # fmt: skip
        engine = await RankedTrainEngine.open(weights, self.compute, ranks, setup=setup, total_steps=1)
        await engine.step(make_plan(1, samples, self.method, self.recipe.engine.train))
        moments = await asyncio.to_thread(engine.optimizer.moments)
        return {name: value for name, value in moments.items() if name.startswith("exp_avg.")}


def reduced(spec: ModelSpec) -> ModelSpec:
    """Few layers and a small vocabulary; heads, widths and capabilities as they are."""
    layers = min(LAYERS, spec.num_layers)
    return dataclasses.replace(
        spec, num_layers=layers, windows=spec.windows[:layers], vocab_size=min(VOCABULARY, spec.vocab_size),
        max_positions=max(CONTEXT, min(spec.max_positions, 1024)), eos_ids=(), bos_id=None, pad_id=None,
    )  # fmt: skip


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Largest difference of two gradients, over the largest entry of the first."""
    largest = max(float(value.abs().max()) for value in one.values())
    apart = max(float((value - other[name]).abs().max()) for name, value in one.items())
    return apart / largest if largest else float(apart > 0)
