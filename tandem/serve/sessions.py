"""Recorded sessions: every token that an agent was given, as the turns of one tree.

An unmodified client that speaks to ``/sessions/NAME/v1`` is recorded: its requests go on from the very ids that were
sampled for it (``text.history``), and each answer becomes a ``Turn``. A training run reads the turns back; a person
reads them as JSON.
Owns: the table of open sessions and what a session fixes (sampling, budget). Refuses: guessing a session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.core.types import Completion, FinishReason, Ids, Message, SamplingParams, StopReason, ToolSpec, Turn
from tandem.core.wire import derive_seed
from tandem.serve.requests import BadRequest
from tandem.text.history import HistoryTree, Prompt
from tandem.text.render import Renderer

MAX_SESSIONS, MAX_TURNS = 10_000, 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the owner of a session fixes. ``params`` None: the client's own; else temperature, top-p and top-k are
    these, and ``max_tokens`` is a ceiling, so that a training run knows what it sampled."""

    params: SamplingParams | None = None
    seed: int | None = None
    group: str | None = None  # whose share of the engine its requests take
    priority: int = 0  # of that group
    max_turns: int = MAX_TURNS
    max_context_tokens: int | None = None


class RecordedSession:
    """One agent's conversations."""

    def __init__(
        self, name: str, renderer: Renderer, terms: Terms, on_turn: Callable[[Turn, int], None] | None = None
    ) -> None:
        """``on_turn`` hears each turn when it is recorded, and how many of its prompt's tokens were cached."""
        self.name = name
        self.terms = terms
        self.turns: list[Turn] = []
        self.over: StopReason | None = None  # the limit that refused a request
        self._on_turn = on_turn
        self._tree = HistoryTree(renderer)
        self._begun = 0

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Prompt:
        """Raises BadRequest: the session has no turn left. ConfigError: the conversation cannot be written."""
        if self._begun >= self.terms.max_turns:
            self.over = StopReason.MAX_TURNS
            raise BadRequest(f"session {self.name}: its {self.terms.max_turns} turns are used up", code="max_turns")
        return self._tree.prompt(messages, tools)

    def begin(self) -> int | None:
        """Count a turn that starts; its seed where the terms fix one."""
        self._begun += 1
        return None if self.terms.seed is None else derive_seed(self.terms.seed, self._begun - 1)

    def record(
        self,
        prompt: Prompt,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        *,
        reply: Message,
        completion: Completion,
        num_tokens: int,
        finish_reason: FinishReason,
    ) -> int:
        """Keep an answer: the ``num_tokens`` of the completion that belong to it. Returns its number."""
        kept: Ids = completion.token_ids[:num_tokens]
        number = self._tree.remember(prompt, messages, tools, reply=reply, completion_ids=kept)
        routes = completion.routes
        turn = Turn(
            prompt_ids=prompt.token_ids,
            completion_ids=kept,
            logprobs=completion.logprobs[:num_tokens],
            versions=completion.versions[:num_tokens],
            message=reply,
            finish_reason=finish_reason,
            model_s=completion.total_s,
            parent=prompt.parent,
            routes=routes and routes.rows(0, len(prompt.token_ids) + num_tokens),
        )
        self.turns.append(turn)
        if self._on_turn is not None:
            self._on_turn(turn, completion.num_cached_tokens)
        return number

    def shown(self) -> dict[str, object]:
        """The session as JSON."""
        turns = [
            {
                "turn": number,
                "parent": turn.parent,
                "content": turn.message.content,
                "tool_calls": [
                    {"name": call.name, "arguments": call.arguments if call.unread is None else call.unread}
                    for call in turn.message.tool_calls
                ],
                "finish_reason": turn.finish_reason.value,
                "prompt_token_ids": turn.prompt_ids.tolist(),
                "token_ids": turn.completion_ids.tolist(),
                "logprobs": turn.logprobs.tolist(),
                "weight_versions": turn.versions.tolist(),
            }
            for number, turn in enumerate(self.turns)
        ]
        return {"id": self.name, "object": "session", "turns": turns}


class Sessions:
    """The open sessions of a server, by name."""

    def __init__(self, renderer: Renderer, *, openable: bool = True) -> None:
        """``openable``: a request to a name that is not open opens it."""
        self._renderer = renderer
        self._openable = openable
        self._open: dict[str, RecordedSession] = {}

    def open(
        self, name: str, terms: Terms | None = None, *, on_turn: Callable[[Turn, int], None] | None = None
    ) -> RecordedSession:
        if name in self._open:
            raise BadRequest(f"session {name!r} is open already", status=409)
        if len(self._open) >= MAX_SESSIONS:
            raise BadRequest(f"{MAX_SESSIONS} sessions are open", status=429)
        session = self._open[name] = RecordedSession(name, self._renderer, terms or Terms(), on_turn)
        return session

    def get(self, name: str) -> RecordedSession:
        """Raises BadRequest (404) for a name that is not open."""
        if name not in self._open:
            raise BadRequest(f"no session {name!r} is open", code="session_not_found", status=404)
        return self._open[name]

    def enter(self, name: str) -> RecordedSession:
        """The session that a request is for."""
        return self.open(name) if self._openable and name not in self._open else self.get(name)

    def close(self, name: str) -> RecordedSession:
        """Forget it; returns what it recorded."""
        session = self.get(name)
        del self._open[name]
        return session
