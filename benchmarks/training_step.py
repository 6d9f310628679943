"""What the training step saves: ``python benchmarks/training_step.py [--layers N] [--rounds N]``.

Prefix sharing: the same step on one group (8 samples, prompt of 512 tokens, answers of 64), with the prompt computed
once and with every sample computed whole, in turns; SmolLM2's shapes with fewer layers, float32.
Memory of the loss: peak of the process above its start for log-probabilities and their gradient, in chunks and at
once, each in a process of its own; vocabulary 262,144, hidden size 64.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from tandem.algorithms.catalog import grpo
from tandem.config.sections.engine import TrainSection
from tandem.config.sections.optimizer import OptimizerSection
from tandem.core.types import Sample, Trajectory, floats, ids, mask
from tandem.engine.compute import ComputeQueue
from tandem.engine.train.step import LocalTrainEngine
from tandem.engine.weights import PublishedWeights
from tandem.kernels.ops import Ops
from tandem.models.builtin import resolve_model
from tandem.models.loader import init_model, read_spec
from tandem.record.summary import table
from tandem.trainer.batcher import make_plan

PLAIN_GRPO = dataclasses.replace(grpo.GRPO, kl_weight=0.0)  # no second model beside
PROMPT, ANSWER, SIBLINGS, VOCABULARY = 512, 64, 8, 262_144


def group() -> list[Sample]:
    rng = np.random.default_rng(0)
    prompt = rng.integers(1, 1000, PROMPT).tolist()
    flags = [0] * PROMPT + [1] * ANSWER
    return [
        Sample(
            trajectory=Trajectory(
                episode_id=f"e{index}", group_id="g", token_ids=ids(prompt + rng.integers(1, 1000, ANSWER).tolist()),
                loss_mask=mask(flags), logprobs=floats([-10.0 * flag for flag in flags]),
                versions=ids([0] * len(flags)), num_prompt_tokens=PROMPT,
            ),
            advantages=floats([(index - 3.5) * flag for flag in flags]),
            rl_weights=floats(flags),
            ce_weights=floats([0.0] * len(flags)),
        )
        for index in range(SIBLINGS)
    ]  # fmt: skip


def prefix_sharing(layers: int, rounds: int) -> list[list[str]]:
    spec = dataclasses.replace(read_spec(resolve_model("smollm2")), num_layers=layers, vocab_size=4096)
    samples, compute = group(), ComputeQueue()
    times: dict[bool, list[float]] = {True: [], False: []}
    try:
        for turn in range(2 * (rounds + 1)):
            share = turn % 2 == 0
            section = TrainSection(micro_batch_tokens=8192, share_prefixes=share)
            engine = LocalTrainEngine(
                PublishedWeights(init_model(spec, seed=0, dtype=torch.float32)), compute, train=section,
                optimizer=OptimizerSection(), algorithm=PLAIN_GRPO, total_steps=1,
            )  # fmt: skip
            plan = make_plan(1, samples, PLAIN_GRPO, section)
            started = time.perf_counter()
            asyncio.run(engine.step(plan))
            if turn >= 2:  # the first of each warms up
                times[share].append(time.perf_counter() - started)
    finally:
        compute.close()
    shared, whole = statistics.median(times[True]), statistics.median(times[False])
    row = [f"{SIBLINGS} x ({PROMPT} + {ANSWER}) tokens", f"{shared:.2f}", f"{whole:.2f}", f"{whole / shared:.2f}"]
    return [["a step, seconds", "shared", "whole", "times"], row]


def loss_memory(rows: int, chunk: int) -> float:
    """Peak megabytes above the start, measured in a fresh process."""
    words = [sys.executable, __file__, "--measure", str(rows), str(chunk)]
    return float(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def peak_kb() -> int:
    """Highest resident memory since this program began; ``getrusage`` would count that of the process it came from."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


def measure(rows: int, chunk: int) -> None:
    hidden, head = torch.randn(rows, 64, requires_grad=True), torch.randn(VOCABULARY, 64, requires_grad=True)
    targets = torch.zeros(rows, dtype=torch.int64)
    before = peak_kb()
    if chunk:
        logprobs = Ops("exact", "cpu").token_logprobs(hidden, head, targets, torch.ones(rows), chunk)[0]
    else:
        logprobs = (hidden @ head.T).float().log_softmax(1).gather(1, targets[:, None])[:, 0]
    logprobs.sum().backward()
    print((peak_kb() - before) / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=4096, help="tokens of the loss; the naive one needs 12 GB at 4096")
    parser.add_argument("--measure", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(*options.measure)
        return
    print(table(prefix_sharing(options.layers, options.rounds)), flush=True)
    chunked, naive = loss_memory(options.rows, 256), loss_memory(options.rows, 0)
    row = [f"{options.rows} tokens", f"{chunked:.0f}", f"{naive:.0f}", f"1/{naive / chunked:.1f}"]
    print("\n" + table([["peak of the loss, MB", "in chunks", "at once", "part"], row]))


if __name__ == "__main__":
    main()
