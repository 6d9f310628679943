"""Times of vLLM's CPU build with its prefix cache on: a group of samples, and episodes of several turns."""

from __future__ import annotations

import json
import os
import sys
import time

question = json.load(sys.stdin)
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ |= {"OMP_NUM_THREADS": str(question["threads"])}  # read when its libraries load

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.inputs import TokensPrompt  # noqa: E402


def main() -> None:
    engine = LLM(
        question["model"], dtype=question["dtype"], enforce_eager=True, max_model_len=question["context"],
        max_num_seqs=question["most"], enable_prefix_caching=True,
    )  # fmt: skip
    new = question["new"]
    params = SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, logprobs=0)

    def generate(rows: list[list[int]]) -> list[list[int]]:
        out = engine.generate([TokensPrompt(prompt_token_ids=row) for row in rows], params, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in out]

    def group(prompt: list[int]) -> float:
        started = time.perf_counter()
        generate([prompt] * question["samples"])
        return time.perf_counter() - started

    def episodes(prompts: list[list[int]], observed: list[list[list[int]]]) -> float:
        started = time.perf_counter()
        tokens = [list(prompt) for prompt in prompts]
        for turn in observed:  # all at once: its batch call has no other way
            for mine, answer, seen in zip(tokens, generate(tokens), turn, strict=True):
                mine += answer + seen
        return time.perf_counter() - started

    generate([question["warm"]] * 4)
    parts = {
        "group": lambda: group(question["group"]),
        "episodes": lambda: episodes(question["prompts"], question["observed"]),
    }
    print(json.dumps([parts[part]() for part in question["parts"]]))


if __name__ == "__main__":
    main()
