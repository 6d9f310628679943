"""Episodes and demonstrations to token streams.

Invariants: ids are copied, never made; each later prompt begins with every earlier id; the mask is 1 exactly on
the ids that the policy sampled, end token included; log-probabilities and versions run along.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.core.errors import EpisodeError
from tandem.core.routes import Routes, missing
from tandem.core.types import Episode, Message, ToolSpec, Trajectory, floats, ids, mask
from tandem.text.render import Renderer


def assemble(episode: Episode, *, temperature: float) -> list[Trajectory]:
    """The branches of an episode, prompts and observations included: one for each turn that no other goes on from. A
    turn that several branches share is trained in the first of them and is context in the others.

    Raises:
        EpisodeError: the episode has no turn, or a prompt does not begin with all that came before it.
    """
    if not episode.turns:
        raise EpisodeError(f"episode {episode.id} has no turn to train on")
    parents = [number - 1 if turn.parent is None else turn.parent for number, turn in enumerate(episode.turns)]
    trained: set[int] = set()
    made = []
    for leaf in range(len(parents)):
        if leaf in parents:
            continue
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        made.append(_branch(episode, path, trained, temperature))
        trained.update(path)
    return made


def _branch(episode: Episode, path: Sequence[int], trained: set[int], temperature: float) -> Trajectory:
    token_ids, loss_mask, logprobs, versions = ids(), mask(), floats(), ids()
    routes: Routes | None = None
    width = next((turn.routes.width for number in path if (turn := episode.turns[number]).routes is not None), 0)
    for number in path:
        turn = episode.turns[number]
        if turn.prompt_ids[: len(token_ids)] != token_ids:
            raise EpisodeError(
                f"episode {episode.id}: turn {number}'s prompt does not begin with the {len(token_ids)} ids before it"
            )
        if width:  # the last token of the turn before was first read in this one
            known = 0 if routes is None else len(routes)
            end = len(turn.prompt_ids) + len(turn.completion_ids) - 1
            routes = (turn.routes or missing(width, end)).rows(known, end).behind(routes)
        observed = len(turn.prompt_ids) - len(token_ids)
        token_ids.extend(turn.prompt_ids[len(token_ids) :])
        loss_mask.frombytes(bytes(observed))
        logprobs.extend(floats([0.0]) * observed)
        versions.extend(ids([-1]) * observed)
        token_ids.extend(turn.completion_ids)
        loss_mask.extend(mask([int(number not in trained)]) * len(turn.completion_ids))
        logprobs.extend(turn.logprobs)
        versions.extend(turn.versions)
    return Trajectory(
        episode_id=episode.id,
        group_id=episode.group_id,
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        versions=versions,
        num_prompt_tokens=len(episode.turns[path[0]].prompt_ids),
        temperature=temperature,
        routes=None if routes is None else routes.rows(0, len(token_ids)),
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
