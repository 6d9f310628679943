"""Who waits for a slow tool: ``python benchmarks/tool_latency.py --peer PYTHON``.

A group of episodes, each of which calls a tool of 0.2 s three times between its four turns. The *ideal* is what the
same episodes take with a tool that answers at once (no command is run, all else is the same: model, boxes, rewards),
plus three times the tool's own time, the wait of one episode alone. It is no lower bound: a tool that runs while the
model works for another episode costs nothing. Both are measured in turns in the same run, with the rollout driver
and real boxes; the tool sleeps in the episode's box.

PYTHON has ``trl``: its trainer's own tool loop then does the same work, with answers of the same length and as many
turns and calls. No model of this size calls tools reliably, so there the tokens of each turn are replaced by a call
after they were sampled. Its prompts are longer than ours (another template): compare each side with its own ideal, not
one side's seconds with the other's.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pieces.peer import Peer
from pieces.runs import ENVIRONMENTS, endless, machine, recipe

from tandem.app.build import Parts, parts_of
from tandem.app.preflight import prepare
from tandem.config.tree import Recipe
from tandem.core.types import WeightVersion
from tandem.envs.environment import load_environment
from tandem.record.sinks.nowhere import NowhereSink
from tandem.record.summary import table
from tandem.rollout.driver import RolloutDriver
from tandem.sandbox.manager import SandboxManager, spec_of


@dataclasses.dataclass(frozen=True)
class Size:
    episodes: int
    tool_calls: int
    tool_s: float
    turn_tokens: int
    rounds: int

    def recipe(self, tool_s: float) -> Recipe:
        return recipe(
            "model.path=smollm2", "model.dtype=bfloat16", "model.device=cpu", "model.max_context_tokens=1024",
            f"environment.name={ENVIRONMENTS / 'waiting.py'}:environment", "environment.num_eval_tasks=0",
            f"environment.options.tool_calls={self.tool_calls}", f"environment.options.tool_s={tool_s}",
            f"rollout.max_turns={self.tool_calls + 1}", f"rollout.max_turn_tokens={self.turn_tokens}",
        )  # fmt: skip


@asynccontextmanager
async def instant_driver(size: Size, parts: Parts) -> AsyncIterator[RolloutDriver]:
    """A second driver over the same engine, with the tool that answers at once."""
    recipe = size.recipe(0.0)
    boxes = SandboxManager(recipe.sandbox, NowhereSink())
    try:
        async with RolloutDriver(
            environment=load_environment(recipe.environment),
            engine=parts.engine,
            renderer=parts.ready.model.renderer,
            sandboxes=boxes,
            sandbox_spec=spec_of(recipe.sandbox),
            sink=NowhereSink(),
            section=recipe.rollout,
            max_context_tokens=parts.ready.model.max_context_tokens,
            seed=recipe.trainer.seed,
        ) as driver:
            yield driver
    finally:
        await boxes.close()


async def once(driver: RolloutDriver, size: Size, parts: Parts, name: str) -> float:
    """Seconds that the episodes take; all of them must be whole."""
    task = parts.ready.environment.task(0, 0)
    version = WeightVersion(number=parts.weights.version, step=0)
    started = time.perf_counter()
    episodes = await driver.evaluate([task], name=name, version=version, temperature=1.0, samples=size.episodes)
    spent = time.perf_counter() - started
    for episode in episodes:
        assert episode.failure is None, episode.failure
        lengths = [len(turn.completion_ids) for turn in episode.turns]
        assert lengths == [size.turn_tokens] * (size.tool_calls + 1), lengths
    return spent


async def ours(size: Size) -> tuple[list[float], list[float]]:
    """Seconds of each round with the tool, and with one that answers at once."""
    whole = size.recipe(size.tool_s)
    ready = endless(await asyncio.to_thread(prepare, whole))
    slow, instant = [], []
    async with parts_of(whole, ready, NowhereSink()) as parts, instant_driver(size, parts) as without:
        for number in range(size.rounds + 1):  # the first one warms up
            slow.append(await once(parts.rollout, size, parts, f"slow {number}"))
            instant.append(await once(without, size, parts, f"instant {number}"))
    return slow[1:], instant[1:]


def theirs(peer: Peer, size: Size) -> tuple[list[float], list[float]]:
    ready = prepare(size.recipe(size.tool_s))
    asked = {"model": str(ready.model.path), "prompt": ready.environment.task(0, 0).messages[-1].content}
    answer = peer.ask("trl_tool_loop.py", asked | dataclasses.asdict(size))
    return answer["slow"][1:], answer["instant"][1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default="", help="interpreter of an environment with trl")
    parser.add_argument("--episodes", type=int, default=16)
    parser.add_argument("--tool-calls", type=int, default=3)
    parser.add_argument("--tool-s", type=float, default=0.2)
    parser.add_argument("--turn-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    size = Size(options.episodes, options.tool_calls, options.tool_s, options.turn_tokens, options.rounds)
    peer = Peer.find(options.peer, "trl")
    print(
        f"{machine()}; {size.episodes} episodes, {size.tool_calls} calls of {size.tool_s} s, "
        f"{size.tool_calls + 1} turns of {size.turn_tokens} tokens",
        flush=True,
    )
    rows = [["seconds (medians)", "with the tool", "instant tool", "added by it", "ideal", "times ideal"]]
    for name, measure in [("tandem", lambda: asyncio.run(ours(size)))] + (
        [(peer.version, lambda: theirs(peer, size))] if peer is not None else []
    ):
        slow, instant = (statistics.median(each) for each in measure())
        print(f"{name}: {slow:.2f} s with the tool, {instant:.2f} s with an instant one", flush=True)
        ideal = instant + size.tool_calls * size.tool_s
        rows.append([name, *(f"{each:.2f}" for each in (slow, instant, slow - instant, ideal, slow / ideal))])
    print(table(rows))
    if peer is None:
        print("no peer: give --peer PYTHON for its tool loop")


if __name__ == "__main__":
    main()
