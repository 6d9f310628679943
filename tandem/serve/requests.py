"""What every request body shares: decoding, sampling parameters, refusals.

Owns: the words of a refusal and the ranges of sampling parameters. Nothing a client sends is repaired or dropped in
silence: wrong types, values out of range, unknown fields, and known fields that would change the answer but are not
supported are refused by name.
"""

from __future__ import annotations

import difflib
import math
import re
import secrets
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from tandem.core.types import SamplingParams

MAX_CHOICES, MAX_STOPS, MAX_TOPS = 128, 16, 20
MAX_PRIORITY, MAX_GROUP = 16, 200


class BadRequest(Exception):
    """The client's mistake: ``param`` is the field, as the client wrote its path."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.param, self.code, self.status = message, param, code, status


class Struct(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Unknown keys are errors."""


class StreamOptions(Struct, kw_only=True):
    include_usage: bool = False


class SamplingBody(Struct, kw_only=True):
    """The fields that chat and completions share."""

    model: str
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    n: int | None = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    # Extensions, named as other servers name them.
    return_token_ids: bool | None = False  # the ids of prompt and answer
    min_p: float | None = None
    repetition_penalty: float | None = None
    guided_json: dict[str, object] | None = None  # a JSON schema
    guided_regex: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    group: str | None = None  # requests of one group share one line of a busy engine
    priority: int | None = None  # a step doubles the line's share
    # These say something about the client, not about the answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None


class GuideSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer must fit: exactly one of them. ``field`` is what the client wrote it in."""

    field: str
    schema: dict[str, object] | None = None
    regex: str | None = None
    lark: str | None = None


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """How to answer. ``max_tokens`` None: as many as the context holds."""

    model: str
    stream: bool
    include_usage: bool
    max_tokens: int | None
    params: SamplingParams
    num_choices: int
    seed: int
    logprobs: bool
    token_ids: bool
    guide: GuideSpec | None = None
    group: str = ""
    priority: int = 0


B = TypeVar("B", bound=SamplingBody)


def decode(data: bytes, kind: type[B]) -> B:
    """Raises ``BadRequest`` naming the first field that is wrong."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$")
        param = place.rstrip("`").lstrip(".") or None
        if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", reason, re.DOTALL):
            param = f"{param}.{unknown[1]}" if param else unknown[1]
            near = difflib.get_close_matches(unknown[1], kind.__struct_fields__, n=1)
            reason = "no such field" + (f"; did you mean {near[0]!r}?" if near else "")
        elif missing := re.fullmatch(r"Object missing required field `(.*)`", reason):
            param = f"{param}.{missing[1]}" if param else missing[1]
            reason = "this field is required"
        raise BadRequest(f"{param or 'body'}: {reason}", param=param) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error


def refuse_unless(neutral: Mapping[str, bool]) -> None:
    """Refuse fields that are known and would change the answer, but are not there."""
    for field, is_neutral in neutral.items():
        if not is_neutral:
            raise BadRequest(f"{field}: this value is not supported", param=field, code="unsupported_value")


def asked_of(
    body: SamplingBody,
    *,
    max_tokens: int | None,
    logprobs: bool,
    top_logprobs: int = 0,
    max_tokens_field: str = "max_tokens",
    least: int = 1,
    guide: GuideSpec | None = None,
) -> Asked:
    """The checked common part of a body; ``least`` is the smallest ``max_tokens``."""
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options: needs stream = true", param="stream_options")
    if max_tokens is not None:
        within(max_tokens_field, max_tokens, least, 2**31 - 1)
    num_choices = 1 if body.n is None else body.n
    within("n", num_choices, 1, MAX_CHOICES)
    if body.seed is not None:
        within("seed", body.seed, -(2**63), 2**63 - 1)
    priority = body.priority or 0
    within("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)
    if len(body.group or "") > MAX_GROUP:
        raise BadRequest(f"group: at most {MAX_GROUP} characters", param="group")
    return Asked(
        model=body.model,
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        max_tokens=max_tokens,
        params=_params(body, top_logprobs),
        num_choices=num_choices,
        seed=secrets.randbits(62) if body.seed is None else body.seed,
        logprobs=logprobs,
        token_ids=bool(body.return_token_ids),
        guide=_guide(body, guide),
        group=body.group or "",
        priority=priority,
    )


def within(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise BadRequest(f"{field}: must be from {low} to {high}, got {value}", param=field)


def _guide(body: SamplingBody, other: GuideSpec | None) -> GuideSpec | None:
    given = [] if other is None else [other]
    if body.guided_json is not None:
        given.append(GuideSpec(field="guided_json", schema=body.guided_json))
    if body.guided_regex is not None:
        given.append(GuideSpec(field="guided_regex", regex=body.guided_regex))
    if len(given) > 1:
        raise BadRequest(f"give {given[0].field} or {given[1].field}, not both", param=given[1].field)
    return given[0] if given else None


def _bias(given: dict[str, float]) -> tuple[tuple[int, float], ...]:
    made = []
    for key, value in given.items():
        if not key.isascii() or not key.isdigit():
            raise BadRequest(f"logit_bias: keys are token ids, got {key!r}", param="logit_bias")
        within("logit_bias", value, -100, 100)
        made.append((int(key), value))
    return tuple(made)


def _params(body: SamplingBody, top_logprobs: int) -> SamplingParams:
    temperature = 1.0 if body.temperature is None else body.temperature
    if not (math.isfinite(temperature) and 0 <= temperature <= 100):
        raise BadRequest(f"temperature: must be from 0 to 100, got {temperature}", param="temperature")
    top_p = 1.0 if body.top_p is None else body.top_p
    if not 0 < top_p <= 1:
        raise BadRequest(f"top_p: must be above 0 and at most 1, got {top_p}", param="top_p")
    top_k = 0 if body.top_k is None or body.top_k == -1 else body.top_k  # -1 is other servers' word for all
    within("top_k", top_k, 0, 2**31 - 1)
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stop) > MAX_STOPS or not all(stop):
        raise BadRequest(f"stop: at most {MAX_STOPS} texts, none of them empty", param="stop")
    frequency, presence = body.frequency_penalty or 0.0, body.presence_penalty or 0.0
    within("frequency_penalty", frequency, -2, 2)
    within("presence_penalty", presence, -2, 2)
    min_p = body.min_p or 0.0
    within("min_p", min_p, 0, 1)
    repetition = 1.0 if body.repetition_penalty is None else body.repetition_penalty
    within("repetition_penalty", repetition, 0.01, 100)
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        logit_bias=_bias(body.logit_bias or {}),
        top_logprobs=top_logprobs,
        stop=tuple(stop),
    )
