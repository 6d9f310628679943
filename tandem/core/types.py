"""The records that travel between the parts of Tandem.

Owns: every type that crosses a package wall. Refuses: behaviour, tensors, I/O.
Invariants: frozen; token streams are packed ``array.array`` buffers (ids ``'i'``, floats ``'f'``,
masks ``'b'``), one index for ids, log-probabilities, masks and versions, lengths checked here.
Absence is ``None`` (or a typed failure), never zero.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Sized
from dataclasses import dataclass, field

from tandem.core.routes import Routes

Ids = array  # typecode 'i': token ids, versions
Floats = array  # typecode 'f': log-probabilities, advantages, weights
Mask = array  # typecode 'b': 1 where the policy made the token


def ids(values: Iterable[int] = ()) -> Ids:
    """Pack token ids (or versions) into a 32-bit signed buffer."""
    return array("i", values)


def floats(values: Iterable[float] = ()) -> Floats:
    """Pack floats into a 32-bit buffer."""
    return array("f", values)


def mask(values: Iterable[int] = ()) -> Mask:
    """Pack 0/1 flags into a byte buffer."""
    return array("b", values)


def same_length(owner: str, **streams: Sized | None) -> None:
    """Raise ``ValueError`` naming the streams unless all given (non-None) streams are equally long."""
    lengths = {name: len(stream) for name, stream in streams.items() if stream is not None}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{owner}: streams differ in length: {lengths}")


# ---- conversation -------------------------------------------------------------------------------


class Role(enum.StrEnum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One parsed call. ``arguments`` is the decoded JSON object; where there is none (a call that was cut, or broken),
    ``unread`` is the text that stands in its place."""

    id: str
    name: str
    arguments: dict[str, object]
    unread: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message. An assistant message may carry parsed tool calls; a tool message names its call."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """What the model is told about a tool: ``parameters`` is a JSON schema of type object."""

    name: str
    description: str
    parameters: dict[str, object]


class ToolFailure(enum.StrEnum):
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"
    UNPARSEABLE = "unparseable"
    NONZERO_EXIT = "nonzero_exit"
    TIMEOUT = "timeout"
    OUTPUT_LIMIT = "output_limit"
    RESOURCE_LIMIT = "resource_limit"
    RAISED = "raised"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What the model is shown after a call, and how the call ended. ``failure`` is None on success."""

    call_id: str
    name: str
    content: str
    failure: ToolFailure | None = None
    duration_s: float = 0.0


# ---- tasks and episodes --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Hard limits of one episode; every wait inside it is bounded by one of them."""

    max_turns: int = 8
    max_turn_tokens: int = 256
    max_context_tokens: int = 4096
    tool_time_s: float = 10.0
    episode_time_s: float = 300.0
    reward_time_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem. ``private`` (answers, checks) never reaches the model; ``files`` are put into the box
    (path -> text) before the first turn."""

    id: str
    messages: tuple[Message, ...]
    private: dict[str, object] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    environment: str = ""
    limits: Limits | None = None


class FinishReason(enum.StrEnum):
    """Why one generation ended. TOOL_CALLS is decided by the parser, the rest by the engine."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call and what came of it. ``logprobs`` and ``versions`` run along ``completion_ids``;
    ``prompt_ids`` is the whole context the model saw, earlier turns included. ``parent`` is the number of the turn
    that the prompt goes on from: None: the one before, -1: none, a conversation of its own."""

    prompt_ids: Ids
    completion_ids: Ids
    logprobs: Floats
    versions: Ids
    message: Message
    finish_reason: FinishReason
    tool_results: tuple[ToolResult, ...] = ()
    model_s: float = 0.0
    tools_s: float = 0.0
    parent: int | None = None
    routes: Routes | None = None  # of prompt and completion, where a mixture of experts recorded them

    def __post_init__(self) -> None:
        same_length(
            "Turn", completion_ids=self.completion_ids, logprobs=self.logprobs, versions=self.versions
        )
        if self.routes is not None:
            same_length("Turn", context=self.prompt_ids + self.completion_ids, routes=self.routes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One reward function's verdict. ``value`` None means no verdict; ``failure`` says why."""

    name: str
    value: float | None
    weight: float = 1.0
    failure: FailureKind | None = None
    detail: str = ""


