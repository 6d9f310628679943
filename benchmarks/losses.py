"""Loss and gradient of every method beside TRL's, on the same numbers: ``python benchmarks/losses.py --peer PYTHON``.

PYTHON is the interpreter of an environment that has ``trl``; without it our own losses are printed alone. Six answers
of different lengths, their log-probabilities under new, old and reference weights, and rewards are drawn; the
advantages are ours on both sides. The gradient is that with respect to each token's log-probability. Ours comes from
the records as the trainer runs them: credit, shares of the step, loss. Ends with 1 where the two differ by more than
rounding. Where TRL has another form of a method, the table says how the two are brought together.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

import numpy as np
import torch
from pieces.peer import Peer

from tandem.algorithms.advantages import whitened
from tandem.algorithms.aggregate import token_share
from tandem.algorithms.losses import LossTokens
from tandem.algorithms.pairs import bradley_terry
from tandem.algorithms.spec import AlgorithmSpec, Data, function_named, resolve
from tandem.config.sections.algorithm import AlgorithmSection
from tandem.models.builtin import resolve_model
from tandem.record.summary import table

LENGTHS, SIBLINGS = (3, 5, 2, 4, 1, 6), 3
REWARDS = (1.0, 0.0, 0.25, 0.5, -1.0, 2.0)
CLOSE = 1e-6  # of the largest entry: float32 sums in another order
Rows = list[list[float]]


@dataclasses.dataclass(frozen=True)
class Answer:
    """A loss, and its gradient for every token."""

    loss: float
    gradient: Rows

    def __add__(self, other: Answer) -> Answer:
        pairs = zip(self.gradient, other.gradient, strict=True)
        return Answer(self.loss + other.loss, [[a + b for a, b in zip(*rows, strict=True)] for rows in pairs])

    def times(self, factor: float) -> Answer:
        return Answer(self.loss * factor, [[factor * each for each in row] for row in self.gradient])

    def swapped(self) -> Answer:
        """The rows of each pair the other way round."""
        return Answer(self.loss, [self.gradient[place ^ 1] for place in range(len(self.gradient))])


@dataclasses.dataclass(frozen=True)
class Case:
    """A method with its knobs, TRL's trainer with the options that mean the same, and how they are compared."""

    section: dict[str, Any]
    trainer: str
    options: dict[str, Any]
    how: str = ""
    more: dict[str, Any] = dataclasses.field(default_factory=dict)
    on_policy: bool = False
    only_gradient: bool = False
    equal_lengths: int = 0
    times: float = 1.0  # theirs, to be ours
    smoothing: float = 0.0  # theirs: so much of the pairs the other way round


