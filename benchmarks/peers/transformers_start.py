"""From nothing to one token with ``transformers``, for ``benchmarks/serve_start.py``."""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

question = json.load(sys.stdin)
torch.set_num_threads(question["threads"])
tokenizer = AutoTokenizer.from_pretrained(question["model"])
model = AutoModelForCausalLM.from_pretrained(question["model"], dtype=getattr(torch, question["dtype"]))
given = tokenizer(question["prompt"], return_tensors="pt")
model.generate(**given, max_new_tokens=1, do_sample=False)
print(json.dumps({"first": True}), flush=True)