class StopReason(enum.StrEnum):
    """Why the workflow of an episode ended normally."""

    ANSWERED = "answered"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    CONTEXT_FULL = "context_full"


class FailureKind(enum.StrEnum):
    """The failure taxonomy. Each is counted under its own name; none becomes a zero reward."""

    SANDBOX = "sandbox"  # the box was lost or never came: infrastructure
    ENVIRONMENT = "environment"  # user's environment or workflow code raised
    POLICY = "policy"  # the inference engine failed
    PROMPT_TOO_LONG = "prompt_too_long"
    EPISODE_TIMEOUT = "episode_timeout"
    REWARD = "reward"  # reward code raised or returned a wrong type
    REWARD_TIMEOUT = "reward_timeout"
    REWARD_MISSING = "reward_missing"  # reward code answered None
    CANCELLED = "cancelled"  # stopped from outside (shutdown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    kind: FailureKind
    detail: str
    retryable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """The record of one attempt at a task. Either ``failure`` is None and ``reward`` is the weighted sum of
    the scores, or ``failure`` says what went wrong and ``reward`` is None."""

    id: str
    task_id: str
    group_id: str
    index: int  # place among its siblings
    attempt: int  # 0, then +1 for each retry in a fresh box
    seed: int
    turns: tuple[Turn, ...]
    scores: tuple[Score, ...] = ()
    reward: float | None = None
    stop_reason: StopReason | None = None
    failure: Failure | None = None
    final_message: str = ""
    lease_s: float = 0.0
    model_s: float = 0.0
    tools_s: float = 0.0
    reward_s: float = 0.0
    total_s: float = 0.0

    def __post_init__(self) -> None:
        if self.failure is not None and self.reward is not None:
            raise ValueError(f"episode {self.id}: a failed episode carries no reward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A task and its sibling episodes, ordered by index: the unit of credit."""

    id: str
    task: Task
    episodes: tuple[Episode, ...]


# ---- training ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One token-level branch of an episode: prompt, then model and observation tokens in order.

    All four streams have one index. ``loss_mask`` is 1 exactly where the policy sampled the token; there
    ``logprobs`` is the sampler's log-probability and ``versions`` the weight version, elsewhere 0 and -1.
    """

    episode_id: str
    group_id: str
    token_ids: Ids
    loss_mask: Mask
    logprobs: Floats
    versions: Ids
    num_prompt_tokens: int
    temperature: float = 1.0
    routes: Routes | None = None

    def __post_init__(self) -> None:
        same_length(
            f"trajectory of {self.episode_id}",
            token_ids=self.token_ids,
            loss_mask=self.loss_mask,
            logprobs=self.logprobs,
            versions=self.versions,
            routes=self.routes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A trajectory with credit. All streams run along ``trajectory.token_ids``; ``rl_weights`` and
    ``ce_weights`` multiply the policy-gradient and the cross-entropy loss of each token (0: no loss).
    ``reward`` is the episode's, where there was one; ``old_logprobs`` are those of the weights that the step begins
    with, ``values`` a critic's for what comes before each token, ``returns`` what the critic should have said."""

    trajectory: Trajectory
    advantages: Floats
    rl_weights: Floats
    ce_weights: Floats
    reference_logprobs: Floats | None = None
    old_logprobs: Floats | None = None
    values: Floats | None = None
    returns: Floats | None = None
    reward: float | None = None

    def __post_init__(self) -> None:
        same_length(
            f"sample of {self.trajectory.episode_id}",
            token_ids=self.trajectory.token_ids,
            advantages=self.advantages,
            rl_weights=self.rl_weights,
            ce_weights=self.ce_weights,
            reference_logprobs=self.reference_logprobs,
            old_logprobs=self.old_logprobs,
            values=self.values,
            returns=self.returns,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """What one optimizer step trains on: rows of samples, no tensors. ``num_loss_tokens`` and
    ``num_sequences`` are the step's one normaliser, whatever the micro-batching."""

    step: int
    rows: tuple[tuple[Sample, ...], ...]  # each row is one micro-batch
    num_loss_tokens: int
    num_sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What the train engine reports about one step. ``metrics`` are plain numbers by name."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    num_loss_tokens: int
    num_tokens: int
    metrics: dict[str, float]
    train_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightVersion:
    """Published weights. ``digest`` names every parameter's bytes (empty where nobody asked for it);
    ``place`` says how an engine gets at them: ``alias`` (same modules) or a folder."""

    number: int
    step: int
    digest: str = ""
    place: str = "alias"


# ---- inference -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one completion. ``temperature`` 0 is greedy (log-probabilities are then of T = 1).
    Log-probabilities are those of the distribution that was sampled: after bias, penalties, a guide's mask, min-p,
    temperature, top-k and top-p, in this order."""

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0  # tokens less likely than this part of the likeliest are left out
    repetition_penalty: float = 1.0  # divides positive logits, multiplies negative ones, of tokens seen anywhere
    frequency_penalty: float = 0.0  # taken off once for each time that the answer has the token
    presence_penalty: float = 0.0  # taken off once if the answer has the token
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int = 0  # how many of the likeliest tokens to report beside each token
    prompt_logprobs: bool = False  # report the prompt's tokens too, at temperature 1
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()  # stop strings: honoured by the server, which sees text
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Token ids in. ``seed`` keys the counter-based generator: token t of the answer draws from
    (seed, t) alone, whatever shares the batch.

    Requests of one ``group`` stand in one line; the lines of a busy engine get equal shares of its tokens, and a step
    of ``priority`` doubles a line's share. ``so_far`` is an answer that was begun: this one goes on behind it, its
    tokens are the first of the new completion and count as sampled (draws, penalties and ``max_tokens`` count on).
    """

    id: str
    prompt_ids: Ids
    params: SamplingParams
    seed: int = 0
    group: str = ""
    priority: int = 0
    so_far: Completion | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Top:
    """The likeliest tokens at one place, the likeliest first."""

    token_ids: Ids
    logprobs: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Tokens of an answer as they are made, each with what its ``Completion`` will say of it. The prompt's
    log-probabilities, where they were asked for, come with the first of them."""

    token_ids: Ids
    logprobs: Floats
    tops: tuple[Top, ...] | None = None
    prompt_logprobs: Floats | None = None
    prompt_tops: tuple[Top, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Token ids out, one log-probability and weight version each. An aborted request returns what it had.
    ``tops`` has one entry a token where the request asked for them; ``prompt_logprobs`` and ``prompt_tops`` are those
    of the prompt's second token and what follows (nothing predicts the first)."""

    request_id: str
    token_ids: Ids
    logprobs: Floats
    versions: Ids
    finish_reason: FinishReason
    num_cached_tokens: int = 0
    queue_s: float = 0.0
    total_s: float = 0.0
    tops: tuple[Top, ...] | None = None
    prompt_logprobs: Floats | None = None
    prompt_tops: tuple[Top, ...] | None = None
    routes: Routes | None = None  # of the prompt and the answer, where they are recorded

    def __post_init__(self) -> None:
        same_length(
            f"completion of {self.request_id}",
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            versions=self.versions,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot of the inference engine's counters since it started. ``computed_tokens`` went through the model,
    which is less than prompts and answers where prefixes were cached and more where requests were preempted."""

    num_running: int
    num_waiting: int
    blocks_in_use: int
    blocks_total: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    busy_s: float
    version: int
    computed_tokens: int | None = None  # None: this engine does not tell
    preemptions: int | None = None
    swapped_blocks: int | None = None  # out of the cache
    returned_blocks: int | None = None  # and back into it