CLIP = {"epsilon": 0.2, "delta": 3.0}
DUAL = {"clip_dual": 3.0}
NO_KL = {"kl_weight": 0.0, "kl_reward_weight": 0.0}
CASES = (
    Case({"name": "sft"}, "sft", {}),
    Case({"name": "grpo", **DUAL, **NO_KL}, "grpo", {"loss_type": "grpo", **CLIP}),
    Case({"name": "grpo", "kl_weight": 0.04, **DUAL}, "grpo", {"loss_type": "grpo", "beta": 0.04, **CLIP},
         "without their correction of the KL by the ratio", more={"use_bias_correction_kl": False}),
    Case({"name": "dr_grpo", "length_cap": 16, **DUAL}, "grpo",
         {"loss_type": "dr_grpo", "max_completion_length": 16, **CLIP}),
    Case({"name": "dapo", "overlong_cap": 0, "overlong_buffer": 0, **DUAL}, "grpo",
         {"loss_type": "dapo", "epsilon_high": 0.28, **CLIP}),
    Case({"name": "dapo", "clip_high": 0.2, "overlong_cap": 0, "overlong_buffer": 0, **DUAL}, "grpo",
         {"loss_type": "bnpo", **CLIP}, "bnpo: the token mean of one batch"),
    Case({"name": "gspo", **DUAL}, "grpo", {"loss_type": "grpo", "importance_sampling_level": "sequence",
                                            "epsilon": 3e-4, "epsilon_high": 4e-4, "delta": 3.0}),
    Case({"name": "cispo"}, "grpo", {"loss_type": "cispo", "epsilon_high": 5.0}, "their epsilon_high is the cap"),
    Case({"name": "reinforce_pp", **DUAL, **NO_KL}, "grpo", {"loss_type": "dapo", **CLIP},
         "whitened advantages given to dapo"),
    Case({"name": "reinforce_pp_baseline", **DUAL, **NO_KL}, "grpo", {"loss_type": "dapo", **CLIP},
         "whitened advantages given to dapo"),
    Case({"name": "rloo", **NO_KL}, "rloo", {"beta": 0.0},
         "on-policy; theirs is written with a ratio, only gradients agree", on_policy=True, only_gradient=True),
    Case({"name": "dpo"}, "dpo", {"loss_type": ["sigmoid"], "beta": 0.1}),
    Case({"name": "cdpo"}, "dpo", {"loss_type": ["sigmoid"], "beta": 0.1}, "0.9 of their sigmoid and 0.1 of it with "
         "the pairs swapped", smoothing=0.1),
    Case({"name": "ipo"}, "dpo", {"loss_type": ["ipo"], "beta": 0.4}, "theirs takes means over tokens: answers of 4, "
         "tau 4 times, loss 16 times", equal_lengths=4, times=16.0),
    Case({"name": "reward"}, "reward", {}),
)  # fmt: skip


class Numbers:
    """What both sides are given."""

    def __init__(self, case: Case, spec: AlgorithmSpec) -> None:
        rng = np.random.default_rng(11)
        self.lengths = [case.equal_lengths or each for each in LENGTHS]

        def draw(center: float = -1.5) -> Rows:
            return [rng.normal(center, 0.5, n).astype(np.float32).tolist() for n in self.lengths]

        self.new, self.reference = draw(), draw()
        self.old = self.new if case.on_policy else draw()
        self.advantages = self._credited(spec) if spec.data is Data.EPISODES else [1.0] * len(LENGTHS)

    def _credited(self, spec: AlgorithmSpec) -> list[float]:
        credit: Any = function_named(spec.credit or "")
        made = [each for begin in range(0, 6, SIBLINGS) for each in credit(REWARDS[begin : begin + SIBLINGS])]
        if not spec.whiten:
            return made
        even = whitened(np.repeat(np.array(made), self.lengths))
        return [float(even[sum(self.lengths[:place])]) for place in range(len(made))]

    def question(self, case: Case) -> dict[str, Any]:
        reference = {"reference": self.reference} if case.trainer == "dpo" or case.options.get("beta") else {}
        return reference | {
            "trainer": case.trainer, "options": case.options | case.more, "logprobs": self.new, "old": self.old,
            "advantages": self.advantages, "siblings": SIBLINGS,
        }  # fmt: skip

    def swapped(self, case: Case) -> dict[str, Any]:
        question = self.question(case)
        for key in ("logprobs", "reference"):
            question[key] = [question[key][place ^ 1] for place in range(len(LENGTHS))]
        return question


