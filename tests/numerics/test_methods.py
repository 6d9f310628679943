"""Every method, from rewards to the gradient, against its paper's formula written out in float64.

Ours: credit, settling, shares and loss as the trainer runs them. The other side: sums over groups, sequences and
tokens, one at a time, differentiated by autograd; it shares no code with ours.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from tandem.algorithms.aggregate import token_share
from tandem.algorithms.credit import demonstration, preference, settle, stamp
from tandem.algorithms.losses import LossTokens
from tandem.algorithms.pairs import bradley_terry
from tandem.algorithms.spec import BUILTIN, AlgorithmSpec, Importance, Ratio, algorithms, function_named, resolve
from tandem.config.sections.algorithm import AlgorithmSection
from tandem.core.types import Episode, Group, Task, Trajectory, floats, ids, mask
from tandem.engine.train.value import value_losses

REWARDS = [[1.0, 0.0, 0.25], [0.5, -1.0, 2.0]]
LENGTHS = [[3, 5, 2], [4, 1, 6]]


class Case:
    """Two groups of three sequences, each 2 prompt tokens and its own; streams drawn around -1.5."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.flat = [(g, i) for g in range(2) for i in range(3)]
        draw = lambda: [[float(np.float32(v)) for v in rng.normal(-1.5, 0.5, LENGTHS[g][i])] for g, i in self.flat]  # noqa: E731
        self.new, self.sampled, self.reference, self.old, self.values = draw(), draw(), draw(), draw(), draw()
        self.leaves = [torch.tensor(each, dtype=torch.float64, requires_grad=True) for each in self.new]

    def samples(self, spec):
        stamped = []
        for g in range(2):
            episodes = tuple(
                Episode(
                    id=f"e{g}{i}", task_id="t", group_id=f"g{g}", index=i, attempt=0, seed=0, turns=(), reward=reward
                )
                for i, reward in enumerate(REWARDS[g])
            )
            trajectories = [
                Trajectory(
                    episode_id=f"e{g}{i}", group_id=f"g{g}", token_ids=ids(range(2 + n)),
                    loss_mask=mask([0, 0] + [1] * n), logprobs=floats([0.0, 0.0, *self.sampled[3 * g + i]]),
                    versions=ids([0] * (2 + n)), num_prompt_tokens=2,
                )
                for i, n in enumerate(LENGTHS[g])
            ]  # fmt: skip
            stamped += stamp(spec, Group(id=f"g{g}", task=Task(id="t", messages=()), episodes=episodes), trajectories)
        with_streams = [
            dataclasses.replace(
                sample,
                reference_logprobs=floats([0.0, 0.0, *self.reference[k]]) if spec.needs_reference else None,
                old_logprobs=floats([0.0, 0.0, *self.old[k]]) if spec.needs_old else None,
                values=floats([0.0, 0.0, *self.values[k]]) if spec.critic else None,
            )
            for k, sample in enumerate(stamped)
        ]
        return settle(spec, with_streams)


def ours(spec, case: Case, samples) -> tuple[float, list[list[float]]]:
    lengths = [len(stream) for stream in case.new]
    logprobs = torch.tensor([v for stream in case.new for v in stream], dtype=torch.float32, requires_grad=True)
    shares, ce = [], []
    for sample, n in zip(samples, lengths, strict=True):
        share = token_share(spec, sequence_tokens=n, num_loss_tokens=sum(lengths), num_sequences=len(lengths))
        shares += [share * w for w in list(sample.rl_weights)[2:]]
        ce += [share * w for w in list(sample.ce_weights)[2:]]
    join = lambda streams: torch.tensor([v for stream in streams for v in list(stream)[2:]])  # noqa: E731
    tokens = LossTokens(
        logprobs_N=logprobs,
        sampled_N=torch.tensor([v for stream in case.sampled for v in stream]),
        reference_N=join([s.reference_logprobs for s in samples]) if samples[0].reference_logprobs else None,
        advantages_N=join([s.advantages for s in samples]),
        rl_shares_N=torch.tensor(shares),
        ce_shares_N=torch.tensor(ce),
        sequence_N=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        num_sequences=len(lengths),
        old_N=join([s.old_logprobs for s in samples]) if samples[0].old_logprobs else None,
    )
    loss = function_named(spec.loss)(spec, tokens).loss
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return float(loss.detach()), [each.tolist() for each in gradient.split(lengths)]


