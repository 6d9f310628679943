"""The engine under more load than it can serve: ``python benchmarks/soak.py --minutes 30``.

Clients of three groups (a crowd, a few, and one alone) each ask again as soon as they are answered, with more requests
at once than seats and blocks; one request in ten is cancelled under way. Printed for each fifth of the time: resident
memory, and each group's requests and slowest answers. Verdict: memory at the end within ``--growth`` of that in the
first fifth, the last fifth's 99th percentile within ``--slower`` of the first's, every group served in every fifth, no
block left over.
Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path

import numpy as np
from pieces.runs import machine, recipe

from tandem.app.build import engine_of
from tandem.app.preflight import prepare_model
from tandem.core.types import GenerateRequest, SamplingParams, ids
from tandem.record.summary import table

CLIENTS = {"crowd": 60, "few": 6, "alone": 1}
FIFTHS = 5


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


async def measure(options: argparse.Namespace) -> bool:
    chosen = recipe(
        f"model.path={options.model}", "model.device=cpu", "model.max_context_tokens=512",
        "engine.infer.max_num_seqs=16", "engine.infer.kv_tokens=2048", "engine.infer.swap_tokens=2048",
    )  # fmt: skip
    files = prepare_model(chosen)
    print(f"{machine()}; {options.model}, {sum(CLIENTS.values())} clients, {options.minutes:g} minutes", flush=True)
    waits: list[tuple[int, str, float]] = []  # fifth, group, seconds to the whole answer
    memory = [0.0] * FIFTHS
    length_s = options.minutes * 60 / FIFTHS
    async with engine_of(chosen, files) as live:
        begun = time.monotonic()

        def fifth() -> int:
            return min(FIFTHS - 1, int((time.monotonic() - begun) / length_s))

        async def client(group: str, number: int) -> None:
            draw = random.Random(f"{group} {number}")
            tokens = [draw.randrange(files.spec.vocab_size) for _ in range(200)]
            count = 0
            while time.monotonic() - begun < options.minutes * 60:
                count += 1
                prompt = tokens[: draw.randint(1, 200)] + [draw.randrange(files.spec.vocab_size)]
                asked = GenerateRequest(
                    id=f"{group}-{number}-{count}", prompt_ids=ids(prompt), seed=count, group=group,
                    params=SamplingParams(max_tokens=draw.randint(1, 100), ignore_eos=True),
                )  # fmt: skip
                started, began_in = time.monotonic(), fifth()
                task = asyncio.ensure_future(live.engine.generate(asked))
                if draw.random() < 0.1:
                    await asyncio.wait([task], timeout=draw.random())
                    task.cancel()
                    await asyncio.wait([task])
                else:
                    await task
                    waits.append((began_in, group, time.monotonic() - started))

        async def watch() -> None:
            while True:
                memory[fifth()] = max(memory[fifth()], resident_mib())
                await asyncio.sleep(length_s / 20)

        watching = asyncio.ensure_future(watch())
        await asyncio.gather(*(client(group, each) for group, most in CLIENTS.items() for each in range(most)))
        watching.cancel()
        stats = live.engine.stats()
    rows, passed = [["fifth", "MiB", *(f"{group}: answers, p99 s" for group in CLIENTS)]], True
    tails: list[float] = []
    for part in range(FIFTHS):
        mine = {group: [s for p, g, s in waits if (p, g) == (part, group)] for group in CLIENTS}
        served = all(mine.values())
        passed &= served
        tails.append(float(np.quantile([s for p, _, s in waits if p == part], 0.99)) if served else float("inf"))
        shown = [f"{len(each)}, {np.quantile(each, 0.99):.1f}" if each else "none" for each in mine.values()]
        rows.append([str(part + 1), f"{memory[part]:.0f}", *shown])
    print(table(rows))
    flat, bounded = memory[-1] <= options.growth * memory[0], tails[-1] <= options.slower * tails[0]
    print(
        f"preempted {stats.preemptions}, blocks out {stats.swapped_blocks} and back {stats.returned_blocks}, left over "
        f"{stats.blocks_in_use}; memory {'flat' if flat else 'GROWS'}, p99 {'bounded' if bounded else 'GROWS'}, "
        f"{'nobody starved' if passed else 'A GROUP STARVED'}"
    )
    return passed and flat and bounded and not stats.blocks_in_use


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="what model.path takes")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--growth", type=float, default=1.1, help="memory of the last fifth over that of the first")
    parser.add_argument("--slower", type=float, default=2.0, help="p99 of the last fifth over that of the first")
    sys.exit(0 if asyncio.run(measure(parser.parse_args())) else 1)


if __name__ == "__main__":
    main()
