"""Learning from pairs of a better (w) and a worse (l) answer.

m = log pi(w)/ref(w) - log pi(l)/ref(l), sums over the tokens of an answer; sigma the logistic function.
"""

from __future__ import annotations

from tandem.algorithms.spec import Aggregate, AlgorithmSpec, Data, Ratio

DPO = AlgorithmSpec(
    name="dpo",
    summary="-log sigma(beta m); pair mean",
    source="Rafailov et al. 2023, arXiv:2305.18290, equation 7; beta 0.1",
    credit=None,
    data=Data.PREFERENCES,
    loss="tandem.algorithms.pairs:preference_loss",
    aggregate=Aggregate.PAIR_MEAN,
    ratio=Ratio.NONE,
)

CDPO = AlgorithmSpec(
    name="cdpo",
    summary="-(1 - e) log sigma(beta m) - e log sigma(-beta m): labels are wrong with probability e; pair mean",
    source="Mitchell 2023, A note on DPO with noisy preferences, equation 3; e 0.1",
    credit=None,
    data=Data.PREFERENCES,
    loss="tandem.algorithms.pairs:preference_loss",
    aggregate=Aggregate.PAIR_MEAN,
    ratio=Ratio.NONE,
    label_smoothing=0.1,
)

IPO = AlgorithmSpec(
    name="ipo",
    summary="(m - 1 / (2 beta))^2; pair mean",
    source="Azar et al. 2023, arXiv:2310.12036, equation 17, with tau = beta; 0.1",
    credit=None,
    data=Data.PREFERENCES,
    loss="tandem.algorithms.pairs:squared_preference_loss",
    aggregate=Aggregate.PAIR_MEAN,
    ratio=Ratio.NONE,
)

REWARD = AlgorithmSpec(
    name="reward",
    summary="-log sigma(s(w) - s(l)) of a score at the last token; pair mean",
    source="Bradley and Terry 1952, as in Ouyang et al. 2022, arXiv:2203.02155, equation 1",
    credit=None,
    data=Data.PREFERENCES,
    loss="tandem.algorithms.pairs:bradley_terry",
    aggregate=Aggregate.PAIR_MEAN,
    ratio=Ratio.NONE,
)
