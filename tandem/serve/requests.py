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

MAX_CHOICES, MAX_STOPS = 128, 16


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
    return_token_ids: bool | None = False  # extension: the ids of prompt and answer
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # These say something about the client, not about the answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None


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
    body: SamplingBody, *, max_tokens: int | None, logprobs: bool, max_tokens_field: str = "max_tokens", least: int = 1
) -> Asked:
    """The checked common part of a body; ``least`` is the smallest ``max_tokens``."""
    refuse_unless({
        "frequency_penalty": body.frequency_penalty in (None, 0),
        "presence_penalty": body.presence_penalty in (None, 0),
        "logit_bias": not body.logit_bias,
    })
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options: needs stream = true", param="stream_options")
    if max_tokens is not None:
        within(max_tokens_field, max_tokens, least, 2**31 - 1)
    num_choices = 1 if body.n is None else body.n
    within("n", num_choices, 1, MAX_CHOICES)
    if body.seed is not None:
        within("seed", body.seed, -(2**63), 2**63 - 1)
    return Asked(
        model=body.model,
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        max_tokens=max_tokens,
        params=_params(body),
        num_choices=num_choices,
        seed=secrets.randbits(62) if body.seed is None else body.seed,
        logprobs=logprobs,
        token_ids=bool(body.return_token_ids),
    )


def within(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise BadRequest(f"{field}: must be from {low} to {high}, got {value}", param=field)


def _params(body: SamplingBody) -> SamplingParams:
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
    return SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, stop=tuple(stop))
