"""Episodes and demonstrations to token streams.

Invariants: ids are copied, never made; each later prompt begins with every earlier id; the mask is 1 exactly on
the ids that the policy sampled, end token included; log-probabilities and versions run along.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.core.errors import EpisodeError
from tandem.core.types import Episode, Message, ToolSpec, Trajectory, floats, ids, mask
from tandem.text.render import Renderer


def assemble(episode: Episode, *, temperature: float) -> Trajectory:
    """The one branch of an append-only episode, prompt and observations included.

    Raises:
        EpisodeError: the episode has no turn, or a prompt does not begin with all that came before it.
    """
    if not episode.turns:
        raise EpisodeError(f"episode {episode.id} has no turn to train on")
    token_ids, loss_mask, logprobs, versions = ids(), mask(), floats(), ids()
    for number, turn in enumerate(episode.turns):
        if turn.prompt_ids[: len(token_ids)] != token_ids:
            raise EpisodeError(
                f"episode {episode.id}: turn {number}'s prompt does not begin with the {len(token_ids)} ids before it"
            )
        observed = len(turn.prompt_ids) - len(token_ids)
        token_ids.extend(turn.prompt_ids[len(token_ids) :])
        loss_mask.frombytes(bytes(observed))
        logprobs.extend(floats([0.0]) * observed)
        versions.extend(ids([-1]) * observed)
        token_ids.extend(turn.completion_ids)
        loss_mask.extend(mask([1]) * len(turn.completion_ids))
        logprobs.extend(turn.logprobs)
        versions.extend(turn.versions)
    return Trajectory(
        episode_id=episode.id,
        group_id=episode.group_id,
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        versions=versions,
        num_prompt_tokens=len(episode.turns[0].prompt_ids),
        temperature=temperature,
    )


def demonstrate(
    messages: Sequence[Message], tools: Sequence[ToolSpec], renderer: Renderer, *, name: str
) -> Trajectory:
    """A finished conversation as a trajectory that nobody sampled: the mask is 1 on what an assistant would have
    to say, log-probabilities are 0 and versions -1."""
    token_ids, loss_mask = renderer.demonstration(messages, tools)
    return Trajectory(
        episode_id=name,
        group_id=name,
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=floats([0.0]) * len(token_ids),
        versions=ids([-1]) * len(token_ids),
        num_prompt_tokens=loss_mask.index(1) if 1 in loss_mask else len(token_ids),
    )
