"""On-policy distillation: the student's own answers, graded token by token by a teacher."""

from __future__ import annotations

from tandem.algorithms.spec import Aggregate, AlgorithmSpec, Default

DISTIL = AlgorithmSpec(
    name="distil",
    summary="advantage = log-probability under the teacher minus that under the sampler; token ratio; token mean",
    source="Agarwal et al. 2024, On-Policy Distillation (GKD), arXiv:2306.13649, section 3, with the reverse KL and "
    "the student's answers only (lambda 1). The paper differentiates the divergence of whole distributions; this is "
    "its estimate from the sampled token, as a policy gradient, and like there no token answers for later ones",
    formula="mean_t -r (log teacher - log sampler)",
    credit="tandem.algorithms.advantages:plain",
    aggregate=Aggregate.TOKEN_MEAN,
    teacher=True,
    defaults=(
        Default(knob="discount", where="section 3: no gradient through the sampling of later tokens"),
        Default(knob="kl_weight", where="the divergence to the teacher is the loss; there is no other reference"),
    ),
)