# ---- the papers
def std_group(g: int) -> list[float]:
    mean = sum(REWARDS[g]) / 3
    deviation = math.sqrt(sum((r - mean) ** 2 for r in REWARDS[g]) / 2)
    return [(r - mean) / deviation for r in REWARDS[g]]


def surrogate(ratio, a: float, low: float, high: float, dual: float = math.inf):
    value = torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)
    return torch.maximum(value, torch.tensor(dual * a, dtype=torch.float64)) if a < 0 else value


def token_ratios(case: Case, k: int):
    return [(case.leaves[k][t] - case.sampled[k][t]).exp() for t in range(len(case.new[k]))]


def grpo(case: Case, dual: float = math.inf):
    total = 0.0
    for k, (g, i) in enumerate(case.flat):
        terms = [surrogate(r, std_group(g)[i], 0.2, 0.2, dual) for r in token_ratios(case, k)]
        total = total - sum(terms) / len(terms) / 6
    return total


def grpo_dual(case: Case):
    return grpo(case, 3.0)


def grpo_kl(case: Case):
    total = grpo(case)
    for k in range(6):
        d = torch.tensor(case.reference[k], dtype=torch.float64) - case.leaves[k]
        total = total + 0.04 * (d.exp() - d - 1).mean() / 6
    return total


def dr_grpo(case: Case):
    total = 0.0
    for k, (g, i) in enumerate(case.flat):
        a = REWARDS[g][i] - sum(REWARDS[g]) / 3
        total = total - sum(surrogate(r, a, 0.2, 0.2) for r in token_ratios(case, k)) / (6 * 16)
    return total


def dapo(case: Case):
    total, count = 0.0, sum(map(sum, LENGTHS))
    for k, (g, i) in enumerate(case.flat):
        shaped = []
        for j in range(3):
            n = LENGTHS[g][j]
            shaped.append(REWARDS[g][j] + (0.0 if n <= 2 else -1.0 if n > 5 else ((5 - 3) - n) / 3))
        mean = sum(shaped) / 3
        a = (shaped[i] - mean) / math.sqrt(sum((r - mean) ** 2 for r in shaped) / 2)
        total = total - sum(surrogate(r, a, 0.2, 0.28) for r in token_ratios(case, k)) / count
    return total


def gspo(case: Case):
    total = 0.0
    for k, (g, i) in enumerate(case.flat):
        s = (case.leaves[k] - torch.tensor(case.sampled[k], dtype=torch.float64)).mean().exp()
        total = total - surrogate(s, std_group(g)[i], 3e-4, 4e-4) / 6
    return total


def rloo(case: Case, beta: float = 0.0):
    total, paid = 0.0, [[0.0] * 3, [0.0] * 3]
    for k, (g, i) in enumerate(case.flat):
        paid[g][i] = REWARDS[g][i] - beta * sum(s - r for s, r in zip(case.sampled[k], case.reference[k], strict=True))
    for k, (g, i) in enumerate(case.flat):
        a = paid[g][i] - (sum(paid[g]) - paid[g][i]) / 2
        total = total - a * case.leaves[k].sum() / 6  # the log-probability of the answer, the only action
    return total


def rloo_kl(case: Case):
    return rloo(case, 0.03)


def cispo(case: Case):
    total, count = 0.0, sum(map(sum, LENGTHS))
    for k, (g, i) in enumerate(case.flat):
        for t, r in enumerate(token_ratios(case, k)):
            weight = min(float(r.detach()), 1.3)
            total = total - weight * std_group(g)[i] * case.leaves[k][t] / count
    return total


def whitened_surrogate(case: Case, advantages: list[list[float]]):
    every = [a for stream in advantages for a in stream]
    mean = sum(every) / len(every)
    deviation = math.sqrt(sum((a - mean) ** 2 for a in every) / len(every))
    total = 0.0
    for k in range(6):
        for t, r in enumerate(token_ratios(case, k)):
            total = total - surrogate(r, (advantages[k][t] - mean) / deviation, 0.2, 0.2) / len(every)
    return total


def reinforce_pp(case: Case):
    advantages = []
    for k, (g, i) in enumerate(case.flat):
        kl = [s - r for s, r in zip(case.sampled[k], case.reference[k], strict=True)]
        advantages.append([REWARDS[g][i] - 0.05 * sum(kl[t:]) for t in range(len(kl))])
    return whitened_surrogate(case, advantages)


