"""The chores with a shell that takes its time: log-normal, the slowest call in a hundred ten times the median."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random

from tandem.core.protocols import Sandbox
from tandem.envs import tools
from tandem.envs.builtin import chores
from tandem.envs.environment import Environment
from tandem.envs.workflow import tool_loop

P99 = 2.3263  # of the standard normal distribution
SIGMA = math.log(10) / P99


def environment(median_s: float = 0.2, draw_seed: int = 0) -> Environment:
    """``median_s``: the median of a call's extra seconds; ``draw_seed`` starts the row of its draws."""
    draw = random.Random(draw_seed)

    async def shell(box: Sandbox, command: str, time_s: float) -> str:
        """Runs a shell command and returns its output."""
        if median_s:
            await asyncio.sleep(min(draw.lognormvariate(math.log(median_s), SIGMA), time_s / 2))
        return await tools.shell(box, command, time_s)

    return dataclasses.replace(chores.environment, workflow=tool_loop([shell]))
