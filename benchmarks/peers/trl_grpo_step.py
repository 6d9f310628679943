"""TRL's side of ``grpo_step.py``, for an interpreter that has trl: a question as JSON in, times as JSON out.

The trainer as its users run it on a CPU: generation with a KV cache, no gradient checkpointing, no evaluation, no
saving. ``micro_batch`` is the number of sequences of one forward and backward pass.
"""

import json
import os
import sys
import tempfile
import time

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl_settings import PLAIN
from trl_steps import Steps


def vowels(completions, **_):
    return [sum(text.count(vowel) for vowel in "aeiou") / max(1, len(text)) for text in completions]


class Timed(GRPOTrainer):
    """The trainer with a clock at its door between rollout (generation, rewards, advantages) and training."""

    def __init__(self, *args, **kwargs):
        self.rollout = []
        self.sampled = 0
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        started = time.perf_counter()
        made = super()._generate_and_score_completions(inputs)
        self.rollout.append(time.perf_counter() - started)
        self.sampled += int(made["completion_mask"].sum())
        return made


def main():
    asked = json.load(sys.stdin)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokenizer = AutoTokenizer.from_pretrained(asked["model"])
    assert tokenizer(asked["prompts"])["input_ids"] == asked["prompt_ids"], "the prompts differ in ids"
    sequences = asked["groups"] * asked["group_size"]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            model_init_kwargs={"dtype": asked["dtype"]},
            per_device_train_batch_size=asked["micro_batch"],
            gradient_accumulation_steps=sequences // asked["micro_batch"],
            num_generations=asked["group_size"],
            max_completion_length=asked["new_tokens"],
            generation_kwargs={"min_new_tokens": asked["new_tokens"]},
            temperature=1.0,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            max_steps=asked["steps"],
            use_transformers_continuous_batching=asked.get("continuous", False),
            shuffle_dataset=False,
            seed=asked["seed"] % 2**31,
            **PLAIN,
        )
        steps = Steps()
        trainer = Timed(
            model=asked["model"],
            reward_funcs=vowels,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": asked["prompts"]}),
            processing_class=tokenizer,
            callbacks=[steps],
        )
        trainer.train()
    assert trainer.sampled == asked["steps"] * sequences * asked["new_tokens"], "an answer ended before its length"
    print(json.dumps({"step": steps.times, "rollout": trainer.rollout, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
