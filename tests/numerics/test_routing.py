"""The experts that made a token are those that it is trained through."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from bare_methods import GRPO

from tandem.config.sections.engine import EngineSection, InferSection, TrainSection
from tandem.config.sections.optimizer import OptimizerSection
from tandem.core.routes import MISSING, Routes, missing
from tandem.core.types import (
    Completion,
    Episode,
    FinishReason,
    GenerateRequest,
    Ids,
    Message,
    Role,
    Sample,
    SamplingParams,
    Turn,
    floats,
    ids,
)
from tandem.engine.compute import ComputeQueue
from tandem.engine.infer.loop import InferEngine
from tandem.engine.train.batch import lay_out
from tandem.engine.train.step import LocalTrainEngine
from tandem.engine.weights import PublishedWeights
from tandem.models.loader import init_model
from tandem.models.routes import RouteReplay
from tandem.rollout.assemble import assemble
from tandem.trainer.batcher import make_plan
from tests.numerics.test_parity import FAMILIES

SPEC = FAMILIES["qwen3_moe"]
WIDTH = SPEC.route_width
PROMPT = np.random.default_rng(3).integers(1, SPEC.vocab_size, 40).tolist()


class Pair:
    """An engine that records routes, and a trainer on the same weights."""

    def __init__(self, train: TrainSection, **infer: Any) -> None:
        self.train, self.compute = train, ComputeQueue()
        self.weights = PublishedWeights(init_model(SPEC, seed=0, dtype=torch.float32))
        infer = {"max_num_seqs": 6, "max_step_tokens": 16, "block_size": 4, "kv_tokens": 2048} | infer
        section = EngineSection(infer=InferSection(record_routes=True, **infer), train=train)
        self.sampler = InferEngine(
            self.weights.model, self.weights, section, self.compute, max_context_tokens=200, eos_ids=()
        )
        self.trainer = LocalTrainEngine(
            self.weights, self.compute, train=train, algorithm=GRPO, total_steps=3,
            optimizer=OptimizerSection(learning_rate=3e-3, warmup_steps=0),
        )  # fmt: skip

    def run(self, work: Callable[[], Awaitable[None]]) -> None:
        async def whole() -> None:
            await work()
            await self.sampler.close()

        try:
            asyncio.run(whole())
        finally:
            self.compute.close()

    async def say(self, name: str, prompt: Ids, seed: int, count: int = 9) -> Completion:
        params = SamplingParams(max_tokens=count)
        return await self.sampler.generate(GenerateRequest(id=name, prompt_ids=prompt, params=params, seed=seed))

    async def sample(self, seed: int, turns: int) -> Sample:
        """An episode of several turns with observations between them, as a sample."""
        prompt, made = ids(PROMPT), []
        for number in range(turns):
            answer = await self.say(f"e{seed}.{number}", prompt, 10 * seed + number)
            made.append(Turn(
                prompt_ids=prompt, completion_ids=answer.token_ids, logprobs=answer.logprobs,
                versions=answer.versions, message=Message(role=Role.ASSISTANT, content=""),
                finish_reason=FinishReason.LENGTH, routes=answer.routes,
            ))  # fmt: skip
            prompt = prompt + answer.token_ids + ids([1 + seed, 2, 3 + number])
        episode = Episode(id=f"e{seed}", task_id="t", group_id="g", index=seed, attempt=0, seed=seed, turns=tuple(made))
        trajectory = assemble(episode, temperature=1.0)[0]
        flags = [float(flag) for flag in trajectory.loss_mask]
        return Sample(
            trajectory=trajectory, advantages=floats([(-1.0) ** seed * flag for flag in flags]),
            rl_weights=floats(flags), ce_weights=floats([0.0] * len(flags)),
        )  # fmt: skip

    def own_routes(self, tokens: Ids) -> Routes:
        """What the trainer's forward pass chooses for these tokens by itself."""
        unknown = [missing(WIDTH, len(tokens))]
        layout = lay_out([tokens], share_prefixes=False, device=torch.device("cpu"), routes=unknown)
        chosen: dict[int, torch.Tensor] = {}

        class Ear(RouteReplay):
            def settle(self, place: int, own_TK: torch.Tensor, chances_TX: torch.Tensor) -> torch.Tensor:
                chosen[place] = own_TK
                return own_TK

        assert layout.routes_TR is not None
        context = replace(layout.context(), routes=Ear(layout.routes_TR))
        with torch.no_grad():
            self.weights.model(layout.ids_T, layout.positions_T, context)
        rows = torch.cat([chosen[place] for place in sorted(chosen)], dim=1).short()
        return replace(missing(WIDTH, 0), experts=ids_of(rows))


