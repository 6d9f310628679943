"""Write freely about some words: no tool, no right answer, and a reward that no two essays share."""

from __future__ import annotations

import random

from tandem.core.types import Episode, Task
from tandem.envs.environment import Environment
from tandem.envs.reward import Reward
from tandem.envs.taskset import generated, task
from tandem.envs.workflow import tool_loop

WORDS = (
    "river", "engine", "garden", "winter", "letter", "bridge", "market", "candle", "forest", "window", "harbour",
    "copper", "island", "mirror", "pepper", "summer", "thread", "violin", "wagon", "yellow",
)  # fmt: skip


def environment(prompt_words: int = 60) -> Environment:
    """``prompt_words``: length of the prompt, in words."""

    def make_task(seed: int, index: int) -> Task:
        draw = random.Random(f"{seed}/{index}")
        words = ", ".join(draw.choice(WORDS) for _ in range(prompt_words))
        return task(f"Write about these words: {words}.", id=f"essay-{seed % 10**6}-{index}")

    return Environment(tasks=generated(make_task), workflow=tool_loop([]), rewards=[Reward(vowels)], template=None)


def vowels(episode: Episode) -> float:
    """The share of vowels in what was written."""
    text = episode.final_message
    return sum(text.count(vowel) for vowel in "aeiou") / max(1, len(text))
