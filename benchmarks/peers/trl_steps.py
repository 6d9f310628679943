"""The clock of TRL's trainers in these comparisons."""

import time

from transformers import TrainerCallback


class Steps(TrainerCallback):
    """Seconds of each step, from the end of the one before."""

    def __init__(self):
        self.times = []
        self.last = 0.0

    def on_train_begin(self, *_, **__):
        self.last = time.perf_counter()

    def on_step_end(self, *_, **__):
        now = time.perf_counter()
        self.times.append(now - self.last)
        self.last = now
