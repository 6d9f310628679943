"""A text completion request: prompts as texts or as token ids.

Owns: what a client may send to ``/v1/completions``. Refuses, naming the field, as ``requests`` does.
"""

from __future__ import annotations

import dataclasses

import msgspec

from tandem.core.types import Ids, ids
from tandem.serve.requests import MAX_TOPS, Asked, BadRequest, SamplingBody, asked_of, decode, refuse_unless, within

DEFAULT_MAX_TOKENS = 16  # the API's own
MAX_PROMPTS = 256


class CompletionBody(SamplingBody, kw_only=True):
    # One sequence type for msgspec; which of the four forms it is, is looked at by hand.
    prompt: str | list[object]
    logprobs: int | None = None
    echo: bool | None = False
    best_of: int | None = None
    suffix: str | None = None


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that can be served; ``prompts`` are texts or ids."""

    asked: Asked
    prompts: tuple[str | Ids, ...]
    echo: bool


def read_completion(data: bytes, *, vocabulary: int) -> CompletionRequest:
    """Decode and check a request body.

    Raises:
        BadRequest: the first thing that is wrong with it.
    """
    body = decode(data, CompletionBody)
    refuse_unless({
        "suffix": not body.suffix,
        "best_of": body.best_of is None or body.best_of == (body.n or 1),
    })
    tops = body.logprobs or 0
    within("logprobs", tops, 0, MAX_TOPS)
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    least = 0 if body.echo else 1  # with echo, 0 scores the prompt and makes nothing
    asked = asked_of(body, max_tokens=limit, logprobs=body.logprobs is not None, top_logprobs=tops, least=least)
    if body.echo and asked.logprobs:
        asked = msgspec.structs.replace(asked, params=dataclasses.replace(asked.params, prompt_logprobs=True))
    return CompletionRequest(asked=asked, prompts=_prompts(body.prompt, vocabulary), echo=bool(body.echo))


def _prompts(value: str | list[object], vocabulary: int) -> tuple[str | Ids, ...]:
    if isinstance(value, str):
        return (value,)
    if not value:
        raise BadRequest("prompt: at least one is needed", param="prompt")
    if all(isinstance(each, int) for each in value):
        return (_ids(value, "prompt", vocabulary),)
    if len(value) > MAX_PROMPTS:
        raise BadRequest(f"prompt: at most {MAX_PROMPTS}, got {len(value)}", param="prompt")
    made: list[str | Ids] = []
    for number, each in enumerate(value):
        place = f"prompt[{number}]"
        if isinstance(each, str):
            made.append(each)
        elif isinstance(each, list):
            made.append(_ids(each, place, vocabulary))
        else:
            raise BadRequest(f"{place}: must be a text or a list of token ids", param=place)
    return tuple(made)


def _ids(values: list[object], place: str, vocabulary: int) -> Ids:
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocabulary:
            raise BadRequest(f"{place}: token ids are from 0 to {vocabulary - 1}, got {value!r}", param=place)
    if not values:
        raise BadRequest(f"{place}: it is empty", param=place)
    return ids(value for value in values if isinstance(value, int))
