"""The scheduler as a state machine: properties over random worlds, and the rules one by one."""

from collections import Counter, deque
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.types import FailureKind
from tandem.rollout.commands import (
    CancelEpisode,
    DeliverGroup,
    DropGroup,
    EpisodeEnded,
    FetchTask,
    FinishGroup,
    GiveUp,
    GroupUnwanted,
    GroupWanted,
    StartEpisode,
    StartGroup,
    StepPublished,
    Stopped,
    TaskReady,
    TaskRefused,
)
from tandem.rollout.scheduler import Scheduler, SchedulerRules


class World:
    """A trainer that takes g groups a step, and attempts that end as ``choose`` says."""

    def __init__(self, rules, choose, *, outcome, refuse=lambda position: False, step=0, state=None):
        self.rules, self.choose, self.outcome, self.refuse = rules, choose, outcome, refuse
        self.scheduler = Scheduler(rules, step=step)
        if state is not None:
            self.scheduler.restore(state)
        self.step = step
        self.taken = 0  # groups of the step in hand
        self.wanting = False
        self.running, self.begun, self.fetched = [], {}, []
        self.started, self.ended = Counter(), Counter()
        self.finished, self.delivered, self.dropped = [], [], []
        self.inbox, self.commands = [], []
        self.gave_up = False
        self.apply(self.scheduler.start())

    def hear(self, record):
        self.inbox.append(record)
        self.apply(self.scheduler.handle(record))

    def apply(self, commands):
        self.commands.extend(commands)
        for command in commands:
            match command:
                case FetchTask():
                    self.fetched.append(command.position)
                case StartGroup():
                    assert command.position not in self.begun
                    self.begun[command.position] = command.step
                case StartEpisode():
                    key = (command.position, command.index, command.attempt)
                    self.started[key] += 1
                    self.running.append(key)
                case FinishGroup():
                    self.finished.append(command.position)
                case DropGroup():
                    self.dropped.append(command.position)
                case DeliverGroup():
                    assert command.position in self.finished and self.wanting
                    if not self.rules.keep_failed:
                        assert self.step - self.begun[command.position] <= self.rules.staleness
                    self.delivered.append(command.position)
                    self.taken += 1
                    self.wanting = False
                case GiveUp():
                    self.gave_up = True
        assert len(self.running) <= self.rules.max_concurrent
        kept = len(self.begun) - len([position for position in self.dropped if position in self.begun])
        assert kept <= (self.step + self.rules.staleness + 1) * self.rules.groups_per_step

    def moves(self):
        moves = [("task", position) for position in self.fetched]
        moves += [("end", key) for key in self.running]
        if not self.wanting and self.taken < self.rules.groups_per_step:
            moves.append(("want", None))
        if self.taken == self.rules.groups_per_step:
            moves.append(("publish", None))
        return moves

    def move(self):
        moves = self.moves()
        assert moves, f"deadlock: {self.scheduler.missing()}"
        kind, what = moves[self.choose(len(moves))]
        if kind == "task":
            self.fetched.remove(what)
            self.hear(TaskRefused(what, "no") if self.refuse(what) else TaskReady(what, f"task{what}"))
        elif kind == "end":
            self.running.remove(what)
            self.ended[what] += 1
            failure, retryable = self.outcome(*what)
            self.hear(EpisodeEnded(*what, failure, retryable))
        elif kind == "want":
            self.wanting = True
            self.hear(GroupWanted())
        else:
            self.step, self.taken = self.step + 1, 0
            self.hear(StepPublished(self.step))

    def run(self, steps):
        while self.step < steps and not self.gave_up:
            self.move()
        return self


rules_strategy = st.builds(
    SchedulerRules,
    group_size=st.integers(1, 4),
    groups_per_step=st.integers(1, 3),
    staleness=st.integers(0, 3),
    max_concurrent=st.integers(1, 9),
    retries=st.integers(0, 2),
    in_order=st.booleans(),
    max_dropped_in_row=st.just(1000),
)


