"""Checkpoints: whole or not at all, bit for bit, and a resumed run equals an uninterrupted one."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from bare_methods import GRPO

from tandem.config.sections.engine import TrainSection
from tandem.config.sections.optimizer import OptimizerSection
from tandem.core.errors import RecordError
from tandem.core.types import Sample, floats
from tandem.engine.compute import ComputeQueue
from tandem.engine.train.checkpoint import CheckpointStore, broken
from tandem.engine.train.score import frozen_copy
from tandem.engine.train.snapshot import hold, keep_all
from tandem.engine.train.step import LocalTrainEngine
from tandem.engine.train.tensor_file import write_tensors
from tandem.engine.train.value import CriticEngine, ValueModel
from tandem.engine.weights import PublishedWeights
from tandem.trainer.batcher import make_plan
from tests.engine.train.tiny import group_samples, tiny_model

SECTION = TrainSection(micro_batch_tokens=64)
OPTIMIZER = OptimizerSection(learning_rate=1e-2, warmup_steps=3, decay="cosine")


class Process:
    """Everything of one training process."""

    def __init__(
        self, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, keep: int = 2,
        optimizer: OptimizerSection = OPTIMIZER,
    ) -> None:  # fmt: skip
        self.model = tiny_model(seed=seed, dtype=dtype)
        self.weights = PublishedWeights(self.model)
        self.compute = ComputeQueue()
        self.engine = LocalTrainEngine(
            self.weights, self.compute, train=SECTION, optimizer=optimizer, algorithm=GRPO, total_steps=8
        )
        self.store = CheckpointStore(folder, self.weights, self.engine.optimizer, keep=keep)

    def train(self, first: int, last: int) -> None:
        async def go() -> None:
            for step in range(first, last + 1):
                await self.engine.step(make_plan(step, group_samples(seed=step), GRPO, SECTION))
                await self.engine.publish()

        asyncio.run(go())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, dtype) -> None:
    whole = Process(tmp_path / "a", dtype=dtype)
    whole.train(1, 8)
    first = Process(tmp_path / "b", dtype=dtype)
    first.train(1, 5)
    random.seed(3), np.random.seed(4), torch.manual_seed(5)
    first.store.save(5, {"rollout": {"next": 17}, "name": "x", "list": [1, 2.5, None, True], "raw": b"\x00\xff"})
    drawn = random.random(), np.random.rand(), float(torch.rand(()))
    second = Process(tmp_path / "b", seed=99, dtype=dtype)
    assert second.store.latest() == 5
    extra = second.store.restore(5)
    assert extra == {"rollout": {"next": 17}, "name": "x", "list": [1, 2.5, None, True], "raw": b"\x00\xff"}
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == drawn
    assert second.weights.digest() == first.weights.digest()
    assert second.weights.version == 5 and second.weights.current.step == 5
    second.train(6, 8)
    assert second.weights.digest() == whole.weights.digest()
    for process in (whole, first, second):
        process.compute.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_8_bit_moments_resume_bit_for_bit_and_are_not_taken_for_others(dtype, tmp_path) -> None:
    small = OPTIMIZER.model_copy(update={"moments": "8bit"})
    whole = Process(tmp_path / "a", dtype=dtype, optimizer=small)
    whole.train(1, 3)
    whole.store.save(3, {})
    whole.train(4, 6)
    again = Process(tmp_path / "a", dtype=dtype, optimizer=small, seed=9)
    again.store.restore(3)
    again.train(4, 6)
    assert again.weights.digest() == whole.weights.digest()
    assert {str(t.dtype) for t in again.engine.optimizer.moments().values()} == {"torch.uint8", "torch.float32"}
    other = Process(tmp_path / "a", dtype=dtype)
    before = other.weights.digest()
    with pytest.raises(RecordError, match=r"optimizer\.moments"):
        other.store.restore(3)
    assert other.weights.digest() == before
    for process in (whole, again, other):
        process.compute.close()


def test_a_checkpoint_before_the_first_step_restores_too(tmp_path) -> None:
    first, second = Process(tmp_path), Process(tmp_path, seed=1)
    first.store.save(0, {})
    second.train(1, 2)
    second.store.restore(0)
    assert second.weights.digest() == first.weights.digest()
    first.train(1, 1), second.train(1, 1)
    assert second.weights.digest() == first.weights.digest()
    first.compute.close(), second.compute.close()


def test_newest_are_kept_and_a_remade_step_takes_its_place(tmp_path) -> None:
    process = Process(tmp_path, keep=2)
    for step in (1, 2, 3):
        process.store.save(step, {"step": step})
    assert process.store.steps() == [2, 3] and process.store.latest() == 3
    digest = process.store.digest(3)
    process.store.save(3, {"step": "again"})
    assert process.store.digest(3) != digest and process.store.restore(3) == {"step": "again"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]
    process.compute.close()


def test_torn_and_changed_checkpoints(tmp_path) -> None:
    process = Process(tmp_path)
    process.store.save(1, {})
    process.store.save(2, {})
    (tmp_path / "step-000002" / "moments.safetensors").unlink()
    assert process.store.latest() == 1
    with pytest.raises(RecordError, match="no complete checkpoint of step 2"):
        process.store.restore(2)
    file = tmp_path / "step-000001" / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert broken(tmp_path) == {"step-000002": "moments.safetensors: No such file or directory"}
    before = process.weights.digest()
    with pytest.raises(RecordError, match="not what was saved"):
        process.store.restore(1)
    assert process.weights.digest() == before
    os.truncate(file, 100)
    (tmp_path / "step-000002" / "manifest.json").write_text('{"format": 1, "files": []}')
    (tmp_path / "step-old").mkdir()
    assert process.store.latest() is None
    assert broken(tmp_path) == {
        "step-000001": f"weights.safetensors has 100 of {len(data)} bytes",
        "step-000002": "manifest.json is broken",
        "step-old": "its name is no step",
    }
    process.compute.close()


def test_the_reference_of_a_penalty_comes_back(tmp_path) -> None:
    process = Process(tmp_path)
    reference = frozen_copy(process.model)
    store = CheckpointStore(tmp_path, process.weights, process.engine.optimizer, keep=1, reference=reference)
    process.train(1, 2)
    store.save(2, {})
    other = Process(tmp_path, seed=5)
    empty = frozen_copy(other.model)
    CheckpointStore(tmp_path, other.weights, other.engine.optimizer, keep=1, reference=empty).restore(2)
    for one, two in zip(reference.parameters(), empty.parameters(), strict=True):
        assert torch.equal(one, two)
    process.store.save(3, {})
    with pytest.raises(RecordError, match="no reference weights"):
        store.restore(3)
    process.compute.close(), other.compute.close()


def test_a_critic_resumes_bit_for_bit(tmp_path) -> None:
    def made(seed: int) -> tuple[Process, CriticEngine, CheckpointStore]:
        process = Process(tmp_path, seed=seed)
        critic = CriticEngine(
            ValueModel(tiny_model(seed=seed)), process.compute, train=SECTION, optimizer=OPTIMIZER, clip=0.2,
            total_steps=4,
        )  # fmt: skip
        store = CheckpointStore(tmp_path, process.weights, process.engine.optimizer, keep=2, critic=critic)
        return process, critic, store

    def learn(critic: CriticEngine, first: int, last: int) -> list[dict[str, float]]:
        async def go() -> list[dict[str, float]]:
            return [await critic.step(make_plan(step, valued(step), GRPO, SECTION)) for step in range(first, last + 1)]

        return asyncio.run(go())

    def valued(seed: int) -> list[Sample]:
        return [
            dataclasses.replace(each, values=floats([0.1] * n), returns=floats([float(seed)] * n))
            for each in group_samples(seed=seed)
            for n in (len(each.trajectory.token_ids),)
        ]

    one, critic, store = made(0)
    learn(critic, 1, 2)
    store.save(2, {})
    wanted = learn(critic, 3, 4)
    other, again, restored = made(8)
    restored.restore(2)
    assert learn(again, 3, 4) == wanted and wanted[0]["value_loss"] > 0
    for ours, theirs in zip(critic.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    one.store.save(3, {})
    with pytest.raises(RecordError, match="holds no critic"):
        restored.restore(3)
    one.compute.close(), other.compute.close()


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path) -> None:
    """Steps run between ``begin`` and the end of the write; what is saved is the state at the border."""
    whole, process = Process(tmp_path / "a"), Process(tmp_path / "b", keep=9)
    whole.train(1, 8)
    digests, writes = {}, []
    for step in range(1, 9):
        process.train(step, step)
        digests[step] = process.weights.digest()
        writes.append(process.store.begin(step, {"step": step}))
    assert process.weights.digest() == whole.weights.digest()
    process.store.wait()
    assert all(write.done() for write in writes) and process.store.steps() == list(range(1, 9))
    for step in (1, 4, 7):
        again = Process(tmp_path / "b", seed=step, keep=9)
        assert again.store.restore(step) == {"step": step}
        assert again.weights.digest() == digests[step]
        again.train(step + 1, 8)
        assert again.weights.digest() == whole.weights.digest()
        again.compute.close()
    whole.compute.close(), process.compute.close()


def test_nothing_is_copied_unless_an_update_comes_first(tmp_path) -> None:
    process = Process(tmp_path)
    process.train(1, 1)
    held = hold(process.engine.optimizer.weights())
    copies: list[int] = []
    process.engine.optimizer.before_change(lambda: copies.append(keep_all(held.values())))
    before = {name: tensor.clone() for name, tensor in process.engine.optimizer.weights().items()}
    written = write_tensors(tmp_path / "half", {name: held[name] for name in list(held)[:3]})
    assert written and not copies
    process.train(2, 3)
    assert len(copies) == 1 and copies[0] == 4 * sum(before[name].numel() for name in list(held)[3:])
    for name in list(held)[3:]:
        with held[name].reading() as kept:
            assert torch.equal(kept, before[name])
    process.compute.close()


def test_a_full_disk_is_an_error_of_its_own_and_takes_no_older_checkpoint(small_disk) -> None:
    process = Process(small_disk / "kept", keep=3)
    process.train(1, 1)
    process.store.save(1, {})
    (small_disk / "filler").write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096 - 100_000))
    process.train(2, 2)
    write = process.store.begin(2, {})
    process.train(3, 3)  # goes on: the write fails behind it
    with pytest.raises(RecordError, match=f"no space left at {small_disk}") as caught:
        write.result(timeout=300)
    assert "resume" in caught.value.hint
    with pytest.raises(RecordError, match="no space left"):
        process.store.begin(3, {})
    assert process.store.steps() == [1]
    again = Process(small_disk / "kept", seed=4)
    again.store.restore(1)
    (small_disk / "filler").unlink()
    again.train(2, 3)
    again.store.save(3, {})
    assert again.store.steps() == [1, 3] and again.weights.digest() == process.weights.digest()
    assert not list((small_disk / "kept").glob(".unfinished-*"))
    process.compute.close(), again.compute.close()
