"""Small real parts that the rollout tests share: a byte-level tokenizer, a play-back engine, a sink in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import lru_cache

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tandem.config.sections.rollout import RolloutSection
from tandem.core.boxes import SandboxSpec
from tandem.core.types import Completion, EngineStats, FinishReason, GenerateRequest, WeightVersion, floats, ids
from tandem.core.wire import digest
from tandem.rollout.driver import RolloutDriver
from tandem.text.render import Renderer
from tandem.text.tokenizer import Tokenizer

END = "<|im_end|>"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = ["What is the answer? The answer is 42. python print shell echo output assistant user system hello world"] * 3


@lru_cache(maxsize=1)
def renderer() -> Renderer:
    """ChatML over a byte-level BPE of a few merges."""
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|im_start|>", END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(TEXT, trainer)
    loaded = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, chat_template=CHATML)
    return Renderer(Tokenizer(loaded, name="small"))


def say(text: str, *, end: bool = True) -> list[int]:
    """The ids of an assistant's words, with the end token."""
    tokenizer = renderer().tokenizer
    return [*tokenizer.encode(text), *([tokenizer.special_tokens[END]] if end else [])]


class PlaybackEngine:
    """A ``TokenEngine`` that says what ``script`` tells it to: ids, or an error to raise. Ids past the request's
    limit are cut off with finish reason ``length``."""

    def __init__(self, script: Callable[[GenerateRequest], Sequence[int] | Exception], *, delay_s: float = 0.0) -> None:
        self.script = script
        self.delay_s = delay_s
        self.requests: list[GenerateRequest] = []
        self.running: set[str] = set()
        self.version = 0

    async def generate(self, request: GenerateRequest, *, on_tokens: object = None, guide: object = None) -> Completion:
        self.requests.append(request)
        self.running.add(request.id)
        version = self.version
        try:
            await asyncio.sleep(self.delay_s)
            said = self.script(request)
            if isinstance(said, Exception):
                raise said
        finally:
            self.running.discard(request.id)
        cut = len(said) > request.params.max_tokens
        said = list(said)[: request.params.max_tokens]
        return Completion(
            request_id=request.id,
            token_ids=ids(said),
            logprobs=floats(-0.5 - 0.001 * place for place in range(len(said))),
            versions=ids([version] * len(said)),
            finish_reason=FinishReason.LENGTH if cut else FinishReason.STOP,
        )

    async def abort(self, request_id: str) -> None: ...

    async def load(self, version: WeightVersion) -> None:
        self.version = version.number

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.running), num_waiting=0, blocks_in_use=0, blocks_total=0, prompt_tokens=0,
            cached_tokens=0, generated_tokens=0, busy_s=0.0, version=self.version,
        )  # fmt: skip

    async def close(self) -> None: ...


class MemorySink:
    """An ``EventSink`` that keeps everything."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self.causes: list[int] = []
        self.blobs: dict[str, bytes] = {}

    def emit(self, event: object, *, cause: int = -1) -> int:
        assert cause < len(self.events)
        self.events.append(event)
        self.causes.append(cause)
        return len(self.events) - 1

    def put_blob(self, data: bytes) -> str:
        self.blobs[digest(data)] = data
        return digest(data)

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]


class NoSandboxes:
    """A service for environments without boxes: nothing may be asked of it."""

    async def create(self, spec: SandboxSpec):
        raise AssertionError("no box was to be made")

    async def close(self) -> None: ...


def driver(environment, engine, sink, *, sandboxes=None, section=None, max_context_tokens=2048, in_order=False,
           gateway=None):  # fmt: skip
    return RolloutDriver(
        environment=environment,
        engine=engine,
        renderer=renderer(),
        sandboxes=sandboxes or NoSandboxes(),
        sandbox_spec=SandboxSpec(),
        sink=sink,
        section=section or RolloutSection(groups_per_step=2, group_size=2, max_concurrent_episodes=4),
        max_context_tokens=max_context_tokens,
        seed=7,
        in_order=in_order,
        gateway=gateway,
    )
