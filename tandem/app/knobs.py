"""Turns each knob of a recipe, one at a time, to see that it binds: a knob that changes nothing is reported.

Owns: the knobs of the method, of the critic and of the experts' balance, which must change a gradient, and those of the
optimizers, which must change the weights after a few updates. Refuses: the model and its samples (``bench``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tandem.algorithms.spec import AlgorithmSpec, Data, resolve
from tandem.app.bench import CLOSE, Bench, Check, difference
from tandem.config.sections.algorithm import AlgorithmSection
from tandem.config.sections.optimizer import OptimizerSection
from tandem.config.tree import Recipe
from tandem.core.errors import ConfigError
from tandem.core.types import Sample, Trajectory
from tandem.trainer.batcher import make_plan

DRIFTS = (1.5, 0.1, 0.005)
TURNED: dict[str, object] = {
    "clip_low": 0.02, "clip_high": 0.02, "clip_dual": 1.2, "kl_weight": 0.37, "entropy_weight": 0.21,
    "importance_cap": 1.1, "beta": 0.9, "label_smoothing": 0.3, "length_cap": 37,
    "kl_reward_weight": 0.41, "discount": 0.7, "decay": 0.6, "whiten": None,
}  # fmt: skip
MOVED = 1e-3  # of the largest change of a weight: what a turned knob of the optimizer must make at least


async def knob_checks(bench: Bench) -> list[Check]:
    """Turn every knob of the method that is there to be turned, on samples more and more off-policy until one shows
    an effect: ratios of tokens and of sequences are clipped at very different distances."""
    trajectories = bench.trajectories(await bench.sample(bench.model(torch.float32)))
    before: dict[float, dict[str, Tensor]] = {}

    async def effect(method: AlgorithmSpec, drift: float) -> dict[str, Tensor]:
        return await bench.gradient(method, bench.samples(trajectories, method, drift=drift), bench.whole)

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
        name = f"algorithm.{knob} from {'unset' if now is None else f'{now:g}'} to {getattr(turned, knob):g}"
        checks.append(_bound(name, change, CLOSE, "another gradient"))
    if bench.method.data is Data.EPISODES:
        hotter = [dataclasses.replace(each, temperature=each.temperature * 1.5) for each in trajectories]
        samples = bench.samples(hotter, bench.method, drift=DRIFTS[1])
        if DRIFTS[1] not in before:
            before[DRIFTS[1]] = await effect(bench.method, DRIFTS[1])
        change = difference(before[DRIFTS[1]], await bench.gradient(bench.method, samples, bench.whole))
        now = bench.recipe.rollout.temperature
        checks.append(_bound(f"rollout.temperature from {now:g} to {now * 1.5:g}", change, CLOSE, "another gradient"))
    if bench.spec.experts is not None and not bench.scores:  # reward models have no such loss
        checks.append(await _balance_check(bench, bench.samples(trajectories, bench.method, drift=DRIFTS[1])))
    if bench.method.critic:
        checks += await _critic_checks(bench, trajectories)
    return checks + await _optimizer_checks(bench, bench.samples(trajectories, bench.method, drift=0.1))


async def _balance_check(bench: Bench, samples: Sequence[Sample]) -> Check:
    now = bench.recipe.engine.train.balance_weight
    turned = bench.whole.model_copy(update={"balance_weight": now + 1.0})
    before = await bench.gradient(bench.method, samples, bench.whole)
    change = difference(before, await bench.gradient(bench.method, samples, turned))
    return _bound(f"engine.train.balance_weight from {now:g} to {now + 1:g}", change, CLOSE, "another gradient")


async def _critic_checks(bench: Bench, trajectories: Sequence[Trajectory]) -> list[Check]:
    """The critic's own knobs, and what the returns that it learns hang on."""
    recipe, checks = bench.recipe, []
    samples = bench.samples(trajectories, bench.method, drift=DRIFTS[1])
    before = await bench.critic_gradient(recipe, samples)
    for knob in ("discount", "decay"):
        turned = _turned(bench, knob, TURNED[knob])
        if turned is None:
            continue
        change = difference(before, await bench.critic_gradient(recipe, bench.samples(
            trajectories, turned, drift=DRIFTS[1])))  # fmt: skip
        name = f"critic: algorithm.{knob} from {getattr(bench.method, knob):g} to {getattr(turned, knob):g}"
        checks.append(_bound(name, change, CLOSE, "another gradient"))
    clip, rate = recipe.critic.clip, recipe.critic.learning_rate

    def other(**values: float) -> Recipe:
        return recipe.model_copy(update={"critic": recipe.critic.model_copy(update=values)})

    tighter = clip / 10 if clip else 0.02
    change = difference(before, await bench.critic_gradient(other(clip=tighter), samples))
    checks.append(_bound(f"critic.clip from {clip:g} to {tighter:g}", change, CLOSE, "another gradient"))
    if not rate:
        return [*checks, _bound("critic.learning_rate is 0", 0.0, MOVED, "other weights")]
    moved = await bench.critic_weights(recipe, samples)
    change = difference(moved, await bench.critic_weights(other(learning_rate=2 * rate), samples))
    return [*checks, _bound(f"critic.learning_rate from {rate:g} to {2 * rate:g}", change, MOVED, "other weights")]


