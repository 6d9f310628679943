"""An episode as a conversation, with the place of every part in the token stream.

Owns: the layout. Each part says which tokens it is, who made it, and, where the policy sampled it, how likely it was
and under which weights. The ids are the recorded ones; text is only their picture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from tandem.core.types import Episode, Turn

Decode = Callable[[Iterable[int]], str]


def conversation(episode: Episode, decode: Decode) -> str:
    """The whole episode; ``decode`` turns ids into text."""
    head = [
        f"episode {episode.id}  task {episode.task_id}  group {episode.group_id}  attempt {episode.attempt}",
        f"reward {'none' if episode.reward is None else episode.reward}  ended {_ending(episode)}",
        *(f"score {score.name}: {'none' if score.value is None else score.value} (weight {score.weight})"
          + (f", {score.failure}: {score.detail}" if score.failure else "") for score in episode.scores),
    ]  # fmt: skip
    return "\n".join([*head, "", *_parts(episode, decode)])


def _ending(episode: Episode) -> str:
    if episode.failure is not None:
        return f"with a failure, {episode.failure.kind}: {episode.failure.detail}"
    return str(episode.stop_reason) if episode.stop_reason is not None else "early"


def _parts(episode: Episode, decode: Decode) -> Iterator[str]:
    for number, turn in enumerate(episode.turns):
        parent = number - 1 if turn.parent is None else turn.parent
        before = episode.turns[parent] if parent >= 0 else None
        seen = 0 if before is None else len(before.prompt_ids) + len(before.completion_ids)
        start = len(turn.prompt_ids)
        who = "prompt" if before is None else "observation"
        branch = f" (goes on from turn {parent})" if 0 <= parent < number - 1 else ""
        yield _part(seen, start, who + branch, decode(turn.prompt_ids[seen:]))
        end = start + len(turn.completion_ids)
        yield _part(start, end, f"policy, turn {number}", decode(turn.completion_ids), _sampled(turn))
        for result in turn.tool_results:
            yield f"    tool {result.name}: {result.failure or 'ok'}, {result.duration_s:.3f} s"
        if turn.tool_results:
            yield ""


def _sampled(turn: Turn) -> str:
    if not turn.completion_ids:
        return f"  {turn.finish_reason}"
    mean = sum(turn.logprobs) / len(turn.logprobs)
    low, high = min(turn.versions), max(turn.versions)
    weights = str(low) if low == high else f"{low}-{high}"
    return f"  mean logprob {mean:.3f}, weights {weights}, {turn.finish_reason}, {turn.model_s:.2f} s"


def _part(start: int, end: int, who: str, text: str, more: str = "") -> str:
    body = "\n".join(f"    {line}" for line in text.splitlines())
    return f"[{start}:{end}] {who}{more}\n{body}\n"