def reinforce_pp_baseline(case: Case):
    advantages = [[REWARDS[g][i] - sum(REWARDS[g]) / 3] * LENGTHS[g][i] for g, i in case.flat]
    total = whitened_surrogate(case, advantages)
    count = sum(map(sum, LENGTHS))
    for k in range(6):
        d = case.leaves[k] - torch.tensor(case.reference[k], dtype=torch.float64)
        total = total + 0.1 * (d**2 / 2).sum() / count
    return total


def ppo(case: Case):
    total, count = 0.0, sum(map(sum, LENGTHS))
    for k, (g, i) in enumerate(case.flat):
        n, v = LENGTHS[g][i], [*case.values[k], 0.0]
        rewards = [-0.05 * (case.sampled[k][t] - case.reference[k][t]) for t in range(n)]
        rewards[-1] += REWARDS[g][i]
        delta = [rewards[t] + 0.9 * v[t + 1] - v[t] for t in range(n)]
        for t, r in enumerate(token_ratios(case, k)):
            a = sum((0.9 * 0.95) ** (u - t) * delta[u] for u in range(t, n))
            total = total - surrogate(r, a, 0.2, 0.2) / count
    return total


def distil(case: Case):
    total, count = 0.0, sum(map(sum, LENGTHS))
    for k in range(6):
        for t, r in enumerate(token_ratios(case, k)):
            total = total - r * (case.reference[k][t] - case.sampled[k][t]) / count
    return total


METHODS = [
    (grpo, {"name": "grpo", "kl_weight": 0.0}),
    (grpo_kl, {"name": "grpo"}),
    (grpo_dual, {"name": "grpo", "kl_weight": 0.0, "clip_dual": 3.0}),
    (dr_grpo, {"name": "dr_grpo", "length_cap": 16}),
    (dapo, {"name": "dapo", "overlong_cap": 5, "overlong_buffer": 3}),
    (gspo, {"name": "gspo"}),
    (rloo, {"name": "rloo", "kl_reward_weight": 0.0}),
    (rloo_kl, {"name": "rloo"}),
    (cispo, {"name": "cispo", "clip_high": 0.3}),
    (reinforce_pp, {"name": "reinforce_pp", "kl_reward_weight": 0.05}),
    (reinforce_pp_baseline, {"name": "reinforce_pp_baseline", "kl_weight": 0.1}),
    (ppo, {"name": "ppo", "kl_reward_weight": 0.05, "discount": 0.9}),
    (distil, {"name": "distil", "teacher": "tiny"}),
]


@pytest.mark.parametrize(("formula", "section"), METHODS, ids=lambda each: getattr(each, "__name__", ""))
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_equal_the_papers_formula(formula, section, seed) -> None:
    spec, case = resolve(AlgorithmSection(**section)), Case(seed)
    assert_equal(spec, case, case.samples(spec), formula(case))


def assert_equal(spec, case: Case, samples, expected) -> None:
    loss, gradient = ours(spec, case, samples)
    wanted = torch.autograd.grad(expected, case.leaves)
    assert loss == pytest.approx(float(expected.detach()), abs=1e-6)
    assert max(float(each.abs().max()) for each in wanted) > 1e-4
    for got, want in zip(gradient, wanted, strict=True):
        assert got == pytest.approx(want.tolist(), abs=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["truncated", "masked"])
def test_importance_weights_equal_their_formula(kind, level) -> None:
    section = AlgorithmSection(
        name="grpo", kl_weight=0.0, importance=kind, importance_level=level, importance_cap=2.5
    )
    spec, case = resolve(section), Case(1)
    assert spec.importance is Importance(kind) and spec.importance_level is Ratio(level)
    total, bounded = 0.0, 0
    for k, (g, i) in enumerate(case.flat):
        drift = [o - s for o, s in zip(case.old[k], case.sampled[k], strict=True)]
        terms = []
        for t in range(len(drift)):
            weight = math.exp(sum(drift) if level == "sequence" else drift[t])
            bounded += weight > 2.5
            weight = min(weight, 2.5) if kind == "truncated" else weight * (1 / 2.5 <= weight <= 2.5)
            ratio = (case.leaves[k][t] - case.old[k][t]).exp()
            terms.append(weight * surrogate(ratio, std_group(g)[i], 0.2, 0.2))
        total = total - sum(terms) / len(terms) / 6
    assert bounded
    assert_equal(spec, case, case.samples(spec), total)


