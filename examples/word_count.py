"""An environment in one file: how often does a word stand in a file that lies in the box?

    tandem train --environment.name examples/word_count.py:word_count
"""

import random

from tandem.core.types import Message, Role, Task, ToolCall
from tandem.envs.environment import Environment
from tandem.envs.reward import Reward
from tandem.envs.taskset import generated, task
from tandem.envs.workflow import tool_loop

WORDS = ["amber", "basil", "cedar", "delta", "ember", "fjord"]


def make_task(seed: int, index: int) -> Task:
    """Task number ``index``: the same arguments give the same task, so a run can be resumed at any place."""
    draw = random.Random(f"{seed}/{index}")
    text = [draw.choice(WORDS) for _ in range(draw.randrange(60, 120))]
    word = draw.choice(WORDS)
    return task(
        f"How many times does the word {word} stand in notes.txt? Answer with the number alone.",
        id=f"count-{seed % 10**6}-{index}",
        files={"notes.txt": " ".join(text)},
        word=word,
        answer=text.count(word),
    )


def is_right(episode, task) -> float:
    """1 for the right number and nothing else."""
    return float(episode.final_message.strip() == str(task.private["answer"]))


def used_the_box(episode) -> float:
    """Measured, not rewarded (weight 0): the part of the turns in which a tool ran without failing."""
    worked = [any(result.failure is None for result in turn.tool_results) for turn in episode.turns]
    return sum(worked) / len(worked)


def demonstrate(task: Task) -> list[Message]:
    """What a good episode adds to the task's messages; feeds the optional supervised warm-up."""
    command = f"grep -ow {task.private['word']} notes.txt | wc -l"
    answer = str(task.private["answer"])
    call = ToolCall(id="call_0", name="shell", arguments={"command": command})
    return [
        Message(role=Role.ASSISTANT, content="", tool_calls=(call,)),
        Message(role=Role.TOOL, content=answer, tool_call_id="call_0", name="shell"),
        Message(role=Role.ASSISTANT, content=answer),
    ]


word_count = Environment(
    name="word_count",
    tasks=generated(make_task),
    eval_tasks=generated(make_task, held_out=True),
    workflow=tool_loop(["shell", "python"]),
    rewards=[Reward(is_right), Reward(used_the_box, weight=0.0)],
    demonstrate=demonstrate,
)
