"""SFT and DPO against TRL's: ``python benchmarks/supervised.py --peer PYTHON [--steps 50] [--only curves|speed]``.

PYTHON is the interpreter of an environment that has ``trl`` and the same torch; without it our own figures are printed
alone. Curves: the loss of every step on the same rows (token ids), order, weights (SmolLM2) and AdamW, in float32; the
largest difference is to stay below 1e-4. Speed: SFT tokens a second, rows of mixed lengths, TRL with padding and with
its packing, in turns. Rows are the descriptions of what Python's standard library holds; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import random
import statistics
import time
from typing import Any

import torch
from pieces.peer import Peer

from tandem.algorithms.catalog.preference import DPO
from tandem.algorithms.catalog.sft import SFT
from tandem.algorithms.credit import demonstration, preference
from tandem.algorithms.spec import AlgorithmSpec
from tandem.config.sections.engine import TrainSection
from tandem.config.sections.optimizer import OptimizerSection
from tandem.core.types import Sample, ids, mask
from tandem.engine.compute import ComputeQueue
from tandem.engine.memory import keep_freed_memory
from tandem.engine.train.score import Scorer, frozen_copy
from tandem.engine.train.step import LocalTrainEngine
from tandem.engine.weights import PublishedWeights
from tandem.models.builtin import resolve_model
from tandem.models.loader import load_model
from tandem.record.summary import table
from tandem.text.tokenizer import Tokenizer, load_tokenizer
from tandem.trainer.batcher import make_plan
from tandem.trainer.scoring import with_reference

MODULES = ("argparse", "ast", "asyncio", "collections", "csv", "datetime", "decimal", "difflib", "email.message",
           "functools", "http.client", "inspect", "itertools", "json", "logging", "pathlib", "random", "re", "shutil",
           "socket", "statistics", "string", "subprocess", "tarfile", "textwrap", "threading", "unittest")  # fmt: skip
RATE, BETA2, MAX_TOKENS = 1e-5, 0.999, 512
Row = tuple[list[int], list[int]]  # prompt, answer


def rows(tokenizer: Tokenizer, count: int) -> list[Row]:
    """Questions and answers of mixed lengths, the same on every machine with this Python."""
    found = {}
    for module in map(importlib.import_module, MODULES):
        for name, member in sorted(vars(module).items()):
            text = inspect.getdoc(member) if callable(member) and not name.startswith("_") else None
            if text and len(text) > 40:
                found[f"{module.__name__}.{name}"] = text
    made = [
        (list(tokenizer.encode(f"Question: what is {name}?\nAnswer:")),
         [*tokenizer.encode(f" {text}"), tokenizer.eos_ids[0]][:MAX_TOKENS])
        for name, text in sorted(found.items())
    ]  # fmt: skip
    random.Random(0).shuffle(made)
    return [made[index % len(made)] for index in range(count)]


def sample(row: Row, name: str) -> Sample:
    prompt, answer = row
    return demonstration(name, ids(prompt + answer), mask([0] * len(prompt) + [1] * len(answer)))


class Ours:
    """The real train engine over given batches."""

    def __init__(self, algorithm: AlgorithmSpec, dtype: torch.dtype, steps: int) -> None:
        model = load_model(resolve_model("smollm2"), dtype=dtype)
        self.algorithm, self.section, self.compute = algorithm, TrainSection(), ComputeQueue()
        self.scorer = Scorer(frozen_copy(model), self.compute, self.section) if algorithm.needs_reference else None
        self.engine = LocalTrainEngine(
            PublishedWeights(model), self.compute, train=self.section, algorithm=algorithm, total_steps=steps,
            optimizer=OptimizerSection(learning_rate=RATE, warmup_steps=0, beta2=BETA2),
        )  # fmt: skip

    def run(self, batches: list[list[Sample]]) -> tuple[list[float], list[float]]:
        """Loss and seconds of each step."""
        return asyncio.run(self._run(batches))

    async def _run(self, batches: list[list[Sample]]) -> tuple[list[float], list[float]]:
        losses, times = [], []
        for step, samples in enumerate(batches, start=1):
            started = time.perf_counter()
            if self.scorer is not None:
                samples = await with_reference(samples, self.scorer.score)
            losses.append((await self.engine.step(make_plan(step, samples, self.algorithm, self.section))).loss)
            times.append(time.perf_counter() - started)
        self.compute.close()
        return losses, times


def question(kind: str, dtype: str, batch: int, steps: int, data: list[Any], **more: Any) -> dict[str, Any]:
    return {"kind": kind, "model": str(resolve_model("smollm2")), "dtype": dtype, "batch": batch, "steps": steps,
            "rate": RATE, "beta2": BETA2, "max_length": 4 * MAX_TOKENS, "rows": data, **more}  # fmt: skip


def curves(peer: Peer | None, tokenizer: Tokenizer, steps: int) -> list[list[str]]:
    lines = [["loss in float32", "steps", "first", "last", "largest difference"]]
    for kind, batch in (("sft", 4), ("dpo", 2)):
        data = rows(tokenizer, 2 * batch * steps)
        data = [(prompt, answer[:64]) for prompt, answer in data]
        pairs = [(prompt, better, worse) for (prompt, better), (_, worse) in zip(data[::2], data[1::2], strict=True)]
        groups: list[list[Sample]] = []
        for start in range(0, batch * steps, batch):
            if kind == "sft":
                groups.append([sample(data[i], f"row-{i}") for i in range(start, start + batch)])
            else:
                groups.append([side for i in range(start, start + batch)
                               for side in preference(sample(pairs[i][:2], f"row-{i}"),
                                                      sample((pairs[i][0], pairs[i][2]), f"row-{i}"))])  # fmt: skip
        losses, _ = Ours(SFT if kind == "sft" else DPO, torch.float32, steps).run(groups)
        gap = "no peer"
        if peer is not None:
            asked = [(p + a, [0] * len(p) + [1] * len(a)) for p, a in data] if kind == "sft" else pairs
            theirs = peer.ask("trl_supervised.py", question(
                kind, "float32", batch, steps, asked[: batch * steps], beta=DPO.beta))["losses"]  # fmt: skip
            gap = f"{max(abs(a - b) for a, b in zip(losses, theirs, strict=True)):.1e}"
        lines.append([kind, str(steps), f"{losses[0]:.4f}", f"{losses[-1]:.4f}", gap])
    return lines


def speed(peer: Peer | None, tokenizer: Tokenizer, dtype: str, steps: int, rounds: int) -> list[list[str]]:
    batch = 16
    data = rows(tokenizer, batch * (steps + 1))
    counts = [sum(len(p) + len(a) for p, a in data[start : start + batch]) for start in range(0, len(data), batch)]
    groups = [[sample(row, f"row-{start + i}") for i, row in enumerate(data[start : start + batch])]
              for start in range(0, len(data), batch)]  # fmt: skip
    asked = [(p + a, [0] * len(p) + [1] * len(a)) for p, a in data]
    rates: dict[str, list[float]] = {}
    for _ in range(rounds):
        _, times = Ours(SFT, getattr(torch, dtype), steps + 1).run(groups)
        rates.setdefault("tandem", []).append(sum(counts[1:]) / sum(times[1:]))
        for packing in (False, True) if peer is not None else ():
            # Packed rows of the peer hold as many tokens as a whole batch of ours.
            more: dict[str, Any] = {"packing": packing}
            request = question("sft", dtype, 1 if packing else batch, steps + 1, asked, **more)
            request["max_length"] = max(counts) if packing else request["max_length"]
            assert peer is not None
            answer = peer.ask("trl_supervised.py", request)["times"]
            tokens = sum(counts[1:]) if not packing else statistics.mean(counts) * (len(answer) - 1)
            rates.setdefault("trl, packed" if packing else "trl, padded", []).append(tokens / sum(answer[1:]))
    best = max((statistics.median(each) for name, each in rates.items() if name != "tandem"), default=0.0)
    return [[f"SFT, {dtype}", "tokens/s", "of the best of TRL"]] + [
        [name, f"{statistics.median(each):.0f}", f"{statistics.median(each) / best:.2f}" if best else ""]
        for name, each in rates.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default="", help="an interpreter that has trl")
    parser.add_argument("--steps", type=int, default=50, help="of the curves")
    parser.add_argument("--timed", type=int, default=5, help="steps that are timed, behind one that warms up")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the speed")
    parser.add_argument("--rounds", type=int, default=1, help="of the speed")
    parser.add_argument("--only", default="", choices=("", "curves", "speed"))
    asked = parser.parse_args()
    keep_freed_memory()
    peer, tokenizer = Peer.find(asked.peer, "trl"), load_tokenizer(resolve_model("smollm2"))
    if peer is not None:
        print(peer.version)
    if asked.only != "speed":
        print(table(curves(peer, tokenizer, asked.steps)), "\n", flush=True)
    if asked.only != "curves":
        print(table(speed(peer, tokenizer, asked.dtype, asked.timed, asked.rounds)), flush=True)


if __name__ == "__main__":
    main()