def _pairs(case: Case):
    made = []
    for k in range(0, 6, 2):
        two = [
            demonstration(f"d{j}", ids(range(2 + len(case.new[j]))), mask([0, 0] + [1] * len(case.new[j])))
            for j in (k, k + 1)
        ]
        made += preference(*two)
    return [
        dataclasses.replace(sample, reference_logprobs=floats([0.0, 0.0, *case.reference[k]]))
        for k, sample in enumerate(made)
    ]


def _margin(case: Case, k: int):
    sums = [(case.leaves[j] - torch.tensor(case.reference[j], dtype=torch.float64)).sum() for j in (k, k + 1)]
    return sums[0] - sums[1]


PREFERENCES = [
    ({"name": "dpo", "beta": 0.3}, lambda m: -torch.log(1 / (1 + torch.exp(-0.3 * m)))),
    (
        {"name": "cdpo"},
        lambda m: -0.9 * torch.log(1 / (1 + torch.exp(-0.1 * m))) - 0.1 * torch.log(1 / (1 + torch.exp(0.1 * m))),
    ),
    ({"name": "ipo", "beta": 0.5}, lambda m: (m - 1.0) ** 2),
]


@pytest.mark.parametrize(("section", "formula"), PREFERENCES, ids=["dpo", "cdpo", "ipo"])
def test_preference_methods_equal_their_papers_formula(section, formula) -> None:
    spec, case = resolve(AlgorithmSection(**section)), Case(2)
    expected = sum(formula(_margin(case, k)) for k in (0, 2, 4)) / 3
    assert_equal(spec, case, _pairs(case), expected)


def test_supervised_loss_is_the_mean_negative_log_likelihood() -> None:
    spec, case = resolve(AlgorithmSection(name="sft")), Case(3)
    samples = [
        demonstration(f"d{k}", ids(range(2 + len(new))), mask([0, 0] + [1] * len(new)))
        for k, new in enumerate(case.new)
    ]
    assert_equal(spec, case, samples, -sum(leaf.sum() for leaf in case.leaves) / sum(map(sum, LENGTHS)))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_reward_model_equals_bradley_and_terrys_formula(smoothing) -> None:
    values = [0.3, -1.2, 2.0, 2.5, -0.4, -0.9]
    scores = torch.tensor(values, requires_grad=True)
    loss, _ = bradley_terry(scores, smoothing)
    (got,) = torch.autograd.grad(loss.mean(), scores)
    leaf = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    expected = 0.0
    for k in range(0, 6, 2):
        better = 1 / (1 + torch.exp(leaf[k + 1] - leaf[k]))
        expected = expected - ((1 - smoothing) * torch.log(better) + smoothing * torch.log(1 - better)) / 3
    (wanted,) = torch.autograd.grad(expected, leaf)
    assert float(loss.mean().detach()) == pytest.approx(float(expected.detach()), abs=1e-6)
    assert got.tolist() == pytest.approx(wanted.tolist(), abs=1e-6) and max(map(abs, wanted.tolist())) > 0.1


def test_a_critic_equals_ppos_formula_for_values() -> None:
    rng = np.random.default_rng(4)
    values, returns, old = (rng.normal(0, 1, 9).astype(np.float32).tolist() for _ in range(3))
    mine = torch.tensor(values, requires_grad=True)
    loss = value_losses(mine, torch.tensor(returns), torch.tensor(old), 0.2).mean()
    (got,) = torch.autograd.grad(loss, mine)
    leaf = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    expected = 0.0
    for v, r, o in zip(leaf, returns, old, strict=True):
        held = o + min(max(float(v.detach()) - o, -0.2), 0.2) if abs(float(v.detach()) - o) > 0.2 else v
        worse = (v - r) ** 2 if (v.detach() - r) ** 2 >= (held - r) ** 2 else (held - r) ** 2 + 0 * v
        expected = expected + worse / 2 / 9
    (wanted,) = torch.autograd.grad(expected, leaf)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-6)
    assert got.tolist() == pytest.approx(wanted.tolist(), abs=1e-6)
    assert 0 < sum(each == 0 for each in wanted.tolist()) < 9  # the clip holds some, not all


def test_every_method_has_its_formula_here_and_names_its_source() -> None:
    held = {section["name"] for _, section in METHODS} | {section["name"] for section, _ in PREFERENCES}
    assert held | {"sft", "reward"} == set(BUILTIN)
    for name in BUILTIN:
        spec = algorithms().resolve(name)
        assert isinstance(spec, AlgorithmSpec) and spec.source and spec.summary
