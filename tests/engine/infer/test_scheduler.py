"""The plan of a step: everyone ends, every token is computed once, blocks never leak, memory is never shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.config.sections.engine import AtPublish
from tandem.core.types import FinishReason, GenerateRequest, SamplingParams, ids
from tandem.engine.infer.kv_cache import BlockManager
from tandem.engine.infer.request import NO_SEAT, Request
from tandem.engine.infer.scheduler import Scheduler, StepPlan
from tandem.engine.infer.seats import Seats
from tandem.engine.infer.tier import Costs, Move, Tier

SIZE, WIDTH = 4, 40


def scheduler(
    *,
    num_blocks: int = 40,
    seats: int = 8,
    tokens: int = 16,
    prefix_cache: bool = True,
    outside: int = 0,
    at_publish: AtPublish = "keep",
) -> Scheduler:
    """``outside`` blocks of a tier for which copying is cheap."""
    costs = Costs(SIZE)
    costs.computed(1, 1.0)
    costs.copied(1, 0.001)
    blocks = BlockManager(num_blocks, SIZE, Tier(outside, costs) if outside else None)
    room = Seats(seats, WIDTH, SIZE)
    return Scheduler(blocks, room, max_step_tokens=tokens, prefix_cache=prefix_cache, at_publish=at_publish)


def made(prompt: Sequence[int], max_tokens: int = 4, name: str = "r", **fields: Any) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(GenerateRequest(id=name, prompt_ids=ids(prompt), params=params, **fields))


class Memory:
    """What a step does to the cache, without a model: each slot remembers the tokens up to it and the version. A
    row that reads a slot must find exactly what it would have computed itself."""

    def __init__(self, planner: Scheduler) -> None:
        self.planner = planner
        self.slots: dict[int, tuple[tuple[int, ...], int]] = {}
        self.outside: dict[int, list[tuple[tuple[int, ...], int] | None]] = {}
        self.mixed: set[Request] = set()

    def step(self, version: int = 0) -> StepPlan:
        plan = self.planner.plan(version)
        for request in plan.ended:
            self.planner.remove(request)
        for copy in plan.copies:
            begin = copy.source * SIZE
            if copy.move is Move.OUT:
                self.outside[copy.target] = [self.slots.get(begin + place) for place in range(SIZE)]
                continue
            inside = [self.slots.get(begin + place) for place in range(SIZE)]
            for place, written in enumerate(self.outside[copy.source] if copy.move is Move.IN else inside):
                if written is not None:
                    self.slots[copy.target * SIZE + place] = written
        rows = [(request, request.num_computed, 1) for request in plan.decodes]
        rows += [(chunk.request, chunk.start, chunk.count) for chunk in plan.chunks]
        assert len({id(request) for request, _, _ in rows}) == len(rows)
        for request, start, count in rows:
            assert start == request.num_computed
            slots = self.planner.seats.slots_MN[request.seat, : start + count]
            assert len(set(slots.tolist())) == len(slots)
            for place in range(start, start + count):
                self.slots[int(slots[place])] = (tuple(request.tokens[: place + 1].tolist()), version)
            for place, slot in enumerate(slots.tolist()):
                written, under = self.slots[slot]
                assert written == tuple(request.tokens[: place + 1].tolist()), f"{request.id} reads another prefix"
                if under != version:
                    self.mixed.add(request)  # allowed only if it was there before the change (checked by the caller)
        self.planner.commit(plan)
        for request in plan.sampled:
            request.append(int(request.tokens[: request.num_tokens].sum()) % 7, -1.0, version)
            if request.finish_reason is not None:
                self.planner.remove(request)
        return plan


def test_prompts_are_prefilled_in_chunks_beside_decoding() -> None:
    planner = scheduler(tokens=8)
    memory = Memory(planner)
    first = made(range(4), name="a")
    planner.add(first)
    memory.step()
    long = made(range(10, 30), name="b")
    planner.add(long)
    plan = memory.step()
    assert plan.decodes == [first]
    assert [(chunk.start, chunk.count, chunk.is_last) for chunk in plan.chunks] == [(0, 7, False)]
    assert plan.sampled == [first]
    plans = [memory.step(), memory.step()]
    assert [(chunk.start, chunk.count, chunk.is_last) for plan in plans for chunk in plan.chunks] == [
        (7, 7, False),
        (14, 6, True),
    ]


def test_siblings_wait_for_the_one_that_computes_their_prompt() -> None:
    planner = scheduler(tokens=16)
    memory = Memory(planner)
    siblings = [made(range(13), name=f"s{i}") for i in range(4)]
    stranger = made([7, 7, 7], name="stranger")
    for request in [*siblings, stranger]:
        planner.add(request)
    plan = memory.step()
    assert [chunk.request.id for chunk in plan.chunks] == ["s0", "stranger"]  # others do not wait with them
    plan = memory.step()
    assert [(chunk.request.id, chunk.start, chunk.count) for chunk in plan.chunks] == [
        ("s1", 12, 1), ("s2", 12, 1), ("s3", 12, 1),
    ]  # fmt: skip
    assert [request.num_cached for request in siblings] == [0, 12, 12, 12]


def test_siblings_go_on_when_the_one_they_wait_for_leaves() -> None:
    planner = scheduler(tokens=8)
    memory = Memory(planner)
    first, second = made(range(20), name="a"), made(range(20), name="b")
    planner.add(first)
    planner.add(second)
    memory.step()
    planner.remove(first)
    plan = memory.step()
    assert [(chunk.request.id, chunk.start) for chunk in plan.chunks] == [("b", 8)]  # what was computed is used


def test_a_second_turn_finds_prompt_and_answer() -> None:
    planner = scheduler()
    memory = Memory(planner)
    first = made(range(10), max_tokens=6)
    planner.add(first)
    while planner.running or planner.waiting:
        memory.step()
    second = made([*first.tokens.tolist(), 1, 2])
    planner.add(second)
    memory.step()
    assert second.num_cached == 15  # all that were computed: the last one's token had not been


def test_nothing_of_an_old_version_is_found() -> None:
    planner = scheduler()
    memory = Memory(planner)
    early = made(range(9), max_tokens=12, name="early")
    planner.add(early)
    memory.step(version=0)
    late = made(range(9), max_tokens=1, name="late")
    planner.add(late)
    while planner.running or planner.waiting:
        memory.step(version=1)
    assert late.num_cached == 0
    assert memory.mixed == {early}
    again = made(early.tokens.tolist(), name="again")  # nor what went on under the new one behind old keys
    planner.add(again)
    memory.step(version=1)
    assert again.num_cached == 9 and again not in memory.mixed  # late's blocks, all of version 1


def test_a_publish_has_everything_computed_again_where_that_is_asked_for() -> None:
    planner = scheduler(at_publish="reprefill")
    memory = Memory(planner)
    siblings = [made(range(9), max_tokens=12, name=str(i)) for i in range(3)]
    for request in siblings:
        planner.add(request)
    for _ in range(4):
        memory.step(version=0)
    has = [request.num_tokens for request in siblings]
    rows = 0
    while any(request.num_tokens == before for request, before in zip(siblings, has, strict=True)):
        rows += sum(chunk.count for chunk in memory.step(version=1).chunks)
    assert not memory.mixed and rows < sum(has) - 2 * 8  # their common prompt once
    while planner.requests:
        memory.step(version=1)
    assert all(request.versions.tolist() == sorted(request.versions) for request in siblings)
    assert planner.num_preemptions == 0


def test_a_publish_ends_who_has_an_answer_begun_where_that_is_asked_for() -> None:
    planner = scheduler(tokens=8, at_publish="abort")
    memory = Memory(planner)
    begun, prompt, waits = made([1, 2], name="begun"), made(range(10, 26), name="prompt"), made([3], name="waits")
    planner.add(begun)
    memory.step(version=0)
    planner.add(prompt)
    memory.step(version=0)
    planner.add(waits)
    plan = memory.step(version=1)
    assert plan.ended == [begun] and begun.completion().finish_reason is FinishReason.ABORT
    assert begun.completion().versions.tolist() == [0, 0] and begun not in planner.requests
    while planner.requests:
        memory.step(version=1)
    assert not memory.mixed and set(prompt.versions) == set(waits.versions) == {1}


def test_the_youngest_is_preempted_and_its_place_is_kept() -> None:
    planner = scheduler(num_blocks=10, tokens=64, prefix_cache=False)
    memory = Memory(planner)
    old, young, waiting = (made(range(12), max_tokens=24, name=name) for name in ("old", "young", "waiting"))
    for request in (old, young):
        planner.add(request)
    while not planner.num_preemptions:
        memory.step()
        if planner.running and waiting.order == 0:
            planner.add(waiting)
    assert planner.running == [old]
    assert planner.waiting == [young, waiting]
    assert young.num_computed == 0 and young.num_generated > 0
    while planner.requests:
        memory.step()
    assert young.num_generated == waiting.num_generated == 24


def test_more_seats_than_a_step_has_tokens() -> None:
    planner = scheduler(seats=8, tokens=3)
    memory = Memory(planner)
    requests = [made([i + 1], max_tokens=5, name=str(i)) for i in range(8)]
    for request in requests:
        planner.add(request)
    for _ in range(30):
        if planner.requests:
            plan = memory.step()
            assert len(plan.decodes) + sum(chunk.count for chunk in plan.chunks) <= 3
    assert all(request.num_generated == 5 for request in requests)


def test_samples_that_arrive_together_compute_their_prompt_once() -> None:
    for length in (3, 4, 13, 16):  # shorter than a block, whole blocks, and a part behind them
        planner = scheduler(tokens=32)
        memory = Memory(planner)
        samples = [made(range(length), max_tokens=1, name=str(i)) for i in range(8)]
        for request in samples:
            planner.add(request)
        rows = 0
        while planner.requests:
            rows += sum(chunk.count for chunk in memory.step().chunks)
        assert rows == length + 7  # the last token of each other one: its row is what is sampled from


def test_a_fork_inside_a_block_computes_its_last_token_only() -> None:
    planner = scheduler()
    memory = Memory(planner)
    parent = made(range(9), max_tokens=12, name="parent")
    planner.add(parent)
    for _ in range(7):
        memory.step()
    planner.share(parent)
    tokens = parent.tokens[: parent.num_tokens].tolist()
    forks = [made(tokens[:at], max_tokens=3, name=str(at)) for at in (len(tokens), len(tokens), 12, 10, 2)]
    for fork in forks:
        planner.add(fork)
    plan = memory.step()
    assert plan.decodes == [parent]
    assert [(chunk.request, chunk.count) for chunk in plan.chunks] == [(fork, 1) for fork in forks]
    while planner.requests:
        memory.step()
    assert planner.blocks.num_used == 0


def test_a_line_of_many_does_not_keep_others_waiting() -> None:
    planner = scheduler(num_blocks=200, seats=4, tokens=16)
    memory = Memory(planner)
    crowd = [made([1, i], max_tokens=8, name=f"c{i}", group="crowd") for i in range(60)]
    for request in crowd:
        planner.add(request)
    for _ in range(20):
        memory.step()
    lone = [made([2, i], max_tokens=8, name=f"l{i}", group="lone") for i in range(4)]
    before = sum(request.finish_reason is not None for request in crowd)
    for request in lone:
        planner.add(request)
    while any(request.finish_reason is None for request in lone):
        memory.step()
    assert sum(request.finish_reason is not None for request in crowd) - before <= 12  # equal shares, and what ran


def test_a_long_prompt_leaves_tokens_for_others() -> None:
    planner = scheduler(num_blocks=400, tokens=300)
    planner.seats = Seats(8, 1600, SIZE)
    memory = Memory(planner)
    long = made(range(1200), name="long", group="a")
    planner.add(long)
    memory.step()
    short = made([7, 8, 9], name="short", group="b")
    planner.add(short)
    plan = memory.step()
    assert {chunk.request.id: chunk.count for chunk in plan.chunks} == {"short": 3, "long": 297}


def test_priority_is_a_share_not_a_right_of_way() -> None:
    planner = scheduler(num_blocks=200, seats=3, tokens=16)
    memory = Memory(planner)
    requests = [made([p, i], max_tokens=6, name=f"{p}.{i}", group="g", priority=p) for i in range(40) for p in (0, 2)]
    for request in requests:
        planner.add(request)
    for _ in range(100):
        memory.step()
    done = [sum(r.finish_reason is not None for r in requests if r.account.priority == p) for p in (0, 2)]
    assert done[0] > 0 and 2.5 * done[0] < done[1] < 6 * done[0]  # weights of 1 and 4


def test_a_preempted_request_comes_back_from_outside() -> None:
    planner = scheduler(num_blocks=10, tokens=64, outside=8)
    memory = Memory(planner)
    requests = [made(range(begin, begin + 12), max_tokens=24, name=str(begin)) for begin in (0, 100)]
    for request in requests:
        planner.add(request)
    again = 0
    while planner.requests:
        again += sum(chunk.count for chunk in memory.step().chunks)
    tier = planner.blocks.tier
    assert tier is not None and planner.num_preemptions and tier.num_in
    assert again < 24 + 2 * SIZE * planner.num_preemptions  # beside the prompts, never more than a part of a block


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 2), st.integers(1, 20), st.integers(1, 18), st.integers(0, 12), st.integers(0, 2),
        st.integers(-3, 3),
    ),
    min_size=1, max_size=12,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    jobs=REQUESTS,
    num_blocks=st.integers(10, 24),
    seats=st.integers(1, 6),
    tokens=st.integers(1, 24),
    prefix_cache=st.booleans(),
    outside=st.integers(0, 6),
    updates=st.sets(st.integers(0, 40), max_size=3),
    aborts=st.dictionaries(st.integers(0, 40), st.integers(0, 11), max_size=4),
    forks=st.dictionaries(st.integers(0, 40), st.tuples(st.integers(0, 11), st.integers(0, 17)), max_size=4),
    at_publish=st.sampled_from(["keep", "keep", "reprefill", "abort"]),
)
def test_everyone_ends_and_nothing_leaks(
    jobs, num_blocks, seats, tokens, prefix_cache, outside, updates, aborts, forks, at_publish
) -> None:
    planner = scheduler(
        num_blocks=num_blocks, seats=seats, tokens=tokens, prefix_cache=prefix_cache, outside=outside * prefix_cache,
        at_publish=at_publish,
    )  # fmt: skip
    memory = Memory(planner)
    requests = [
        made([branch] * length, max_tokens=answer, name=str(i), group=str(group), priority=priority)
        for i, (branch, length, answer, _, group, priority) in enumerate(jobs)
    ]
    arrivals = sorted(zip(requests, jobs, strict=True), key=lambda pair: pair[1][3])
    left, version, step, aborted = list(arrivals), 0, 0, set()
    seated_before: set[Request] = set()
    while left or planner.requests:
        while left and left[0][1][3] <= step:
            planner.add(left.pop(0)[0])
        if step in updates:
            version += 1
            seated_before |= set(planner.running)
        if (victim := aborts.get(step)) is not None and victim < len(requests) and requests[victim] in planner.requests:
            planner.remove(requests[victim])
            aborted.add(requests[victim])
        if (fork := forks.get(step)) is not None and fork[0] < len(requests):
            parent = requests[fork[0]]
            at = min(fork[1], parent.num_generated)
            if at < parent.params.max_tokens:
                requests.append(Request(replace(parent.asked, id=f"f{step}", so_far=parent.completion(at))))
                if parent.seat != NO_SEAT:
                    planner.share(parent)
                planner.add(requests[-1])
        if planner.requests:
            plan = memory.step(version)
            assert plan or plan.ended, "requests are there and nothing is planned"
            aborted |= set(plan.ended)
        step += 1
        assert step < 3000, "no end in sight"
    # Old keys only for those that sat there when the weights changed, if they may keep them.
    assert memory.mixed <= (seated_before if at_publish == "keep" else set())
    for request in requests:
        assert request in aborted or request.num_generated == request.params.max_tokens
        assert request.seat == NO_SEAT and not request.blocks
    assert planner.blocks.num_used == 0 and planner.seats.num_free == seats
    assert not planner._claims and not planner._shares._members
    assert len(planner.blocks.allocate(num_blocks) or ()) == num_blocks