def ours(spec: AlgorithmSpec, given: Numbers) -> Answer:
    flat = [each for row in given.new for each in row]
    logprobs_N = torch.tensor(flat, requires_grad=True)
    lengths = given.lengths
    if spec.name == "reward":
        scores_B = torch.tensor([row[0] for row in given.new], requires_grad=True)
        loss = bradley_terry(scores_B, spec.label_smoothing)[0].mean()
        return Answer(float(loss.detach()), [[each] for each in torch.autograd.grad(loss, scores_B)[0].tolist()])
    shares = [
        token_share(spec, sequence_tokens=n, num_loss_tokens=sum(lengths), num_sequences=len(lengths))
        for n in lengths for _ in range(n)
    ]  # fmt: skip
    shares_N, nothing_N = torch.tensor(shares), torch.zeros(len(flat))
    learns = spec.data is not Data.DEMONSTRATIONS
    tokens = LossTokens(
        logprobs_N=logprobs_N,
        sampled_N=torch.tensor([each for row in given.old for each in row]),
        reference_N=torch.tensor([each for row in given.reference for each in row]),
        advantages_N=torch.repeat_interleave(torch.tensor(given.advantages), torch.tensor(lengths)),
        rl_shares_N=shares_N if learns else nothing_N,
        ce_shares_N=nothing_N if learns else shares_N,
        sequence_N=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        num_sequences=len(lengths),
    )
    function: Any = function_named(spec.loss)
    loss = function(spec, tokens).loss
    (gradient,) = torch.autograd.grad(loss, logprobs_N)
    return Answer(float(loss.detach()), [each.tolist() for each in gradient.split(lengths)])


def apart(one: Rows, other: Rows) -> float:
    """The largest difference, over the largest entry of the first."""
    flat = [(a, b) for rows in zip(one, other, strict=True) for a, b in zip(*rows, strict=True)]
    return max(abs(a - b) for a, b in flat) / max(abs(a) for a, _ in flat)


def theirs(peer: Peer, cases: list[tuple[Case, Numbers]]) -> list[Answer]:
    questions = [given.question(case) for case, given in cases]
    smoothed = [place for place, (case, _) in enumerate(cases) if case.smoothing]
    questions += [cases[place][1].swapped(cases[place][0]) for place in smoothed]
    asked = {"questions": questions, "tokenizer": str(resolve_model("smollm2"))}
    answers: Any = peer.ask("trl_losses.py", asked)
    found = [Answer(each["loss"], each["gradient"]).times(case.times)
             for each, (case, _) in zip(answers, cases, strict=False)]  # fmt: skip
    for place, each in zip(smoothed, answers[len(cases) :], strict=True):
        share = cases[place][0].smoothing
        other = Answer(each["loss"], each["gradient"]).swapped()
        found[place] = found[place].times(1 - share) + other.times(share)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default="", help="interpreter of an environment with trl")
    peer = Peer.find(parser.parse_args().peer, "trl")
    specs = [resolve(AlgorithmSection(**case.section)) for case in CASES]
    cases = [(case, Numbers(case, spec)) for case, spec in zip(CASES, specs, strict=True)]
    mine = [ours(spec, given) for spec, (_, given) in zip(specs, cases, strict=True)]
    if peer is None:
        print(table([["method", "loss"], *([s.name, f"{a.loss:.6f}"] for s, a in zip(specs, mine, strict=True))]))
        print("no peer: give --peer PYTHON for a comparison")
        return 0
    rows, broken = [["method", "in TRL", "loss", "apart", "gradient apart", "", ""]], 0
    for (case, _), own, other in zip(cases, mine, theirs(peer, cases), strict=True):
        loss, gradient = abs(own.loss - other.loss), apart(own.gradient, other.gradient)
        holds = (case.only_gradient or loss <= CLOSE * max(1.0, abs(own.loss))) and gradient <= CLOSE
        broken += not holds
        knobs = ", ".join(f"{key} {value}" for key, value in case.section.items() if key != "name")
        options = ", ".join(f"{key} {value}" for key, value in case.options.items()).replace("loss_type ", "")
        rows.append([
            " ".join(filter(None, (case.section["name"], knobs))), f"{case.trainer}: {options}".rstrip(": "),
            f"{own.loss:.6f}", "-" if case.only_gradient else f"{loss:.1e}", f"{gradient:.1e}",
            "ok" if holds else "DIFFERS", case.how,
        ])  # fmt: skip
    print(f"{peer.version}; losses of {len(LENGTHS)} answers, float32")
    print(table(rows))
    print(f"\n{len(CASES)} methods, {broken} differ")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
