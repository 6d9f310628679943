"""[rollout]: how episodes are made."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tandem.config.sections.section import Section


class RolloutSection(Section):
    groups_per_step: int = Field(default=4, ge=1, le=65536)
    """Groups (tasks) that one training step learns from."""
    group_size: int = Field(default=8, ge=1, le=65536)
    """Sibling episodes of one task."""
    staleness: int = Field(default=0, ge=0)
    """Most weight versions between sampling and training. 0: strictly on-policy; more lets rollout and training
    overlap (then set `algorithm.clip_dual` to 3, say: one old token can outweigh a step without it)."""
    max_concurrent_episodes: int = Field(default=64, ge=1, le=65536)
    """Most episodes in flight."""
    retries: int = Field(default=2, ge=0)
    """Fresh attempts after a retryable failure of an episode."""
    at_abort: Literal["resume", "retry"] = "resume"
    """What becomes of a turn that the engine gave up because weights were published (`engine.infer.at_publish =
    "abort"`). `resume`: it goes on under the new weights from the tokens that it has, which keep their
    log-probabilities and versions; `retry`: the episode fails and is tried again from its beginning, at most `retries`
    times."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; the trainer computes its log-probabilities at the same one."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling. Training needs 1: sampler and trainer must share one support."""
    top_k: int = Field(default=0, ge=0)
    """Sample from the k best tokens; 0: all. Training needs 0."""
    priority: int = Field(default=0, ge=-16, le=16)
    """Whose requests a busy engine serves first: a step doubles the share that each group of training gets beside the
    groups of an evaluation. Groups of one priority share alike, and no
    group starves. (`engine.name = "vllm"` knows no such shares and ignores both.)"""
    eval_priority: int = Field(default=0, ge=-16, le=16)
    """The same for each group of an evaluation: above `rollout.priority` an evaluation overtakes the episodes of
    training that wait, below it they overtake its."""
    max_turns: int = Field(default=4, ge=1)
    """Model calls in one episode."""
    max_turn_tokens: int = Field(default=64, ge=1)
    """Tokens of one model call."""
    tool_time_s: float = Field(default=10.0, gt=0)
    """Deadline of one tool call."""
    reward_time_s: float = Field(default=10.0, gt=0)
    """Deadline of one reward function; its process is killed then."""
    reward_processes: int = Field(default=2, ge=1, le=1024)
    """Processes that reward functions run in."""
    episode_time_s: float = Field(default=300.0, gt=0)
    """Deadline of one episode."""
    stall_warning_s: float = Field(default=30.0, gt=0)
    """After this long without a group that a step waits for, the log names what is missing."""
