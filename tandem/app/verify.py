"""What must not change a result, changed; and what must, turned: on the user's recipe with a reduced model.

Owns: ``tandem verify``. The model keeps the recipe's family, shapes of heads, numerics and adapters, but has few
layers, a small vocabulary and random weights; the episodes are sampled by the recipe's engine. Refuses: judging how
well a recipe learns. Invariant: every line of the table is measured here and now; nothing is assumed.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.algorithms.credit import demonstration, pack_floats, preference, settle, stamp
from tandem.algorithms.spec import AlgorithmSpec, Data, Importance, resolve
from tandem.app.build import DTYPES, prepare_process
from tandem.config.sections.algorithm import AlgorithmSection
from tandem.config.sections.engine import TrainSection
from tandem.config.sections.optimizer import OptimizerSection
from tandem.config.tree import Recipe
from tandem.core.errors import ConfigError
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
from tandem.engine.weights import PublishedWeights
from tandem.models.builtin import resolve_model
from tandem.models.causal_lm import CausalLM
from tandem.models.loader import init_model, read_spec
from tandem.models.lora import LoraSpec, adapters_of, add_adapters
from tandem.models.spec import ModelSpec
from tandem.record.summary import table
from tandem.trainer.batcher import make_plan

LAYERS, VOCABULARY, CONTEXT = 2, 512, 128
GROUPS, SIBLINGS, PROMPT = 2, 4, 12
CLOSE = 1e-5  # of the largest gradient, in float32: sums in another order
STILL = OptimizerSection(learning_rate=0.0, warmup_steps=0, beta1=0.0, max_grad_norm=0.0)
DRIFTS = (1.5, 0.1, 0.005)
WHOLE = TrainSection(micro_batch_tokens=65536, share_prefixes=False)
TURNED: dict[str, object] = {
    "clip_low": 0.02, "clip_high": 0.02, "clip_dual": 1.2, "kl_weight": 0.37, "entropy_weight": 0.21,
    "importance_cap": 1.1, "beta": 0.9, "label_smoothing": 0.3, "length_cap": 37,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the table."""

    name: str
    wanted: str
    found: str
    holds: bool


def verify(recipe: Recipe) -> int:
    """Check a recipe and print the table; 0 if every invariant holds and every knob binds, else 1."""
    checks = asyncio.run(examine(recipe))
    rows = [["check", "wanted", "found", ""]]
    rows += [[check.name, check.wanted, check.found, "ok" if check.holds else "BROKEN"] for check in checks]
    print(table(rows))
    broken = sum(not check.holds for check in checks)
    print(f"\n{len(checks)} checks, {broken} broken")
    return 1 if broken else 0


async def examine(recipe: Recipe, *, algorithm: AlgorithmSpec | None = None, num_ranks: int = 2) -> list[Check]:
    """Run all checks; ``algorithm`` stands in for the recipe's. The gradient of one process is compared with that of
    ``num_ranks`` (1: not compared)."""
    prepare_process(recipe)
    method = algorithm or resolve(recipe.algorithm)
    if method.loss.endswith(":bradley_terry"):
        raise ConfigError("reward models are not verified yet", hint="verify a recipe of sft, dpo, or of episodes")
    compute = ComputeQueue()
    try:
        bench = Bench(recipe, method, compute)
        checks = await _engine_checks(bench)
        checks += await _gradient_checks(bench)
        if num_ranks > 1:
            checks.append(await _rank_check(bench, num_ranks))
        return checks + await _knob_checks(bench)
    finally:
        compute.close()


class Bench:
    """The reduced model of a recipe, and what is measured on it."""

    def __init__(self, recipe: Recipe, method: AlgorithmSpec, compute: ComputeQueue) -> None:
        self.recipe, self.method, self.compute = recipe, method, compute
        self.spec = reduced(read_spec(resolve_model(recipe.model.path)))
        self.rng = np.random.default_rng(derive_seed("verify", recipe.trainer.seed))
        self.prompts = [self.rng.integers(0, self.spec.vocab_size, PROMPT).tolist() for _ in range(GROUPS)]

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
        engine = LocalTrainEngine(
            PublishedWeights(self.model(torch.float32)), self.compute, train=section, optimizer=STILL,
            algorithm=method, total_steps=1,
        )  # fmt: skip
        await engine.step(make_plan(1, samples, method, section))
        return {name: value for name, value in engine.optimizer.moments().items() if name.startswith("exp_avg.")}

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


