"""Sampler and trainer on a device that is not the CPU: they never mix tensors of both, and give the CPU's tokens.

There need not be an accelerator: ``tests.apart_device`` is a second device with real numbers and the same refusals. The
checks run in processes of their own, by name.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from bare_methods import GRPO

from tandem.algorithms.catalog.ppo import PPO
from tandem.config.sections.engine import InferSection, TrainSection
from tandem.config.sections.optimizer import OptimizerSection
from tandem.core.types import Completion
from tandem.engine.compute import ComputeQueue
from tandem.engine.infer.mover import Mover
from tandem.engine.infer.tier import Copy, Move
from tandem.engine.train.checkpoint import CheckpointStore
from tandem.engine.train.step import LocalTrainEngine
from tandem.engine.train.value import CriticEngine, ValueModel
from tandem.engine.weights import PublishedWeights
from tandem.kernels.impl.portable import rows
from tandem.kernels.ops import Ops
from tandem.models import proof
from tandem.models.attention import KVCache
from tandem.models.causal_lm import CausalLM
from tandem.models.loader import init_model
from tandem.models.lora import LoraSpec, add_adapters
from tandem.models.spec import ModelSpec
from tandem.trainer.batcher import make_plan
from tests.apart_device import check_apart
from tests.engine.infer.test_loop import MIXED, bench, model_of, request, streams
from tests.engine.train.test_value import with_returns
from tests.engine.train.tiny import SPEC, group_samples
from tests.kernels.attention_cases import packed_keys, random_qkv, shared_keys
from tests.numerics.test_parity import FAMILIES, three_steps

ALL = {"llama": SPEC, **FAMILIES}


def test_a_second_device_refuses_tensors_of_the_cpu() -> None:
    check_apart("tests.numerics.test_devices:refuses")


def refuses() -> None:
    there, here = torch.ones(3, 4, device="apart"), torch.ones(3, 4)
    for mixed in (
        lambda: there + here, lambda: there.index_select(0, torch.tensor([0])), lambda: here @ there.T,
        lambda: there[torch.tensor([0, 1])], lambda: here[torch.tensor([0, 1], device="apart")],
        lambda: torch.cat([there, here]), lambda: here.add_(there),
    ):  # fmt: skip
        with pytest.raises(RuntimeError):
            mixed()
    with pytest.raises((RuntimeError, TypeError)):
        there.numpy()
    assert torch.equal((there * 2).cpu(), here * 2)


def test_operations_follow_the_device_of_their_tensors() -> None:
    check_apart("tests.numerics.test_devices:operations")


def operations() -> None:
    far, near = Ops("exact", "apart"), Ops("exact", "cpu", portable=True)
    x, weight = torch.randn(2, 70, 64, generator=torch.Generator().manual_seed(0))
    q, k, v = random_qkv(59, 59)
    keys = shared_keys(20, [9, 30])[0]
    packed = packed_keys([59])
    angles = torch.randn(59, 16).repeat(1, 2)

    def all_of(ops: Ops, place: str) -> list[torch.Tensor]:
        inputs = [each.to(place).requires_grad_() for each in (x, weight, q, k, v)]
        x_TD, matrix, q_THD, k_SGD, v_SGD = inputs
        outs = [
            ops.linear(x_TD, matrix), ops.rms_norm(x_TD, matrix[0], 1e-5), ops.silu_mul(x_TD, matrix),
            ops.gelu_mul(x_TD, matrix), ops.rope(q_THD, angles.cos().to(place), angles.sin().to(place)),
            *ops.token_logprobs(x_TD, matrix, torch.arange(70).to(place) % 70, torch.ones(70).to(place)),
        ]  # fmt: skip
        for index, window in ((keys, 0), (packed, 7)):
            there = type(index)(*(each.to(place) for each in (index.slots_L, index.starts_T, index.counts_T)))
            outs.append(ops.attention(q_THD, k_SGD, v_SGD, there, 0.2, window))
        sum(out.square().sum() for out in outs).backward()
        found = [*outs, *(each.grad for each in inputs)]
        assert all(each.device.type == torch.device(place).type for each in found)
        return [each.detach().cpu() for each in found]

    for far_one, near_one in zip(all_of(far, "apart"), all_of(near, "cpu"), strict=True):
        assert torch.equal(far_one, near_one)


def test_the_check_at_the_start_runs_on_the_device() -> None:
    check_apart("tests.numerics.test_devices:start")


def start() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert proof.proven("exact", dtype, "apart", ALL["gemma3_text"]) == "exact"
    assert proof.proven("exact", torch.float32, "apart", ALL["qwen3_moe"]) == "exact"
    right = rows.product
    rows.product = lambda x, weight: right(x, weight) * (1 + (len(x) == 7))
    assert proof.proven("exact", torch.float32, "apart", ALL["llama"]) == "fast"


def test_the_engine_serves_from_another_device() -> None:
    check_apart("tests.numerics.test_devices:engine")


def on(place: str, spec: ModelSpec | None = None, dtype: torch.dtype = torch.float32) -> CausalLM:
    """The same weights wherever they are."""
    here = model_of(dtype=dtype) if spec is None else init_model(spec, seed=0, dtype=dtype)
    there = init_model(here.spec, seed=0, dtype=dtype, device=place, portable=True)
    with torch.no_grad():
        for mine, theirs in zip(there.parameters(), here.parameters(), strict=True):
            mine.copy_(theirs)
    return there


WORK = [
    *MIXED[2:6], MIXED[8],
    request("penalties", list(range(9)), 1, max_tokens=6, repetition_penalty=1.3, frequency_penalty=0.5),
    request("biased", list(range(9)), 1, max_tokens=6, logit_bias=((5, 4.0), (7, 2.0)), min_p=0.05),
    request("told", list(range(40)), 1, max_tokens=6, prompt_logprobs=True, top_logprobs=3),
]  # fmt: skip


async def served(model: CausalLM) -> list[Completion]:
    """What is answered, twice, and again after a pause; with little room, so that blocks go out and come back."""
    section = InferSection(max_num_seqs=5, max_step_tokens=32, block_size=4, kv_tokens=128, swap_tokens=512)
    async with bench(model, section) as engine:
        found = await asyncio.gather(*map(engine.engine.generate, WORK))
        found += await asyncio.gather(*(engine.engine.generate(replace(each, id=f"{each.id} 2")) for each in WORK))
        await engine.engine.sleep()
        found += await asyncio.gather(*(engine.engine.generate(replace(each, id=f"{each.id} 3")) for each in WORK[:2]))
        return found


def engine() -> None:
    right, near, far = (
        asyncio.run(asyncio.wait_for(served(model), 180)) for model in (model_of(), on("cpu"), on("apart"))
    )
    assert [streams(each) for each in far] == [streams(each) for each in near]
    assert [each.token_ids for each in far[: len(WORK)]] == [each.token_ids for each in far[len(WORK) : -2]]
    for ours, theirs in zip(near, right, strict=True):  # by the C kernels
        assert ours.token_ids == theirs.token_ids
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)


def test_blocks_go_out_of_a_device_and_come_back() -> None:
    check_apart("tests.numerics.test_devices:swaps")


def swaps() -> None:
    cache = KVCache(SPEC, 6 * 4, dtype=torch.bfloat16, device="apart", routes=True)
    pools = [*cache.keys, *cache.values, cache.routes]
    for layer, pool in enumerate(pools):
        pool.copy_((torch.arange(24) + layer).view(24, *[1] * (pool.dim() - 1)).expand(pool.shape))
    mover = Mover(cache, 4, 3)
    assert all(each.device.type == "cpu" for each in mover._outside)
    mover.move([Copy(Move.OUT, 5, 0), Copy(Move.OUT, 1, 2)])
    mover.move([Copy(Move.WITHIN, 0, 5), Copy(Move.IN, 0, 1), Copy(Move.IN, 2, 4)])
    wanted = torch.tensor([block * 4 + place for block in (0, 5, 2, 3, 1, 0) for place in range(4)])
    for layer, pool in enumerate(pools):
        flat = pool.cpu().flatten(1) if pool.shape[1] else torch.zeros(24, 0)
        assert torch.equal(flat.double(), (wanted + layer)[:, None].expand(flat.shape).double())


@pytest.mark.parametrize("family", ALL)
def test_training_on_another_device_has_no_gap_to_its_sampler(family: str) -> None:
    check_apart(f"tests.numerics.test_devices:trains_{family}")


def trains(family: str) -> None:
    dtype = torch.float32 if family == "llama" else torch.bfloat16
    three_steps(on("apart", ALL[family], dtype), TrainSection(micro_batch_tokens=64, share_prefixes=True))


def trains_llama() -> None:
    trains("llama")


def trains_gemma3_text() -> None:
    trains("gemma3_text")


def trains_qwen3_moe() -> None:
    trains("qwen3_moe")


def test_adapters_optimizers_critics_and_checkpoints_follow_too() -> None:
    check_apart("tests.numerics.test_devices:trains_otherwise")


def trains_otherwise() -> None:
    """The same operations on both devices give the same bits, whatever is trained and wherever its state lies."""
    section, plain = TrainSection(micro_batch_tokens=64), OptimizerSection(learning_rate=1e-2, warmup_steps=0)
    small = plain.model_copy(update={"moments": "8bit", "offload": True})
    lora = LoraSpec(rank=2, alpha=4.0, dora=True)
    for options, adapters, dtype in ((small, None, torch.bfloat16), (plain, lora, torch.float32)):
        digests = []
        for place in ("cpu", "apart"):
            compute, models = ComputeQueue(), [on(place, SPEC, dtype) for _ in range(2)]
            if adapters is not None:
                models = [add_adapters(model, adapters, seed=1) for model in models]
            with tempfile.TemporaryDirectory() as folder:
                for model, steps in zip(models, ([1, 2], [2]), strict=True):
                    weights = PublishedWeights(model)
                    trainer = LocalTrainEngine(
                        weights, compute, train=section, optimizer=options, algorithm=GRPO, total_steps=2
                    )
                    store = CheckpointStore(Path(folder), weights, trainer.optimizer, keep=2)
                    if steps == [2]:
                        store.restore(1)
                    for step in steps:
                        plan = make_plan(step, group_samples(seed=step), GRPO, section)
                        asyncio.run(trainer.step(plan))
                        if steps == [1, 2] and step == 1:
                            store.save(1, {})
                    digests.append(weights.digest())
            compute.close()
        assert len(set(digests)) == 1
    values = []
    for place in ("cpu", "apart"):
        compute = ComputeQueue()
        critic = CriticEngine(
            ValueModel(on(place, SPEC)), compute, train=section, optimizer=plain, clip=0.2, total_steps=2
        )
        samples = with_returns(group_samples())
        asyncio.run(critic.step(make_plan(1, samples, PPO, section)))
        values.append(asyncio.run(critic.values([each.trajectory for each in samples])))
        compute.close()
    assert values[0] == values[1]