def _bound(name: str, change: float, least: float, wanted: str) -> Check:
    return Check(name=name, wanted=wanted, found=f"{change:.1e} apart", holds=change > least)


async def _optimizer_checks(bench: Bench, samples: Sequence[Sample]) -> list[Check]:
    """Three updates on parts of the samples whose gradients differ in size: in the warm-up, and after it."""
    now = bench.recipe.optimizer
    if not now.learning_rate:
        return [_bound("optimizer.learning_rate is 0", 0.0, MOVED, "other weights")]
    half = samples[: len(samples) // 4 * 2]
    start = {name: p.detach().clone() for name, p in bench.model(torch.float32).named_parameters() if p.requires_grad}

    async def after(section: OptimizerSection) -> dict[str, Tensor]:
        engine = bench.engine(bench.method, bench.whole, section, total_steps=now.warmup_steps + 8)
        for step, part in ((1, samples), (now.warmup_steps + 4, half), (now.warmup_steps + 7, samples)):
            await engine.step(make_plan(step, part, bench.method, bench.whole))
        weights = {name.removeprefix("body."): each for name, each in engine.optimizer.weights().items()}
        return {name: weights[name] - start[name] for name in start if name in weights}

    moved = await after(now)
    turned: dict[str, object] = {
        "learning_rate": now.learning_rate * 2,
        "warmup_steps": now.warmup_steps + 5,
        "decay": "linear" if now.decay == "constant" else "constant",
        "beta1": 0.5 if now.beta1 > 0.6 else 0.9,
        "beta2": 0.5 if now.beta2 > 0.6 else 0.9,
        "epsilon": now.epsilon + 1e-2,
        "weight_decay": now.weight_decay + 1.0,
        "max_grad_norm": 1e-2 if now.max_grad_norm != 1e-2 else 2e-2,
    }
    if now.decay != "constant":
        turned["min_ratio"] = 1.0 if now.min_ratio < 0.5 else 0.0
    checks = []
    for knob, value in turned.items():
        change = difference(moved, await after(now.model_copy(update={knob: value})))
        shown = f"{getattr(now, knob)} to {value:g}" if isinstance(value, float) else f"{getattr(now, knob)} to {value}"
        checks.append(_bound(f"optimizer.{knob} from {shown}", change, MOVED, "other weights"))
    return checks


def _turned(bench: Bench, knob: str, value: object) -> AlgorithmSpec | None:
    """The method with one knob turned; None where the method has no such knob (the recipe would be refused)."""
    section: Callable[..., AlgorithmSection] = bench.recipe.algorithm.model_copy
    value = not bench.method.whiten if knob == "whiten" else value
    try:
        turned = resolve(section(update={knob: value}))
    except ConfigError:
        return None
    if getattr(turned, knob) == getattr(bench.method, knob):
        return None
    return dataclasses.replace(bench.method, **{knob: getattr(turned, knob)})