async def _engine_checks(bench: Bench) -> list[Check]:
    model = bench.model(DTYPES[bench.recipe.model.dtype])
    together = await bench.sample(model)
    alone = [(await bench.sample(model, [number]))[0] for number in range(len(together))]
    apart = sum(a.token_ids != b.token_ids or a.logprobs != b.logprobs for a, b in zip(together, alone, strict=True))
    engine = LocalTrainEngine(
        PublishedWeights(model), bench.compute, train=bench.recipe.engine.train, optimizer=STILL,
        algorithm=bench.method, total_steps=1,
    )  # fmt: skip
    scored = await engine.score(bench.trajectories(together))
    gap = max(
        float(np.abs(np.array(stream[PROMPT:]) - np.array(completion.logprobs)).max())
        for stream, completion in zip(scored, together, strict=True)
    )
    exact = bench.recipe.engine.numerics == "exact"
    loose = 1e-4 if bench.recipe.model.dtype == "float32" else 0.1
    checks = [
        Check(
            name="sampler against trainer, log-probabilities", wanted="equal bits" if exact else f"within {loose}",
            found=f"{gap:.2g} apart", holds=gap == 0 if exact else gap <= loose,
        )
    ]  # fmt: skip
    if exact:
        checks.append(
            Check(
                name="a request alone and among others", wanted="equal tokens and bits",
                found=f"{apart} of {len(together)} differ", holds=apart == 0,
            )
        )  # fmt: skip
    return checks


async def _gradient_checks(bench: Bench) -> list[Check]:
    trajectories = bench.trajectories(await bench.sample(bench.model(torch.float32)))
    samples = bench.samples(trajectories, bench.method, drift=0.3)
    whole = await bench.gradient(bench.method, samples, WHOLE)
    size = max(float(value.abs().max()) for value in whole.values())
    checks = [Check(name="there is a gradient", wanted="not 0", found=f"largest {size:.2g}", holds=size > 0)]
    unit = 2 if bench.method.data is Data.PREFERENCES else 1
    backwards = [sample for begin in range(len(samples) - unit, -1, -unit) for sample in samples[begin : begin + unit]]
    cases: dict[str, tuple[Sequence[Sample], TrainSection]] = {
        "micro-batches of one sample": (samples, WHOLE.model_copy(update={"micro_batch_tokens": 16})),
        "micro-batches of 60 tokens": (samples, WHOLE.model_copy(update={"micro_batch_tokens": 60})),
        "samples in the opposite order": (backwards, WHOLE),
        "common beginnings computed once": (samples, WHOLE.model_copy(update={"share_prefixes": True})),
        "activations computed again": (samples, WHOLE.model_copy(update={"checkpoint_activations": True})),
        "as the recipe has it": (samples, bench.recipe.engine.train),
    }
    for name, (given, section) in cases.items():
        apart = difference(whole, await bench.gradient(bench.method, given, section))
        checks.append(
            Check(
                name=f"gradient: {name}", wanted=f"within {CLOSE:.0e}", found=f"{apart:.1e} apart", holds=apart <= CLOSE
            )
        )
    return checks


async def _rank_check(bench: Bench, num_ranks: int) -> Check:
    """One process's gradient against that of several, on the CPU whatever the recipe trains on."""
    samples = bench.samples(bench.trajectories(await bench.sample(bench.model(torch.float32))), bench.method, drift=0.3)
    whole = await bench.gradient(bench.method, samples, WHOLE)
    ranks = RankGroup(num_ranks, threads=bench.recipe.engine.threads or 1)
    try:
        await asyncio.to_thread(ranks.start)
        apart = difference(whole, await bench.ranked_gradient(samples, ranks))
    finally:
        ranks.close()
    return Check(
        name=f"gradient: {num_ranks} processes", wanted=f"within {CLOSE:.0e}", found=f"{apart:.1e} apart",
        holds=apart <= CLOSE,
    )  # fmt: skip


async def _knob_checks(bench: Bench) -> list[Check]:
    """Turn every knob of the method that is there to be turned, on samples more and more off-policy until one shows
    an effect: ratios of tokens and of sequences are clipped at very different distances."""
    trajectories = bench.trajectories(await bench.sample(bench.model(torch.float32)))
    before: dict[float, dict[str, Tensor]] = {}

    async def effect(method: AlgorithmSpec, drift: float) -> dict[str, Tensor]:
        return await bench.gradient(method, bench.samples(trajectories, method, drift=drift), WHOLE)

    checks = []
    for knob, value in TURNED.items():
        turned = _turned(bench, knob, value)
        if turned is None:
            continue
        change = 0.0
        for drift in DRIFTS:
            if drift not in before:
                before[drift] = await effect(bench.method, drift)
            change = max(change, difference(before[drift], await effect(turned, drift)))
            if change > CLOSE:
                break
        now = getattr(bench.method, knob)
        checks.append(
            Check(
                name=f"algorithm.{knob} from {now:g} to {getattr(turned, knob):g}", wanted="another gradient",
                found=f"{change:.1e} apart", holds=change > CLOSE,
            )
        )  # fmt: skip
    return checks


def _turned(bench: Bench, knob: str, value: object) -> AlgorithmSpec | None:
    """The method with one knob turned; None where the method has no such knob (the recipe would be refused)."""
    section: Callable[..., AlgorithmSection] = bench.recipe.algorithm.model_copy
    try:
        turned = resolve(section(update={knob: value}))
    except ConfigError:
        return None
    if getattr(turned, knob) == getattr(bench.method, knob):
        return None
    return dataclasses.replace(bench.method, **{knob: getattr(turned, knob)})