def ids_of(rows: torch.Tensor) -> array:
    made = missing(WIDTH, 0).experts
    made.frombytes(rows.contiguous().numpy().tobytes())
    return made


# The small pool holds two of the six sequences: they are preempted, and come back by copies or by computing again.
@pytest.mark.parametrize(
    "infer", [{}, {"prefix_cache": False}, {"kv_tokens": 96, "swap_tokens": 2048}, {"kv_tokens": 96}]
)
def test_recorded_routes_are_the_trainers_own(infer: dict[str, Any]):
    """Case 13 of the worked values: prefill in chunks of 16, a warm prefix cache, several turns, micro-batches with
    recomputation."""
    pair = Pair(TrainSection(micro_batch_tokens=160, checkpoint_activations=True), **infer)

    async def go() -> None:
        await pair.say("warm", ids(PROMPT), 99)
        samples = await asyncio.gather(*(pair.sample(seed, turns=3) for seed in range(6)))
        for sample in samples:
            tokens, routes = sample.trajectory.token_ids, sample.trajectory.routes
            assert routes is not None and len(routes) == len(tokens)
            read = len(tokens) - 1  # nobody read the last token
            assert routes.rows(0, read) == pair.own_routes(tokens[:-1])
            assert set(routes.rows(read, read + 1).experts) == {MISSING}
        plan = make_plan(1, samples, GRPO, pair.train)
        assert len(plan.rows) >= 2
        result = await pair.trainer.step(plan)
        assert result.metrics["routes_differing"] == 0.0 and result.metrics["routes_missing"] == 0.0
        assert result.metrics["logprob_gap_max"] == 0.0
        stats = pair.sampler.stats()
        assert bool(stats.preemptions) == ("kv_tokens" in infer)
        assert bool(stats.returned_blocks) == ("swap_tokens" in infer)
        assert (stats.cached_tokens > 0) == infer.get("prefix_cache", True)

    pair.run(go)


def test_training_takes_the_recorded_experts_and_its_own_where_there_are_none():
    """Other experts than its own are taken and counted; a marker is never expert 0."""
    pair = Pair(TrainSection(share_prefixes=False, checkpoint_activations=True))

    async def go() -> None:
        sample = await pair.sample(0, turns=1)
        routes = sample.trajectory.routes
        assert routes is not None

        def with_routes(changed: Routes | None) -> Sample:
            return replace(sample, trajectory=replace(sample.trajectory, routes=changed))

        async def score(changed: Routes | None) -> list[float]:
            return (await pair.trainer.score([with_routes(changed).trajectory]))[0].tolist()

        own = await score(None)
        assert await score(routes) == own == await score(missing(WIDTH, len(routes)))
        # Expert 4 in place of the first of each pair that has it not, in the last layer, from row 20 on.
        rows = torch.tensor(routes.experts.tolist(), dtype=torch.int16).reshape(-1, WIDTH)
        place = rows[20:-1, 2:]
        free = ~(place == 4).any(dim=1)
        place[free, 0], place[free, 1] = place[free, 1].clone(), 4
        place.copy_(place.sort(dim=1).values)
        other = replace(routes, experts=ids_of(rows))
        moved = await score(other)
        assert moved[:21] == own[:21] and moved[22:] != own[22:]
        result = await pair.trainer.step(make_plan(1, [with_routes(other)], GRPO, pair.train))
        assert result.metrics["routes_missing"] == 0.0
        layers = len(SPEC.mixtures)
        assert result.metrics["routes_differing"] == pytest.approx(int(free.sum()) / (layers * (len(rows) - 1)))
        result = await pair.trainer.step(make_plan(2, [with_routes(missing(WIDTH, len(routes)))], GRPO, pair.train))
        assert result.metrics["routes_missing"] == 1.0 and "routes_differing" not in result.metrics

    pair.run(go)


def test_an_aborted_request_tells_the_routes_it_has():
    pair = Pair(TrainSection())

    async def go() -> None:
        begun = asyncio.Event()
        request = GenerateRequest(id="a", prompt_ids=ids(PROMPT), params=SamplingParams(max_tokens=100), seed=1)
        running = asyncio.ensure_future(pair.sampler.generate(request, on_tokens=lambda _: begun.set()))
        await asyncio.wait_for(begun.wait(), 30)
        await pair.sampler.abort("a")
        done = await running
        assert done.finish_reason is FinishReason.ABORT and done.routes is not None
        tokens = ids(PROMPT) + done.token_ids
        assert len(done.routes) == len(tokens)
        assert done.routes.rows(0, len(tokens) - 1) == pair.own_routes(tokens[:-1])

    pair.run(go)
