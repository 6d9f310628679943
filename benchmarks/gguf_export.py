"""Exported models in llama.cpp: ``python benchmarks/gguf_export.py --llama FOLDER``.

FOLDER holds llama.cpp's ``libllama.so`` and the libraries it needs. For every family and every type of weights a model
is exported, and loaded by that library in a process of its own. Compared with ours in float32, of the folder that was
exported: the ids of the prompt, the logits at each position of the prompt and of 32 tokens that llama.cpp chose
greedily, those tokens, and their text. SmolLM2 and Gemma 3 270M are the real ones; Qwen3 and Qwen3-MoE are small and
random. A difference is given as a share of the largest logit. A token other than ours must be a tie within the limit.
The limit of a type: float32 is summed in another order (and Gemma's GELU is a table in half precision there); with the
others llama.cpp rounds the inputs of each product to the type of its weights too. Rounding may change which experts a
token goes to: where it does, one position is far off, so the limit of rounded mixtures holds for nine positions of ten.
Prints a table; exit status 1 where one is over its limit.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from pieces.peer import Peer
from pieces.runs import machine

from tandem.kernels.ops import KeyIndex
from tandem.models.attention import AttentionContext
from tandem.models.builtin import TINY, resolve_model
from tandem.models.causal_lm import CausalLM
from tandem.models.gguf_export import export_gguf
from tandem.models.loader import init_model, load_model
from tandem.models.saver import save_model
from tandem.models.spec import ExpertSpec
from tandem.record.summary import table
from tandem.text.tokenizer import Tokenizer, load_tokenizer

TEXT = "The capital of France is Paris. 12 apples and 345 plums cost 6.78 euros, don't they?\n\nThe answer is"
NEW = 32
LIMITS = {"f32": 1e-4, "bf16": 0.03, "q8_0": 0.1}  # shares of the largest logit
GELU_LIMIT = 1e-3  # of float32 where the activation is rounded to 11 bits


@dataclass(frozen=True)
class Compared:
    """What one file gave."""

    version: str
    same_ids: bool
    largest: float  # difference of two logits, as a share of the largest logit
    most: float  # the same, at nine positions of ten
    equal_tokens: int  # before the first that is not ours
    margin: float  # by how much ours was better there, as a share of the largest logit
    same_text: bool

    def passes(self, limit: float, *, everywhere: bool) -> bool:
        # Two logits, each off by the limit at most, change places at twice that.
        found = self.largest if everywhere else self.most
        return self.same_ids and self.same_text and found <= limit and self.margin <= 2 * limit


def folder_of(family: str, place: Path) -> Path:
    """The real model where there is one; else a small random one whose distributions have a shape."""
    if family in ("smollm2", "gemma3"):
        return resolve_model(family)
    spec = replace(TINY, family=family, qk_norm=True, tied_head=False, eos_ids=(1,))
    if family == "qwen3_moe":
        experts = ExpertSpec(num_experts=8, per_token=2, intermediate_size=64, normalised=True)
        spec = replace(spec, experts=experts)
    model = init_model(spec, seed=0, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # no two alike, so that an exchanged one shows
                parameter.add_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(len(name))) - 0.5)
            else:
                parameter.mul_(3)
    save_model(model, place / family, tokenizer_from=resolve_model("tiny"))
    return place / family


def logits(model: CausalLM, tokens: list[int]) -> torch.Tensor:
    """``[tokens, vocabulary]``, float32."""
    n = len(tokens)
    slots = torch.arange(n, dtype=torch.int32)
    keys = KeyIndex(slots, torch.zeros(n, dtype=torch.int64), slots + 1)
    with torch.no_grad():
        hidden = model(torch.tensor(tokens), torch.arange(n), AttentionContext(keys=keys))
        return model.ops.logits(hidden, model.head_weight)


def compare(
    peer: Peer, library: Path, file: Path, model: CausalLM, tokenizer: Tokenizer, rows: Path, threads: int
) -> Compared:
    prompt = list(tokenizer.encode_document(TEXT))
    question = {
        "library": str(library), "file": str(file), "text": TEXT, "ids": prompt, "new_tokens": NEW,
        "threads": threads, "rows": str(rows),
    }  # fmt: skip
    answer = peer.ask("llama_logits.py", question)
    theirs = torch.from_numpy(np.load(rows))
    ours = logits(model, [*prompt, *answer["new"][:-1]])
    assert theirs.shape == ours.shape, f"{file}: {tuple(theirs.shape)} logits, ours are {tuple(ours.shape)}"
    scale = ours.abs().max().item()
    worst = (theirs - ours).abs().amax(1) / scale
    steps = ours[len(prompt) - 1 :]
    chosen = torch.tensor(answer["new"])
    margins = (steps.max(1).values - steps.gather(1, chosen[:, None])[:, 0]) / scale
    other = (margins > 0).nonzero().flatten().tolist()
    return Compared(
        answer["version"], answer["cut"] == prompt, worst.max().item(), worst.quantile(0.9).item(),
        other[0] if other else NEW, margins.max().item(), answer["text"] == tokenizer.decode(answer["new"]),
    )  # fmt: skip


def measure(options: argparse.Namespace) -> bool:
    torch.set_num_threads(options.threads)
    peer = Peer(sys.executable, "llama.cpp")
    print(machine(), flush=True)
    rows = [["model", "weights", "ids", "largest difference", "at 9 of 10", "limit", "tokens as ours", "text", ""]]
    passed = True
    with tempfile.TemporaryDirectory(prefix="tandem-gguf-") as name:
        place = Path(name)
        for family in options.model:
            folder = folder_of(family, place)
            model, tokenizer = load_model(folder, dtype=torch.float32), load_tokenizer(folder)
            for weights in options.weights:
                file, limit = place / f"{family}-{weights}.gguf", LIMITS[weights]
                if model.spec.activation == "gelu_tanh":
                    limit = max(limit, GELU_LIMIT)
                export_gguf(folder, file, weights=weights)
                found = compare(peer, options.llama, file, model, tokenizer, place / "rows.npy", options.threads)
                file.unlink()
                fine = found.passes(limit, everywhere=weights == "f32" or not model.spec.experts)
                passed &= fine
                tokens = f"{found.equal_tokens} of {NEW}"
                if found.margin:
                    tokens += f", then a tie within {found.margin:.1e}"
                rows.append([
                    family, weights, "same" if found.same_ids else "OTHER", f"{found.largest:.1e}",
                    f"{found.most:.1e}", f"{limit:.0e}", tokens, "same" if found.same_text else "OTHER",
                    "" if fine else "FAILS",
                ])  # fmt: skip
                print(f"{found.version}:", *rows[-1], flush=True)
    print(table(rows))
    print("all within their limits" if passed else "A LIMIT IS EXCEEDED")
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["smollm2", "gemma3", "qwen3", "qwen3_moe"]
    parser.add_argument("--llama", type=Path, required=True, help="the folder of libllama.so")
    parser.add_argument("--model", nargs="+", default=names, choices=names)
    parser.add_argument("--weights", nargs="+", default=list(LIMITS), choices=list(LIMITS))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    if not (options.llama / "libllama.so").is_file():
        parser.error(f"{options.llama} holds no libllama.so")
    sys.exit(0 if measure(options) else 1)


if __name__ == "__main__":
    main()