@settings(max_examples=300, deadline=None)
@given(rules=rules_strategy, seed=st.integers(0, 2**32))
def test_properties_in_random_worlds(rules, seed):
    random = Random(seed)
    kinds = [None, None, None, FailureKind.ENVIRONMENT, FailureKind.SANDBOX, FailureKind.PROMPT_TOO_LONG]
    outcomes = {}

    def outcome(position, index, attempt):
        kind = random.choice(kinds)
        outcomes[position, index] = kind
        return kind, kind in (FailureKind.ENVIRONMENT, FailureKind.SANDBOX)

    world = World(rules, random.randrange, outcome=outcome, refuse=lambda position: random.random() < 0.1)
    world.run(4)
    assert set(world.started.values()) <= {1}, "an attempt was started twice"
    assert set(world.ended.values()) <= {1}
    attempts = Counter(key[:2] for key in world.started)
    assert max(attempts.values()) <= 1 + rules.retries
    assert len(set(world.delivered)) == len(world.delivered) == 4 * rules.groups_per_step
    assert not set(world.delivered) & set(world.dropped)
    assert len(set(world.dropped)) == len(world.dropped)
    scored = {position for (position, _), kind in outcomes.items() if kind is None}
    assert set(world.delivered) <= scored
    if rules.in_order:
        assert world.delivered == sorted(world.delivered)

    again = Scheduler(rules)
    commands = again.start()
    for record in world.inbox:
        commands += again.handle(record)
    assert commands == world.commands, "the same inbox must give the same commands"

    # A resumed run takes up every position that was begun and not delivered, and no delivered one.
    resumed = World(rules, random.randrange, outcome=outcome, step=world.step, state=world.scheduler.state())
    resumed.run(world.step + 2)
    assert not set(resumed.begun) & set(world.delivered)
    settled = set(world.delivered) | set(world.dropped)
    redone = set(resumed.begun) | set(resumed.dropped) | set(resumed.fetched)
    open_before = {position for position in world.begun if position not in settled}
    first_new = world.scheduler.state()["next_position"]
    if any(position >= first_new for position in resumed.begun):
        assert open_before <= redone


def ordinary(**changes):
    rules = {"group_size": 2, "groups_per_step": 2, "staleness": 0, "max_concurrent": 8, "retries": 1} | changes
    return SchedulerRules(**rules)


def good(*key):
    return None, False


def test_strictly_on_policy_waits_for_the_weights():
    world = World(ordinary(), lambda count: 0, outcome=good)
    world.run(1)
    assert set(world.begun) == {0, 1} and set(world.begun.values()) == {0}
    while world.step < 2:
        world.move()
    assert {position: step for position, step in world.begun.items() if step == 1} == {2: 1, 3: 1}


def test_staleness_lets_rollout_run_ahead_by_admission():
    scheduler = Scheduler(ordinary(staleness=2, max_concurrent=100))
    assert [command.position for command in scheduler.start()] == [0, 1, 2, 3, 4, 5]
    assert [command.position for command in scheduler.handle(StepPublished(1))] == [6, 7]


def test_no_group_is_begun_that_no_step_would_train_on():
    scheduler = Scheduler(ordinary(staleness=2, max_concurrent=100, last_step=4))
    assert len(scheduler.start()) == 6
    assert [command.position for command in scheduler.handle(StepPublished(1))] == [6, 7]
    assert scheduler.handle(StepPublished(2)) == scheduler.handle(StepPublished(4)) == []
    assert Scheduler(ordinary(last_step=3), step=3).start() == []


def finish(scheduler, position, group_size=2):
    out = []
    for index in range(group_size):
        out += scheduler.handle(EpisodeEnded(position, index, 0))
    return out


def test_an_old_slow_group_keeps_its_place():
    """s = 1, g = 2: of four groups begun at step 0 two may go first; then the two late ones have the next places."""
    scheduler = Scheduler(ordinary(staleness=1, max_concurrent=100))
    for command in scheduler.start():
        scheduler.handle(TaskReady(command.position, "t"))
    for _ in range(2):
        scheduler.handle(GroupWanted())
    assert DeliverGroup(3) in finish(scheduler, 3)
    assert DeliverGroup(2) in finish(scheduler, 2)
    fetched = [command.position for command in scheduler.handle(StepPublished(1))]
    assert fetched == [4, 5]
    for position in fetched:
        scheduler.handle(TaskReady(position, "t"))
    scheduler.handle(GroupWanted())
    assert finish(scheduler, 4) == [FinishGroup(4)], "a younger group must not take a late group's place"
    assert DeliverGroup(0) in finish(scheduler, 0)


