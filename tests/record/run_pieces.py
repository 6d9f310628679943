"""Events of a small made-up run."""

from tandem.core.events import (
    EngineReported,
    Envelope,
    EpisodeFinished,
    EpisodeStarted,
    EvaluationFinished,
    GroupFinished,
    GroupStarted,
    RunFinished,
    RunStarted,
    StepFinished,
    ToolFinished,
    TurnFinished,
)


def started(run_id="r"):
    return RunStarted(run_id=run_id, version="0", command="x", config_blob="", deterministic=True)


def step(number, *, reward=0.5, phase="train", loss=0.1):
    return StepFinished(
        step=number, loss=loss, grad_norm=1.0, learning_rate=1e-5, num_groups=1, num_samples=2, num_loss_tokens=4,
        num_tokens=20, mean_reward=reward, metrics={"k": 1.0}, rollout_s=6.0, train_s=3.0, total_s=10.0, phase=phase,
    )  # fmt: skip


def finished_episode(name, *, reward=1.0, failure=None, purpose="train", blob="", retried=False, tokens=10):
    return EpisodeFinished(
        episode_id=name, group_id="g", task_id="t", index=0, attempt=0, reward=None if failure else reward,
        stop_reason=None if failure else "answered", failure=failure, detail="", retried=retried, num_turns=2,
        num_tokens=tokens, lease_s=0.5, model_s=2.0, tools_s=1.0, reward_s=0.5, total_s=5.0, blob=blob, purpose=purpose,
    )  # fmt: skip


def episode_events(name, *, purpose="train", tool_failure=None, **finish):
    return [
        GroupStarted(group_id=f"g-{name}", task_id="t", size=1, version=0, purpose=purpose),
        EpisodeStarted(episode_id=name, group_id=f"g-{name}", task_id="t", index=0, attempt=0, seed=0),
        TurnFinished(episode_id=name, turn=0, num_prompt_tokens=5, num_cached_tokens=0, num_completion_tokens=7,
                     finish_reason="stop", version_first=0, version_last=0, model_s=1.0),
        ToolFinished(episode_id=name, turn=0, tool="shell", failure=tool_failure, output_digest="", output_bytes=0,
                     duration_s=0.1),
        finished_episode(name, purpose=purpose, **finish),
        GroupFinished(group_id=f"g-{name}", task_id="t", num_scored=1, num_failed=0, mean_reward=1.0, std_reward=0.0,
                      purpose=purpose),
    ]  # fmt: skip


def evaluated(name="before", *, success=0.25, at=0):
    return EvaluationFinished(
        name=name, step=at, num_tasks=4, num_failed=1, mean_reward=success, success=success,
        by_family={"files": success}, duration_s=2.0,
    )  # fmt: skip


def small_run():
    """Two steps; one failed tool, one failed attempt."""
    return [
        started(),
        *episode_events("eval-1", purpose="before"),
        evaluated(),
        *episode_events("e1", reward=1.0),
        *episode_events("e2", reward=0.0, tool_failure="timeout"),
        step(1, reward=0.5),
        EngineReported(step=1, prompt_tokens=100, cached_tokens=40, generated_tokens=14, busy_s=3.0),
        *episode_events("e3", failure="sandbox", retried=True),
        *episode_events("e4", reward=1.0),
        step(2, reward=1.0),
        evaluated("after reinforcement", success=0.75, at=2),
        RunFinished(step=2, reason="finished"),
    ]


def envelopes(events, *, start=0):
    return [
        Envelope(sequence=start + number, time=100.0 + number, process=1, cause=-1, previous="", event=event)
        for number, event in enumerate(events)
    ]
