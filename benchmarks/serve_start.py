"""``tandem serve``: seconds from its start to the first token, and its memory beside weights and KV cache.

    python benchmarks/serve_start.py --model smollm2 --transformers PYTHON --llama BINARY --gguf FILE

Each round starts the command, streams one chat answer through HTTP as soon as it says that it serves, and reads the
memory of its processes (resident, and the proportional share) then and after requests that fill the KV cache once.
Allowed are 1.5 times the weights and the configured KV cache. The files are in the page cache: a first round warms up
and is not counted. Beside it, if given: whole processes of ``transformers`` (load, one token; PYTHON is the
interpreter of an environment that has it) and of llama.cpp (``llama-batched-bench``: load, one token). Neither serves
HTTP; their memory is the highest that they had. Ends with 1 above ``--most`` seconds or the memory allowed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
from pieces.peer import KEPT_MEMORY, PEERS
from pieces.runs import machine, recipe

from tandem.app.preflight import ModelFiles, prepare_model
from tandem.config.tree import Recipe
from tandem.models.spec import ModelSpec
from tandem.record.summary import table

MIB = 1 << 20
START_S = 120.0
Measured = dict[str, float]


def weight_bytes(files: ModelFiles, size: int) -> int:
    """Bytes of the weights as the folder has them, in numbers of ``size`` bytes."""
    counted = 0
    for file in files.path.glob("*.safetensors"):
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        counted += sum(int(np.prod(each["shape"])) for name, each in header.items() if name != "__metadata__")
    return counted * size


def kv_bytes(spec: ModelSpec, tokens: int, size: int) -> int:
    return 2 * spec.num_layers * spec.kv_size * tokens * size


def memory(pid: int) -> Measured:
    """Bytes of a process and its children."""
    found = {"rss": 0.0, "pss": 0.0}
    for process in [pid, *children(pid)]:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
        for name in found:
            match = re.search(rf"^{name.title()}:\s+(\d+) kB", text, re.MULTILINE)
            assert match is not None
            found[name] += int(match[1]) * 1024
    return found


def children(pid: int) -> list[int]:
    direct = [
        int(word) for each in Path(f"/proc/{pid}/task").iterdir() for word in (each / "children").read_text().split()
    ]
    return direct + [below for child in direct for below in children(child)]


@contextmanager
def command(words: Sequence[str], errors: Path) -> Iterator[subprocess.Popen[str]]:
    with errors.open("w") as file, subprocess.Popen(words, stdout=subprocess.PIPE, stderr=file, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(30)


def address_of(process: subprocess.Popen[str], errors: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"(http://\S+/v1)", line):
            return found[1]
    raise RuntimeError(f"the server did not start:\n{errors.read_text()[-3000:]}")


async def fill(address: str, chosen: Recipe, files: ModelFiles) -> None:
    """Prompts that no two requests share, as many tokens as the cache holds."""
    length = files.max_context_tokens - 8
    count = -(-chosen.engine.infer.kv_tokens // length)
    prompts = np.random.default_rng(5).integers(1000, files.spec.vocab_size, (count, length)).tolist()
    async with httpx.AsyncClient(timeout=START_S) as client:
        name = (await client.get(f"{address}/models")).json()["data"][0]["id"]
        for prompt in prompts:
            answer = await client.post(
                f"{address}/completions", json={"model": name, "prompt": prompt, "max_tokens": 2}
            )
            answer.raise_for_status()


def first_token(address: str) -> None:
    with httpx.Client(timeout=START_S) as client:
        name = client.get(f"{address}/models").json()["data"][0]["id"]
        messages = [{"role": "user", "content": "What is 12 * 34?"}]
        asked = {"model": name, "messages": messages, "max_tokens": 1, "stream": True}
        with client.stream("POST", f"{address}/chat/completions", json=asked) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if '"content"' in line:
                    return
    raise RuntimeError("the answer had no token")


def ours(
    flags: Sequence[str], options: argparse.Namespace, chosen: Recipe, files: ModelFiles, is_last: bool
) -> Measured:
    words = [sys.executable, "-m", "tandem.cli.main", "serve", options.model, "--port", "0", *flags]
    with tempfile.TemporaryDirectory(prefix="tandem-benchmark-") as folder:
        started = time.perf_counter()
        with command(words, Path(folder) / "errors") as process:
            address = address_of(process, Path(folder) / "errors")
            ready = time.perf_counter() - started
            first_token(address)
            found = {"ready": ready, "first": time.perf_counter() - started}
            found |= {f"{name} at first": value for name, value in memory(process.pid).items()}
            if is_last:
                asyncio.run(fill(address, chosen, files))
                found |= {f"{name} full": value for name, value in memory(process.pid).items()}
    return found


def theirs(words: Sequence[str], question: str = "") -> Measured:
    """Seconds of a whole process, and the highest memory of it."""
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    started = time.perf_counter()
    process = subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | quiet | KEPT_MEMORY,
    )
    assert process.stdin is not None and process.stderr is not None
    process.stdin.write(question.encode())
    process.stdin.close()
    said = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{words[0]} failed:\n{said.decode(errors='replace')[-3000:]}")
    return {"first": time.perf_counter() - started, "rss highest": used.ru_maxrss * 1024.0}


def peers(options: argparse.Namespace, files: ModelFiles) -> dict[str, tuple[list[str], str]]:
    found = {}
    if options.transformers:
        question = {"model": str(files.path), "dtype": options.dtype, "threads": options.threads, "prompt": "12 * 34 ="}
        words = [options.transformers, str(PEERS / "transformers_start.py")]
        found["transformers"] = words, json.dumps(question)
    if options.llama:
        threads = str(options.threads)
        found["llama.cpp"] = [
            str(options.llama), "-m", str(options.gguf), "-npp", "32", "-ntg", "1", "-npl", "1", "-c", "2048",
            "-t", threads, "-tb", threads,
        ], ""  # fmt: skip
    return found


def measure(options: argparse.Namespace) -> bool:
    told = {
        "model.path": options.model, "model.dtype": options.dtype, "engine.threads": str(options.threads),
        "engine.process": str(options.process).lower(), "model.device": "cpu",
    }  # fmt: skip
    chosen = recipe(*(f"{name}={value}" for name, value in told.items()))
    files = prepare_model(chosen)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in told.items() if name != "model.path"]
    size = 2 if options.dtype == "bfloat16" else 4
    weights = weight_bytes(files, size)
    cache = kv_bytes(files.spec, chosen.engine.infer.kv_tokens, size)
    allowed = 1.5 * weights + cache
    print(f"{machine()}; {options.model} {options.dtype}, process {told['engine.process']}; weights "
          f"{weights / MIB:.0f} MiB, KV cache {cache / MIB:.0f} MiB, allowed {allowed / MIB:.0f} MiB",
          flush=True)  # fmt: skip
    runs: dict[str, list[Measured]] = {"tandem serve": []}
    for number in range(options.rounds + 1):
        found = ours(flags, options, chosen, files, number == options.rounds)
        for name, (words, question) in peers(options, files).items():
            other = theirs(words, question)
            if number:
                runs.setdefault(name, []).append(other)
        if number:
            runs["tandem serve"].append(found)
    rows = [["", "first token s", "worst", "memory", "MiB", "of what is allowed"]]
    for name, all_of_them in runs.items():
        times = [each["first"] for each in all_of_them]
        for place, (key, value) in enumerate((k, v) for k, v in all_of_them[-1].items() if k not in ("first", "ready")):
            spent = [f"{statistics.median(times):.2f}", f"{max(times):.2f}"] if not place else ["", ""]
            rows.append([name if not place else "", *spent, key, f"{value / MIB:.0f}", f"{value / allowed:.2f}"])
    print(table(rows))
    mine = runs["tandem serve"]
    return max(each["first"] for each in mine) <= options.most and mine[-1]["rss at first"] <= allowed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--process", action="store_true", help="engine.process = true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--most", type=float, default=5.0, help="seconds to the first token that are good")
    parser.add_argument("--transformers", default="", help="interpreter of an environment with transformers")
    parser.add_argument("--llama", type=Path, default=None, help="llama.cpp's llama-batched-bench")
    parser.add_argument("--gguf", type=Path, default=None, help="the same weights for llama.cpp")
    return 0 if measure(parser.parse_args()) else 1


if __name__ == "__main__":
    sys.exit(main())
