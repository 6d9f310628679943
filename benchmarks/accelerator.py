"""What holds on an accelerator, in one command: ``python benchmarks/accelerator.py``. Without one: status 3.

Nobody has run this system on one yet; this is the script that tells. In order: the check that an engine makes at its
start, for every family and type; sampler against trainer, bit for bit, disturbed on purpose (``exactness.py``);
log-probabilities and greedy tokens beside the CPU's; decoding speed by number of sequences; training steps, with the
gap of sampler and trainer; memory beside the ledger's prediction. SmolLM2-135M where its package is installed, else
random weights of that size. Exit status 1 where an invariant does not hold; speed and memory are only told.
``--device cpu`` tries the script itself, by the same operations, on few tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from exactness import specs
from pieces.runs import recipe

from tandem.algorithms.catalog import grpo
from tandem.app.ledger import predict
from tandem.app.preflight import prepare_model
from tandem.config.sections.engine import EngineSection, InferSection, TrainSection
from tandem.config.sections.optimizer import OptimizerSection
from tandem.core.errors import ModelError
from tandem.core.types import Completion, GenerateRequest, Ids, Sample, SamplingParams, Trajectory, floats, ids, mask
from tandem.engine.compute import ComputeQueue
from tandem.engine.infer.loop import InferEngine
from tandem.engine.train.step import LocalTrainEngine
from tandem.engine.weights import PublishedWeights
from tandem.models.builtin import resolve_model
from tandem.models.causal_lm import CausalLM
from tandem.models.loader import load_model, read_spec
from tandem.models.proof import found_varying
from tandem.record.summary import table
from tandem.trainer.batcher import make_plan

PLAIN_GRPO = dataclasses.replace(grpo.GRPO, kl_weight=0.0)  # no second model beside
SKIPPED = 3
CLOSE = {torch.float32: 1e-3, torch.bfloat16: 0.3}  # a log-probability of the device beside the CPU's
DTYPES = (torch.float32, torch.bfloat16)
Answers = list[tuple[Ids, Completion]]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def model_of(folder: Path, dtype: torch.dtype, device: str, numerics: str = "exact") -> CausalLM:
    return load_model(folder, dtype=dtype, device=device, numerics=numerics, portable=True if device == "cpu" else None)


def start(folder: Path, device: str) -> tuple[list[list[str]], bool]:
    """The check at the start."""
    rows, passed = [["at the start", "type", "seconds", "what varies"]], True
    for family, spec in {"the model": read_spec(folder), **specs()}.items():
        for dtype in DTYPES:
            begun = time.perf_counter()
            found = found_varying(dtype, torch.device(device), spec, portable=True)
            passed &= not found
            spent = time.perf_counter() - begun
            rows.append([family, name_of(dtype), f"{spent:.2f}", ", ".join(found[:3]) or "nothing that was tried"])
    return rows, passed


async def answers(model: CausalLM, count: int, new: int, *, greedy: bool, prompt: int = 128) -> tuple[Answers, float]:
    """``count`` answers at once from one engine, and the seconds after its first request, which warms up."""
    section = InferSection(max_num_seqs=count, max_step_tokens=2048, kv_tokens=max(8192, count * (prompt + new + 16)))
    compute, rng = ComputeQueue(), np.random.default_rng(0)
    engine = InferEngine(
        model, PublishedWeights(model), EngineSection(infer=section), compute, max_context_tokens=1024, eos_ids=()
    )
    asked = [
        GenerateRequest(
            id=str(number), prompt_ids=ids(rng.integers(1, 500, prompt).tolist()), seed=number,
            params=SamplingParams(max_tokens=new, temperature=0.0 if greedy else 1.0),
        )
        for number in range(count)
    ]  # fmt: skip
    try:
        await engine.generate(replace(asked[0], id="warm", params=SamplingParams(max_tokens=2)))
        begun = time.perf_counter()
        found = await asyncio.gather(*map(engine.generate, asked))
        return list(zip((each.prompt_ids for each in asked), found, strict=True)), time.perf_counter() - begun
    finally:
        await engine.close()
        compute.close()


def beside_the_cpu(folder: Path, device: str, new: int) -> tuple[list[list[str]], bool]:
    """Greedy answers of both, and what the device gives for the CPU's."""
    rows, passed = [["beside the CPU", "same greedy tokens", "largest difference of a log-probability"]], True
    for dtype in DTYPES:
        near_model = load_model(folder, dtype=dtype)
        far_model = model_of(folder, dtype, device)
        near = asyncio.run(answers(near_model, 4, new, greedy=True))[0]
        far = asyncio.run(answers(far_model, 4, new, greedy=True))[0]
        pairs = [(a[1].token_ids, b[1].token_ids) for a, b in zip(near, far, strict=True)]
        same = sum(x == y for a, b in pairs for x, y in zip(a, b, strict=True))
        streams = [scored(model, near) for model in (near_model, far_model)]
        worst = float(np.abs(streams[0] - streams[1]).max())
        passed &= worst < CLOSE[dtype]
        rows.append([name_of(dtype), f"{same} of {4 * new}", f"{worst:.1e} (at most {CLOSE[dtype]:g})"])
    return rows, passed


