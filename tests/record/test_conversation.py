"""An episode as text, each part with its place in the token stream."""

from tandem.core.types import (
    Episode,
    Failure,
    FailureKind,
    FinishReason,
    Message,
    Role,
    Score,
    StopReason,
    ToolFailure,
    ToolResult,
    Turn,
    floats,
    ids,
)
from tandem.record.conversation import conversation


def letters(token_ids):
    return "".join(chr(token) for token in token_ids)


def turn(prompt, completion, **more):
    return Turn(
        prompt_ids=ids(map(ord, prompt)), completion_ids=ids(map(ord, completion)),
        logprobs=floats([-0.5] * len(completion)), versions=ids([2] * len(completion)),
        message=Message(role=Role.ASSISTANT, content=completion), finish_reason=FinishReason.STOP, **more,
    )  # fmt: skip


def test_spans_follow_each_other():
    failed = ToolResult(call_id="c", name="shell", content="no", failure=ToolFailure.TIMEOUT, duration_s=2.0)
    episode = Episode(
        id="e", task_id="t", group_id="g", index=0, attempt=0, seed=0, reward=1.0, stop_reason=StopReason.ANSWERED,
        turns=(turn("ask:", "call", tool_results=(failed,)), turn("ask:call[no]", "end")),
        scores=(Score(name="right", value=1.0),),
    )  # fmt: skip
    text = conversation(episode, letters)
    for part in ("[0:4] prompt\n    ask:", "[4:8] policy, turn 0  mean logprob -0.500, weights 2, stop", "    call",
                 "tool shell: timeout, 2.000 s", "[8:12] observation\n    [no]", "[12:15] policy, turn 1",
                 "reward 1.0  ended answered", "score right: 1.0"):  # fmt: skip
        assert part in text, text


def test_a_failed_episode_says_why():
    failure = Failure(kind=FailureKind.SANDBOX, detail="box 3 is gone", retryable=True)
    episode = Episode(id="e", task_id="t", group_id="g", index=0, attempt=1, seed=0, turns=(), failure=failure)
    assert "reward none  ended with a failure, sandbox: box 3 is gone" in conversation(episode, letters)
