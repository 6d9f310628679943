"""An agent that knows nothing of Tandem, trained as it is: it speaks to the model by the OpenAI client.

    tandem train --environment.name examples/openai_agent.py:adder --model.path tiny
"""

import random

import openai

from tandem.core.types import Task
from tandem.envs.agent import openai_agent
from tandem.envs.environment import Environment
from tandem.envs.reward import Reward
from tandem.envs.taskset import generated, task


def make_task(seed: int, index: int) -> Task:
    """Two numbers to add."""
    draw = random.Random(f"{seed}/{index}")
    left, right = draw.randrange(10), draw.randrange(10)
    return task(f"{left} + {right} =", id=f"sum-{seed % 10**6}-{index}", answer=left + right)


async def agent(task: Task, endpoint) -> None:
    """Any loop on any OpenAI client: here it asks, and asks again when the answer is no number."""
    messages = [{"role": "user", "content": task.messages[0].content}]
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        for _ in range(2):
            reply = await client.chat.completions.create(model=endpoint.model, messages=messages)
            words = reply.choices[0].message.content or ""
            if words.strip().isdigit():
                break
            messages += [{"role": "assistant", "content": words}, {"role": "user", "content": "Only the number."}]


def is_right(episode, task) -> float:
    """1 for the right number, 0.2 for any number."""
    words = episode.final_message.strip()
    return 1.0 if words == str(task.private["answer"]) else 0.2 * words.isdigit()


adder = Environment(
    name="adder",
    tasks=generated(make_task),
    workflow=openai_agent(agent),  # or a command: openai_agent(["python", "my_agent.py"])
    rewards=[Reward(is_right)],
    template=None,
)