def trajectory(prompt: Ids, answer: Completion) -> Trajectory:
    before, n = len(prompt), len(answer.token_ids)
    return Trajectory(
        episode_id=answer.request_id, group_id="g", token_ids=prompt + answer.token_ids,
        loss_mask=mask([0] * before + [1] * n), logprobs=floats([0.0] * before) + answer.logprobs,
        versions=ids([-1] * before) + answer.versions, num_prompt_tokens=before,
    )  # fmt: skip


def trainer_of(model: CausalLM, compute: ComputeQueue) -> LocalTrainEngine:
    return LocalTrainEngine(
        PublishedWeights(model), compute, train=TrainSection(micro_batch_tokens=4096), algorithm=PLAIN_GRPO,
        total_steps=9, optimizer=OptimizerSection(learning_rate=1e-6, warmup_steps=0),
    )  # fmt: skip


def scored(model: CausalLM, found: Answers) -> np.ndarray:
    compute = ComputeQueue()
    try:
        trainer = trainer_of(model, compute)
        return np.concatenate(asyncio.run(trainer.score([trajectory(*each) for each in found])))
    finally:
        compute.close()


def decoding(folder: Path, device: str, counts: list[int], new: int) -> list[list[str]]:
    rows = [["decoding, tokens a second", *map(str, counts)]]
    for numerics in ("exact", "fast"):
        model = model_of(folder, torch.bfloat16, device, numerics)
        speeds = []
        for count in counts:
            _, seconds = asyncio.run(answers(model, count, new, greedy=False))
            speeds.append(f"{count * new / seconds:.0f}")
        rows.append([f"bfloat16, {numerics}", *speeds])
    return rows


def training(folder: Path, device: str, size: int, new: int) -> tuple[list[list[str]], bool]:
    """Two steps on answers that the same weights sampled; memory beside the ledger."""
    on_cuda = device.startswith("cuda")
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    model, compute = model_of(folder, torch.bfloat16, device), ComputeQueue()
    found, _ = asyncio.run(answers(model, size, new, greedy=False))
    samples = [
        Sample(
            trajectory=trajectory(prompt, answer), advantages=floats([0.0] * len(prompt) + [number - size / 2] * new),
            rl_weights=floats([0.0] * len(prompt) + [1.0] * new), ce_weights=floats([0.0] * (len(prompt) + new)),
        )
        for number, (prompt, answer) in enumerate(found)
    ]  # fmt: skip
    trainer = trainer_of(model, compute)
    try:
        results = [asyncio.run(trainer.step(make_plan(step, samples, PLAIN_GRPO, TrainSection()))) for step in (1, 2)]
    finally:
        compute.close()
    gap = results[0].metrics["logprob_gap_max"]
    rows = [
        ["training", "result"],
        [f"a step of {results[1].num_tokens} tokens, seconds", f"{results[1].train_s:.2f}"],
        ["largest gap of sampler and trainer, on policy (0: the same bits)", f"{gap:.1e}"],
    ]
    if on_cuda:
        kv_tokens = max(8192, size * (128 + new + 16))
        wanted = recipe(
            f"model.path={folder}", "model.dtype=bfloat16", "model.device=cuda", f"engine.infer.kv_tokens={kv_tokens}",
            "model.max_context_tokens=1024", "algorithm.name=grpo", "data.path=x",
        )  # fmt: skip
        ledger = predict(wanted, prepare_model(wanted, model_path=folder), device=torch.device(device))
        peak = torch.cuda.max_memory_allocated(device)
        rows.append(["peak of its memory, GiB, and the ledger's", f"{peak / 2**30:.2f}, {ledger.peak / 2**30:.2f}"])
    return rows, gap == 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=2000, help="of each family, of sampler and trainer")
    options = parser.parse_args()
    device, is_trial = options.device, options.device == "cpu"
    if not is_trial and not torch.cuda.is_available():
        print(f"skipped: PyTorch {torch.__version__} sees no accelerator on this machine; nothing was measured")
        return SKIPPED
    what = "the CPU, by the operations of every device" if is_trial else torch.cuda.get_device_name(device)
    print(f"{what}; PyTorch {torch.__version__}", flush=True)
    try:
        folder = resolve_model("tiny" if is_trial else "smollm2")
    except ModelError as error:
        print(f"{error}; the model tiny takes its place, so speeds mean little: {error.hint}")
        folder = resolve_model("tiny")
    new, counts = (8, [1, 2]) if is_trial else (128, [1, 8, 32, 128])
    held = True
    for part, *arguments in ((start, device), (beside_the_cpu, device, new)):
        rows, passed = part(folder, *arguments)
        held &= passed
        print(table(rows), flush=True)
    words = [sys.executable, str(Path(__file__).with_name("exactness.py")), "--device", device, "--threads", "1"]
    tokens = min(options.tokens, 300) if is_trial else options.tokens
    held &= subprocess.run([*words, "--portable", "--tokens", str(tokens)], check=False).returncode == 0
    print(table(decoding(folder, device, counts, new)), flush=True)
    rows, passed = training(folder, device, counts[-1] // 2 if is_trial else 16, new)
    held &= passed
    print(table(rows))
    print("all that should hold holds" if held else "AN INVARIANT DOES NOT HOLD: see above")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
