"""On-policy distillation: the student's own answers, graded token by token by a teacher.

Source: Agarwal et al. 2024, On-Policy Distillation (GKD), arXiv:2306.13649, with the reverse KL, in the
policy-gradient form: the advantage of a token is log teacher - log sampler, whose mean is the negative reverse KL.
"""

from __future__ import annotations

from tandem.algorithms.spec import Aggregate, AlgorithmSpec

DISTIL = AlgorithmSpec(
    name="distil",
    summary="advantage = log-probability under the teacher minus that under the sampler; token ratio; token mean",
    source="arXiv:2306.13649, reverse KL: mean_t r_t (log teacher_t - log sampler_t)",
    credit="tandem.algorithms.advantages:plain",
    aggregate=Aggregate.TOKEN_MEAN,
    teacher=True,
)