def test_retry_then_typed_failure_and_the_rest_of_the_group_goes_on():
    scheduler = Scheduler(ordinary(groups_per_step=1))
    scheduler.start()
    scheduler.handle(TaskReady(0, "t"))
    scheduler.handle(GroupWanted())
    scheduler.handle(EpisodeEnded(0, 0, 0))
    again = scheduler.handle(EpisodeEnded(0, 1, 0, FailureKind.SANDBOX, True))
    assert again == [StartEpisode(0, 1, 1)]
    done = scheduler.handle(EpisodeEnded(0, 1, 1, FailureKind.SANDBOX, True))
    assert done == [FinishGroup(0), DeliverGroup(0)]


@pytest.mark.parametrize("reason", ["all_failed", "prompt_too_long"])
def test_a_failed_group_is_replaced_by_the_next_task(reason):
    scheduler = Scheduler(ordinary(groups_per_step=1, max_concurrent=1))
    scheduler.start()
    scheduler.handle(TaskReady(0, "t"))
    too_long = reason == "prompt_too_long"
    kind = FailureKind.PROMPT_TOO_LONG if too_long else FailureKind.POLICY
    out = scheduler.handle(EpisodeEnded(0, 0, 0, kind, False))
    if not too_long:
        assert out == [StartEpisode(0, 1, 0)]
        out = scheduler.handle(EpisodeEnded(0, 1, 0, kind, False))
    assert out == [DropGroup(0, reason), FetchTask(1)], "siblings of a prompt that is too long are not even begun"


def test_gives_up_when_nothing_works():
    world = World(
        ordinary(max_dropped_in_row=5, retries=0), lambda count: 0, outcome=lambda *key: (FailureKind.POLICY, False)
    )
    world.run(1)
    assert world.gave_up and len(world.dropped) == 5


def test_stop_cancels_what_runs_and_starts_nothing():
    scheduler = Scheduler(ordinary(max_concurrent=3))
    for command in scheduler.start():
        scheduler.handle(TaskReady(command.position, "t"))
    assert scheduler.handle(Stopped()) == [CancelEpisode(0, 0, 0), CancelEpisode(0, 1, 0), CancelEpisode(1, 0, 0)]
    assert scheduler.handle(Stopped()) == []
    assert scheduler.handle(EpisodeEnded(0, 0, 0, FailureKind.CANCELLED, False)) == []
    assert scheduler.handle(StepPublished(1)) == []


def test_a_consumer_that_left_gets_nothing():
    scheduler = Scheduler(ordinary(groups_per_step=1))
    scheduler.start()
    scheduler.handle(TaskReady(0, "t"))
    scheduler.handle(GroupWanted())
    scheduler.handle(GroupUnwanted())
    assert finish(scheduler, 0) == [FinishGroup(0)]
    assert scheduler.handle(GroupWanted()) == [DeliverGroup(0)]


def test_missing_names_what_is_open():
    scheduler = Scheduler(ordinary(groups_per_step=2, max_concurrent=3))
    waiting = deque(scheduler.start())
    assert [each.task_id for each in scheduler.missing()] == [None, None]
    while waiting:
        scheduler.handle(TaskReady(waiting.popleft().position, "t"))
    first, second = scheduler.missing()
    assert (first.running, first.queued) == (((0, 0), (1, 0)), ())
    assert (second.running, second.queued) == (((0, 0),), ((1, 0),))


def test_an_attempt_that_is_not_running_cannot_end():
    scheduler = Scheduler(ordinary())
    scheduler.start()
    scheduler.handle(TaskReady(0, "t"))
    scheduler.handle(EpisodeEnded(0, 0, 0))
    with pytest.raises(ValueError, match="not running"):
        scheduler.handle(EpisodeEnded(0, 0, 0))
