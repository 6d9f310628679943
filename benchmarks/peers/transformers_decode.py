"""Times of ``transformers``' ``generate``: a question as JSON on the input, times as JSON in the last line."""

from __future__ import annotations

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    question = json.load(sys.stdin)
    torch.set_num_threads(question["threads"])
    model = AutoModelForCausalLM.from_pretrained(question["model"], dtype=getattr(torch, question["dtype"]))
    model.eval()
    model.generation_config.eos_token_id = None

    def timed(rows: list[list[int]], new: int) -> float:
        ids = torch.tensor(rows)
        started = time.perf_counter()
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, max_new_tokens=new,
            min_new_tokens=new, pad_token_id=0,
        )  # fmt: skip
        assert out.shape[1] == ids.shape[1] + new
        return time.perf_counter() - started

    answer = {}
    with torch.inference_mode():
        for count, (warm, first, whole) in question["prompts"].items():
            timed(warm, 4)
            answer[count] = timed(first, 1), timed(whole, question["new_tokens"])
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
