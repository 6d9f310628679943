"""Forking a recorded conversation: ``/sessions/NAME/v1/branches``.

The body is a chat request whose messages may end with an answer of the session, or with what follows one. ``n``
branches are made there. Each is an answer like any other of the session: a client goes on with one by sending its
conversation again.
"""

from __future__ import annotations

import msgspec

from tandem.serve.chat import ChatBody, ChatRequest, checked
from tandem.serve.requests import BadRequest, decode, within


class BranchBody(ChatBody, kw_only=True):
    at: int | None = None  # how many of the messages are kept; None: all


class BranchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``at`` messages of a conversation, to be answered ``chat.asked.num_choices`` times."""

    chat: ChatRequest
    recorded: bool  # the kept messages hold an answer, which must be one of the session's


def read_branch(data: bytes) -> BranchRequest:
    """Raises ``BadRequest``."""
    body = decode(data, BranchBody)
    if body.stream:
        raise BadRequest("stream: branches are not streamed", param="stream", code="unsupported_value")
    kept = body.messages if body.at is None else body.messages[: body.at]
    if body.at is not None:
        within("at", body.at, 1, len(body.messages))
    body.messages = kept
    return BranchRequest(chat=checked(body), recorded=any(message.role == "assistant" for message in kept))
