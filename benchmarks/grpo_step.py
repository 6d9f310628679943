"""One GRPO step, rollout and training, against TRL's: ``python benchmarks/grpo_step.py --peer PYTHON``.

PYTHON is the interpreter of an environment that has ``trl`` and the same torch; without it our own figures are
printed alone. Both sides: the same weights in the same type, the same prompts (compared as token ids), groups of the
same size, answers of the same forced length, temperature 1, one AdamW step for each batch, no KL penalty, all cores,
and a C library that keeps freed memory (TRL is twice as slow without: --default-memory shows it).
Tandem's side is the real run (engine, rollout driver, batcher, train engine, log). A step's time is from the end of
the step before to its own end. The first step of each side warms it up and is not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics

from pieces.peer import Peer
from pieces.runs import ENVIRONMENTS, endless, machine, recipe, steps, train

from tandem.app.preflight import Ready, prepare
from tandem.core.wire import derive_seed
from tandem.record.summary import table


@dataclasses.dataclass(frozen=True)
class Size:
    groups: int
    group_size: int
    prompt_words: int
    new_tokens: int
    steps: int  # measured; one more goes before them

    def flags(self, dtype: str) -> list[str]:
        return [
            "model.path=smollm2", f"model.dtype={dtype}", "model.device=cpu", "model.max_context_tokens=1024",
            f"environment.name={ENVIRONMENTS / 'essay.py'}:environment", "environment.num_eval_tasks=0",
            f"environment.options.prompt_words={self.prompt_words}",
            f"rollout.groups_per_step={self.groups}", f"rollout.group_size={self.group_size}",
            "rollout.max_turns=1", f"rollout.max_turn_tokens={self.new_tokens}", "sandbox.warm=0",
            f"engine.infer.max_num_seqs={self.groups * self.group_size}",
            f"rollout.max_concurrent_episodes={self.groups * self.group_size}",
            f"trainer.steps={self.steps + 1}", "trainer.checkpoint_every=0", "trainer.deterministic=true",
            "optimizer.learning_rate=1e-6", "optimizer.warmup_steps=0", "optimizer.beta2=0.999",
            "algorithm.kl_weight=0",  # as beside (beta)
        ]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of each measured step, and of its two parts."""

    whole: list[float]
    rollout: list[float]
    train: list[float]

    def __add__(self, other: Times) -> Times:
        return Times(self.whole + other.whole, self.rollout + other.rollout, self.train + other.train)

    @property
    def median(self) -> float:
        return statistics.median(self.whole)

    def row(self, name: str, *, ratio: str = "") -> list[str]:
        medians = [statistics.median(each) for each in (self.whole, self.rollout, self.train)]
        return [name, *(f"{each:.2f}" for each in medians), f"{min(self.whole):.2f}", str(len(self.whole)), ratio]


def prompts(ready: Ready, count: int) -> list[list[int]]:
    """Token ids of the first prompts of the run."""
    tasks = [ready.environment.task(0, index) for index in range(count)]
    return [list(ready.model.renderer.prompt(task.messages, [])) for task in tasks]


def ours(size: Size, dtype: str) -> Times:
    ended = steps(train(recipe(*size.flags(dtype)), change=endless))
    wanted = size.groups * size.group_size * size.new_tokens
    assert all(event.num_loss_tokens == wanted for _, event in ended), "an answer ended before its length"
    whole = [after[0] - before[0] for before, after in zip(ended, ended[1:], strict=False)]
    return Times(whole, [event.rollout_s for _, event in ended[1:]], [event.train_s for _, event in ended[1:]])


def theirs(peer: Peer, size: Size, dtype: str, micro_batch: int, *, keep_memory: bool) -> Times:
    ready = prepare(recipe(*size.flags(dtype)))
    ids = prompts(ready, size.groups * (size.steps + 1))
    tokenizer = ready.model.renderer.tokenizer
    answer = peer.ask(
        "trl_grpo_step.py",
        {
            "model": str(ready.model.path), "dtype": dtype, "steps": size.steps + 1, "seed": derive_seed("trl"),
            "prompts": [tokenizer.decode(each) for each in ids], "prompt_ids": ids, "group_size": size.group_size,
            "groups": size.groups, "new_tokens": size.new_tokens, "micro_batch": micro_batch,
        },
        keep_memory=keep_memory,
    )  # fmt: skip
    rollout, whole = answer["rollout"][1:], answer["step"][1:]
    return Times(whole, rollout, [each - part for each, part in zip(whole, rollout, strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default="", help="interpreter of an environment with trl")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=["bfloat16", "float32"])
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt-words", type=int, default=30)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--steps", type=int, default=2, help="measured steps of each side in a round")
    parser.add_argument("--rounds", type=int, default=2, help="both sides in turns, so often")
    parser.add_argument("--micro-batch", type=int, default=8, help="TRL's sequences of one pass; of 4, 8, 32 the best")
    parser.add_argument("--default-memory", action="store_true", help="leave the peer's memory settings as they are")
    options = parser.parse_args()
    size = Size(options.groups, options.group_size, options.prompt_words, options.new_tokens, options.steps)
    peer = Peer.find(options.peer, "trl")
    lengths = [len(each) for each in prompts(prepare(recipe(*size.flags("float32"))), size.groups * (size.steps + 1))]
    print(
        f"{machine()}; {size.groups} groups of {size.group_size}, prompts of {min(lengths)} to {max(lengths)} tokens, "
        f"{size.new_tokens} new tokens each",
        flush=True,
    )
    rows = [["seconds a step (medians)", "step", "rollout", "train", "fastest", "steps", "times ours"]]
    for dtype in options.dtypes:
        mine, other = Times([], [], []), Times([], [], [])
        for _ in range(options.rounds):
            mine += ours(size, dtype)
            if peer is not None:
                keep_memory = not options.default_memory
                other += theirs(peer, size, dtype, options.micro_batch, keep_memory=keep_memory)
        rows.append(mine.row(f"tandem, {dtype}"))
        if peer is not None:
            rows.append(other.row(f"{peer.version}, {dtype}", ratio=f"{other.median / mine.median:.2f}"))
    print(table(rows))
    if peer is None:
        print("no peer: give --peer PYTHON for a ratio")


if __name__ == "__main__":
    main()
