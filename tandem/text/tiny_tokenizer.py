"""The tokenizer of the ``tiny`` model: bytes, a few hundred merges, ChatML.

A model that learns to read in minutes can not learn an embedding for each of fifty thousand tokens. This
vocabulary covers all text (every byte is a token), writes digits one by one, and merges what agents' small tasks
are made of. It is trained from the words below, the same every time.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Twice: what every conversation repeats. Once: what tasks, commands and programs say.
FRAME = """system\nuser\nassistant\ntool\nOutput:\nAnswer: the answer is\n```python\n```shell\n```
To use a tool, write only its block; then you see the output.
Solve the task with a tool. After its output reply: Answer: result
Run Python code. Run a shell command. <code> <command>
What is the product of? What is the sum of? How many lines are in the file? How many words are in the file?
Which number does the file list for? Find the value of the key. Read the file and reply with the number.
print(a * b) print(a + b) print(a - b) print(len(open('data.txt').read())) print(sum(int(x) for x in values))
wc -l < notes.txt wc -w < log.txt cat stock.txt cat store.txt grep name list.txt head -n tail -n sort -n ls -l
"""
WORDS = """error timed out not found no such file or directory exit code killed command line true false none
for in while if else return def import from with open read write lines split strip int float str list dict range len
red green blue yellow black white apples plums pears figs kiwis limes grapes melons dates olives nuts beans
one two three four five six seven eight nine ten first last next before after between total count name value key
north south east west box room table door cat dog bird fish tree river day month year time week date
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialIds:
    """Ids of the special tokens that a model configuration names."""

    end: int
    pad: int


def write_tiny_tokenizer(folder: Path, *, vocab_size: int) -> SpecialIds:
    """Train the tokenizer and write it as Hugging Face files; it has exactly ``vocab_size`` tokens."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[START, END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Words stand in a sentence as often as at the start of a line: train both spellings.
    made.train_from_iterator([FRAME, FRAME, WORDS.replace("\n", " ")], trainer)
    assert made.get_vocab_size() == vocab_size, f"the words give {made.get_vocab_size()} tokens"
    made.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    vocabulary = made.get_vocab()
    return SpecialIds(end=vocabulary[END], pad=vocabulary[PAD])
