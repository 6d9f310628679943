"""Times of vLLM's CPU build: a question as JSON on the input, times as JSON in the last line."""

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
    most = max(len(rows[0]) for rows in question["prompts"].values())
    length = len(next(iter(question["prompts"].values()))[0][0]) + question["new_tokens"]
    engine = LLM(
        question["model"], dtype=question["dtype"], enforce_eager=True, max_model_len=length, max_num_seqs=most,
        enable_prefix_caching=False,
    )  # fmt: skip

    def timed(rows: list[list[int]], new: int) -> float:
        params = SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, logprobs=0)
        asked = [TokensPrompt(prompt_token_ids=row) for row in rows]
        started = time.perf_counter()
        out = engine.generate(asked, params, use_tqdm=False)
        assert all(len(each.outputs[0].token_ids) == new for each in out)
        return time.perf_counter() - started

    answer = {}
    for count, (warm, first, whole) in question["prompts"].items():
        timed(warm, 4)
        answer[count] = timed(first, 1), timed(whole, question["new_tokens"])
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
