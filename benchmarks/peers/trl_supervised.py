"""TRL's side of ``supervised.py``, for an interpreter that has trl: token ids as JSON in, losses and times as JSON out.

``kind`` is sft or dpo. Rows are taken in their order; one batch is one optimizer step without accumulation.
"""

import json
import os
import sys
import tempfile

import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl_settings import PLAIN
from trl_steps import Steps


def in_order(trainer_class):
    class Ordered(trainer_class):
        def _get_train_sampler(self, *args, **__):
            return SequentialSampler(args[0] if args else self.train_dataset)

        def _prepare_dataset(self, dataset, *args, **kwargs):
            # Preferences come as ids already; the library would make them from text.
            done = "chosen_ids" in dataset.column_names
            return dataset if done else super()._prepare_dataset(dataset, *args, **kwargs)

        def training_step(self, *args, **kwargs):  # what the library logs is rounded to four places
            loss = super().training_step(*args, **kwargs)
            exact.append(float(loss))
            return loss

    return Ordered


exact = []


def main():
    asked = json.load(sys.stdin)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    plain = {name: value for name, value in PLAIN.items() if name != "beta"}
    common = plain | {
        "per_device_train_batch_size": asked["batch"], "gradient_accumulation_steps": 1, "max_steps": asked["steps"],
        "learning_rate": asked["rate"], "lr_scheduler_type": "constant", "warmup_steps": 0, "weight_decay": 0.0,
        "max_grad_norm": 1.0, "adam_beta1": 0.9, "adam_beta2": asked["beta2"], "adam_epsilon": 1e-8,
        "model_init_kwargs": {"dtype": asked["dtype"]}, "max_length": asked["max_length"],
    }
    steps = Steps()
    tokenizer = AutoTokenizer.from_pretrained(asked["model"])
    with tempfile.TemporaryDirectory() as folder:
        if asked["kind"] == "sft":
            rows = [{"input_ids": ids, "labels": [i if m else -100 for i, m in zip(ids, mask, strict=True)]}
                    for ids, mask in asked["rows"]]
            config = SFTConfig(output_dir=folder, loss_type="nll", packing=asked.get("packing", False), **common)
            trainer_class = SFTTrainer
        else:
            rows = [dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), row, strict=True)) for row in asked["rows"]]
            config = DPOConfig(output_dir=folder, beta=asked["beta"], **common)
            trainer_class = DPOTrainer
        trainer = in_order(trainer_class)(
            model=asked["model"], args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
            callbacks=[steps],
        )
        trainer.train()
    print(json.dumps({"losses": exact, "times": steps.times, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
