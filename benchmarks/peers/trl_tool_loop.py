"""TRL's side of ``tool_latency.py``, for an interpreter that has trl: a question as JSON in, times as JSON out.

The trainer's own tool loop with a tool that sleeps. Every turn is sampled as usual, at its full length; then its tokens
are replaced by a call of the tool (in the last turn: by an end), for the model would not call it by itself. The
chat template is one that TRL knows how to read calls from, with the same markers as the model's own. Nothing is
trained: only the rollout is measured.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import trl
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl_settings import PLAIN

CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "cellar"}}\n</tool_call><|im_end|>'
END = "It is broken.<|im_end|>"


class Looped(GRPOTrainer):
    """The trainer with a clock around the rollout, every other one with a tool that answers at once."""

    def __init__(self, *args, tool_calls, turn_tokens, **kwargs):
        self.times = {"slow": [], "instant": []}
        self.tool_calls, self.turn_tokens, self.turn = tool_calls, turn_tokens, 0
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        kind = "instant" if len(self.times["slow"]) > len(self.times["instant"]) else "slow"
        pause["now"] = pause[kind]
        self.turn, calls["count"] = 0, 0
        started = time.perf_counter()
        made = super()._generate_and_score_completions(inputs)
        self.times[kind].append(time.perf_counter() - started)
        assert calls["count"] == self.tool_calls * len(inputs), f"{calls['count']} calls"
        assert self.turn == self.tool_calls + 1, f"{self.turn} turns"
        return made

    def _generate_single_turn(self, *args, **kwargs):
        made, logprobs = super()._generate_single_turn(*args, **kwargs)
        assert all(len(ids) == self.turn_tokens for ids in made), "an answer ended before its length"
        self.turn += 1
        text = CALL if self.turn <= self.tool_calls else END
        return [self._tokenizer(text)["input_ids"] for _ in made], logprobs

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return sum(parameter.sum() for name, parameter in model.named_parameters() if "norm" in name) * 0.0


pause = {"now": 0.0}
calls = {"count": 0}


def look(place: str) -> str:
    """
    Looks at a place.

    Args:
        place: The place.

    Returns:
        What is there.
    """
    calls["count"] += 1
    time.sleep(pause["now"])
    return "ok"


def length(completions, **_):
    return [float(len(each)) for each in completions]


def main():
    asked = json.load(sys.stdin)
    pause.update(slow=asked["tool_s"], instant=0.0)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokenizer = AutoTokenizer.from_pretrained(asked["model"])
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text()
    count = 2 * (asked["rounds"] + 1)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            model_init_kwargs={"dtype": "bfloat16"},
            per_device_train_batch_size=asked["episodes"],
            num_generations=asked["episodes"],
            max_completion_length=asked["turn_tokens"],
            generation_kwargs={"min_new_tokens": asked["turn_tokens"]},
            max_tool_calling_iterations=asked["tool_calls"],
            max_steps=count,
            **PLAIN,
        )
        trainer = Looped(
            model=asked["model"],
            reward_funcs=length,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": asked["prompt"]}]] * count}),
            processing_class=tokenizer,
            tools=[look],
            tool_calls=asked["tool_calls"],
            turn_tokens=asked["turn_tokens"],
        )
        # The limit of one turn; the loop compares whole conversations with its own.
        trainer.max_completion_length = 1024
        trainer.train()
    print(json.dumps(trainer.times))


if __name__ == "__main__":
    main()
