"""Learning from pairs of a better (w) and a worse (l) answer.

m = log pi(w)/ref(w) - log pi(l)/ref(l), sums over the tokens of an answer; sigma the logistic function.
"""

from __future__ import annotations

from tandem.algorithms.spec import Aggregate, AlgorithmSpec, Data, Default, Ratio

DPO = AlgorithmSpec(
    name="dpo",
    summary="-log sigma(beta m); pair mean",
    source="Rafailov et al. 2023, arXiv:2305.18290, equation 7",
    formula="mean -log sigma(beta m)",
    credit=None,
    data=Data.PREFERENCES,
    loss="tandem.algorithms.pairs:preference_loss",
    aggregate=Aggregate.PAIR_MEAN,
    ratio=Ratio.NONE,
    beta=0.1,
    defaults=(
        Default(knob="beta", where="appendix B"),
        Default(knob="label_smoothing", where="equation 7 has none"),
    ),
)

CDPO = AlgorithmSpec(
    name="cdpo",
    summary="-(1 - e) log sigma(beta m) - e log sigma(-beta m): labels are wrong with probability e; pair mean",
    source="Mitchell 2023, A note on DPO with noisy preferences (ericmitchell.ai/cdpo.pdf), equation 3",
    formula="mean -(1 - e) log sigma(beta m) - e log sigma(-beta m)",
    credit=None,
    data=Data.PREFERENCES,
    loss="tandem.algorithms.pairs:preference_loss",
    aggregate=Aggregate.PAIR_MEAN,
    ratio=Ratio.NONE,
    beta=0.1,
    label_smoothing=0.1,
    defaults=(
        Default(knob="beta", where="DPO's, arXiv:2305.18290, appendix B"),
        Default(
            knob="label_smoothing",
            where="rDPO's, arXiv:2403.00409, section 6; the note leaves e to the data, below 0.5",
        ),
    ),
)

IPO = AlgorithmSpec(
    name="ipo",
    summary="(m - 1 / (2 beta))^2; pair mean",
    source="Azar et al. 2023, arXiv:2310.12036, equation 17, with tau = beta; m is a sum over tokens, as written there "
    "(TRL takes the mean: its tau is ours times the length)",
    formula="mean (m - 1 / (2 tau))^2",
    credit=None,
    data=Data.PREFERENCES,
    loss="tandem.algorithms.pairs:squared_preference_loss",
    aggregate=Aggregate.PAIR_MEAN,
    ratio=Ratio.NONE,
    beta=0.1,
    defaults=(Default(knob="beta", where="the smallest of the paper's experiments (0.1, 0.5, 1), and TRL's"),),
)

REWARD = AlgorithmSpec(
    name="reward",
    summary="-log sigma(s(w) - s(l)) of a score at the last token; pair mean",
    source="Bradley and Terry 1952, as in Ouyang et al. 2022, InstructGPT, arXiv:2203.02155, equation 1",
    formula="mean -log sigma(s(w) - s(l))",
    credit=None,
    data=Data.PREFERENCES,
    loss="tandem.algorithms.pairs:bradley_terry",
    aggregate=Aggregate.PAIR_MEAN,
    ratio=Ratio.NONE,
    defaults=(Default(knob="label_smoothing", where="equation 1 has none"),),
)
