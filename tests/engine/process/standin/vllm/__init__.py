"""What Tandem calls of vLLM, as a small engine without a model: where vLLM is not installed, a process runs on this.

The next token follows from all tokens so far and from the weights; its log-probability is minus its number in
thousandths. The seed ``DEADLY`` makes a step fail, as a broken kernel would.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import torch

from vllm.sampling_params import RequestOutputKind, SamplingParams

DEADLY, STEP_S = 666, 0.005


def follow(tokens: list[int], weights: int) -> int:
    return (sum(tokens) * 31 + 7 * len(tokens) + weights) % 500


class EngineArgs:
    def __init__(self, **given: object) -> None:
        assert given["logprobs_mode"] == "processed_logprobs" and given["enable_prefix_caching"]
        self.given = given


class _Pool:
    num_gpu_blocks = 65

    def __init__(self, requests: dict) -> None:
        self._requests = requests

    def get_num_free_blocks(self) -> int:
        return self.num_gpu_blocks - 1 - len(self._requests)


class _Request:
    def __init__(self, prompt: dict, params: SamplingParams) -> None:
        self.tokens, self.salt = list(prompt["prompt_token_ids"]), prompt["cache_salt"]
        self.params, self.made = params, 0


class LLMEngine:
    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}
        self._known: set[tuple] = set()
        self._weights = -1
        manager = SimpleNamespace(block_pool=_Pool(self._requests))
        scheduler = SimpleNamespace(kv_cache_manager=manager)
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))

    @classmethod
    def from_engine_args(cls, arguments: EngineArgs) -> LLMEngine:
        return cls()

    def add_request(self, request_id: str, prompt: dict, params: SamplingParams, *, priority: int) -> str:
        if params.temperature < 0:
            raise ValueError("temperature must be non-negative")
        assert params.output_kind is RequestOutputKind.DELTA and not params.detokenize and params.max_tokens > 0
        self._requests[request_id] = _Request(prompt, params)
        return request_id

    def abort_request(self, request_ids: list[str]) -> None:
        for name in request_ids:
            self._requests.pop(name, None)

    def collective_rpc(self, method: str | Callable, kwargs: dict | None = None) -> list:
        if callable(method):  # with a worker; this one's model has no head
            runner = SimpleNamespace(get_model=SimpleNamespace)
            return [method(SimpleNamespace(model_runner=runner))]
        assert method == "reload_weights" and kwargs is not None
        weights: Iterable[tuple[str, torch.Tensor]] = kwargs["weights_iterator"]
        self._weights = int(sum(tensor.double().abs().sum() for _, tensor in weights) * 1000)
        return [None]

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        self._known.clear()
        return True

    def step(self) -> list[SimpleNamespace]:
        time.sleep(STEP_S)
        return [self._one(name) for name in list(self._requests)]

    def _one(self, name: str) -> SimpleNamespace:
        request = self._requests[name]
        params = request.params
        if params.seed == DEADLY:
            raise RuntimeError("a kernel failed")
        prefix = (request.salt, tuple(request.tokens))
        cached = len(request.tokens) - 1 if not request.made and prefix in self._known else 0
        self._known.add(prefix)
        token = follow(request.tokens, self._weights)
        told = {token: SimpleNamespace(logprob=-token / 1000, rank=1)}
        if params.logprobs:
            told[token + 1] = SimpleNamespace(logprob=-9.0, rank=2)
        request.tokens.append(token)
        request.made += 1
        reason = "stop" if token in params.stop_token_ids else "length" if request.made == params.max_tokens else None
        if reason:
            del self._requests[name]
        made = SimpleNamespace(token_ids=[token], logprobs=[told], finish_reason=reason)
        return SimpleNamespace(request_id=name, outputs=[made], num_cached_tokens=cached)
