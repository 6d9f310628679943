"""TRL's side of ``losses.py``, for an interpreter that has trl: log-probabilities as JSON in, losses and gradients out.

Each question names a trainer, its options and what its loss looks at. The trainers are TRL's own, with a model that
answers with the numbers given; ``_compute_loss`` and ``compute_loss`` are theirs.
"""

import json
import sys
import tempfile
from types import SimpleNamespace

import torch
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl_settings import PLAIN

COMMON = {name: value for name, value in PLAIN.items() if name != "beta"}


def model(kind=LlamaForCausalLM, **more):
    config = LlamaConfig(
        vocab_size=49152, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, pad_token_id=0, **more,
    )  # fmt: skip
    return kind(config)


def padded(rows, fill=0.0):
    width = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])


def policy(trainer_class, config_class):
    """Trainers whose loss is over tokens that a policy sampled."""

    class Given(trainer_class):
        def _get_per_token_logps_and_entropies(self, *_, **__):
            return self.given, torch.zeros_like(self.given), None

    def ask(question, folder, tokenizer):
        rows = question["logprobs"]
        options = COMMON | question["options"] | {"beta": 0.0}  # with a KL it would load a reference from a folder
        config = config_class(
            output_dir=folder, per_device_train_batch_size=len(rows), num_generations=question["siblings"],
            gradient_accumulation_steps=1, **options,
        )  # fmt: skip
        prompts = Dataset.from_list([{"prompt": "a"}] * len(rows))
        trainer = Given(
            model=model(), reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config,
            train_dataset=prompts, processing_class=tokenizer,
        )  # fmt: skip
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        trainer.beta = question["options"].get("beta", 0.0)
        trainer.given = padded(rows).requires_grad_()
        mask = padded([[1] * len(row) for row in rows], 0)
        ones = torch.ones(len(rows), 1, dtype=torch.long)
        advantages = question["advantages"]
        inputs = {
            "prompt_ids": ones, "prompt_mask": ones, "completion_ids": torch.zeros_like(mask), "completion_mask": mask,
            "advantages": padded(advantages) if isinstance(advantages[0], list) else torch.tensor(advantages),
            "old_per_token_logps": padded(question["old"]), "old_logps": padded(question["old"]).sum(1),
            "num_items_in_batch": mask.sum(),
        }  # fmt: skip
        if "reference" in question:
            inputs["ref_per_token_logps"] = padded(question["reference"])
        loss = trainer._compute_loss(trainer.model, inputs)
        (gradient,) = torch.autograd.grad(loss, trainer.given)
        return loss, [row[: len(own)].tolist() for row, own in zip(gradient, rows, strict=True)]

    return ask


def outputs_of(given, mask):
    nothing = torch.zeros_like(given)
    return SimpleNamespace(
        log_probs=given * mask, entropy=nothing, mean_logits=nothing, is_top1=mask > 0, label_mask=mask > 0
    )


def preferences(question, folder, tokenizer):
    """Better answers first, as the trainer has them: the rows come better, worse, better, worse."""
    order = [*range(0, len(question["logprobs"]), 2), *range(1, len(question["logprobs"]), 2)]
    rows = [question["logprobs"][place] for place in order]
    reference = [sum(question["reference"][place]) for place in order]
    config = DPOConfig(output_dir=folder, **COMMON, **question["options"])
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    trainer = DPOTrainer(
        model=model(), ref_model=model(), args=config, train_dataset=Dataset.from_list([pair] * 2),
        processing_class=tokenizer,
    )
    trainer.model.train()
    trainer.precompute_ref_logps = True
    given = padded(rows).requires_grad_()
    mask = padded([[1] * len(row) for row in rows], 0)
    first = torch.zeros(len(rows), 1, dtype=torch.long)
    half = len(rows) // 2
    inputs = {
        "input_ids": torch.zeros(len(rows), mask.shape[1] + 1, dtype=torch.long),
        "attention_mask": torch.cat([first + 1, mask], dim=1), "completion_mask": torch.cat([first, mask], dim=1),
        "ref_chosen_logps": torch.tensor(reference[:half]), "ref_rejected_logps": torch.tensor(reference[half:]),
    }  # fmt: skip
    loss = trainer._compute_loss(lambda **_: outputs_of(given, mask), inputs, False)
    (gradient,) = torch.autograd.grad(loss, given)
    back = [order.index(place) for place in range(len(rows))]
    return loss, [gradient[place][: len(rows[place])].tolist() for place in back]


def demonstrations(question, folder, tokenizer):
    rows = question["logprobs"]
    config = SFTConfig(output_dir=folder, loss_type="nll", **COMMON, **question["options"])
    text = Dataset.from_list([{"text": "a b c"}] * 2)
    trainer = SFTTrainer(model=model(), args=config, train_dataset=text, processing_class=tokenizer)
    trainer.model.train()
    given, mask = padded(rows).requires_grad_(), padded([[1] * len(row) for row in rows], 0)
    inputs = {"input_ids": torch.zeros_like(mask), "labels": torch.zeros_like(mask), "attention_mask": mask}
    loss = trainer.compute_loss(lambda **_: outputs_of(given, mask), inputs)
    (gradient,) = torch.autograd.grad(loss, given)
    return loss, [row[: len(own)].tolist() for row, own in zip(gradient, rows, strict=True)]


def scores(question, folder, tokenizer):
    values = [row[0] for row in question["logprobs"]]
    given = torch.tensor([[value] for value in values[0::2] + values[1::2]], requires_grad=True)
    config = RewardConfig(output_dir=folder, **COMMON, **question["options"])
    pair = {"chosen": "a b", "rejected": "a c"}
    trainer = RewardTrainer(
        model=model(LlamaForSequenceClassification, num_labels=1), args=config,
        train_dataset=Dataset.from_list([pair] * 2), processing_class=tokenizer,
    )  # fmt: skip
    trainer.model.train()
    inputs = {"input_ids": torch.zeros(len(values), 1), "attention_mask": torch.ones(len(values), 1)}
    loss = trainer.compute_loss(lambda **_: SimpleNamespace(logits=given), inputs)
    (gradient,) = torch.autograd.grad(loss, given)
    half = len(values) // 2
    return loss, [[float(gradient[place // 2 + half * (place % 2), 0])] for place in range(len(values))]


TRAINERS = {
    "grpo": policy(GRPOTrainer, GRPOConfig), "rloo": policy(RLOOTrainer, RLOOConfig), "dpo": preferences,
    "sft": demonstrations, "reward": scores,
}  # fmt: skip


def main():
    asked = json.load(sys.stdin)
    tokenizer = AutoTokenizer.from_pretrained(asked["tokenizer"])
    answers = []
    for question in asked["questions"]:
        with tempfile.TemporaryDirectory() as folder:
            loss, gradient = TRAINERS[question["trainer"]](question, folder, tokenizer)
        answers.append({"loss": float(loss.detach()), "gradient": gradient})
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
