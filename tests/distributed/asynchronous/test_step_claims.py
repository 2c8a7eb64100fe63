import itertools
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dflow.distributed.asynchronous.claimed_run import FIRST_CLAIM, LARGEST_CLAIM
from dflow.distributed.asynchronous.step_claims import FAILURE_S, StepClaims
from dflow.distributed.coordinator.coordinator_events import SendReply
from dflow.distributed.coordinator.coordinator_part import CoordinatorCore, CoordinatorSettings, Received
from dflow.distributed.coordinator.durable_records import DurableRecords
from dflow.distributed.coordinator.membership import ReleaseTask
from dflow.distributed.snapshots.step_pauses import StepPauses
from dflow.distributed.training.run_progress import RunProgress
from dflow.distributed.training.work_messages import Claimed, ClaimSteps, StepsDone, TrainingPlan
from dflow.distributed.wire.messages.basic import Failure
from tests.effort import examples

A, B, C = (f"/job:worker/task:{index}" for index in range(3))


def core_of(records: DurableRecords) -> CoordinatorCore:
    return CoordinatorCore(CoordinatorSettings(), {}, records)


def done_in(claims: StepClaims) -> int:
    return sum(done for done, _ in claims.progress.counts().values())


def total_of(claims: StepClaims) -> int:
    return sum(total for _, total in claims.progress.counts().values())


def asked(ask: int, task: str, done: int = 0, total: int = 100, **rest: object) -> tuple[int, ClaimSteps]:
    return ask, ClaimSteps("run", task, total, 0, 0, done, **rest)  # type: ignore[arg-type]


class Ledger(StepClaims):
    """The claims, by the number of the request."""

    def __init__(self, records: DurableRecords, progress: RunProgress | None = None) -> None:
        core = core_of(records)
        core.parts += [StepPauses(core), progress or RunProgress(core_of(DurableRecords()))]
        super().__init__(core)

    def ask(self, ask: int, claim: ClaimSteps) -> list[Any]:
        return [*self.claim(claim, Received(0.0, 0, ask, 0))]

    def leave(self, task: str) -> list[Any]:
        return [*self.on_leave([ReleaseTask(task, 0, "killed")], 0.0)]

    def tick(self, at_s: float) -> None:
        self.on_tick(at_s)


class Numbered:
    """A ledger whose workers number their claims and receive every answer."""

    def __init__(self) -> None:
        self.claims = Ledger(DurableRecords())
        self.number = 0
        self.open: dict[int, tuple[str, int]] = {}
        self.seen: dict[str, int] = {}

    def claim(self, ask: int, claim: ClaimSteps) -> list[SendReply]:
        self.number += 1
        self.open[ask] = claim.task, self.number
        numbered = msgspec.structs.replace(claim, number=self.number, last=self.seen.get(claim.task, 0))
        return self.noted(self.claims.ask(ask, numbered))

    def leave(self, task: str) -> list[SendReply]:
        self.seen.pop(task, None)
        return self.noted(self.claims.leave(task))

    def noted(self, replies: list[SendReply]) -> list[SendReply]:
        for reply in replies:
            task, number = self.open.pop(reply.ask)
            if isinstance(reply.message, Claimed):
                self.seen[task] = number
        return replies


def test_claims_are_smaller_with_more_workers() -> None:
    ledger = Numbered()
    assert ledger.claim(*asked(1, A)) == [SendReply(1, Claimed(0, 16))]
    assert ledger.claim(*asked(2, B)) == [SendReply(2, Claimed(16, 84 // 8))]
    assert ledger.claim(*asked(3, C)) == [SendReply(3, Claimed(26, 74 // 12))]


def test_a_claim_ends_before_a_step_that_was_left_over() -> None:
    ledger = Numbered()
    ledger.claim(*asked(1, A))
    ledger.claim(*asked(2, B))  # the steps 16 to 25
    ledger.leave(B)
    assert ledger.claim(*asked(3, A, done=4)) == [SendReply(3, Claimed(4, 1))]
    assert ledger.claim(*asked(4, A, done=1)) == [SendReply(4, Claimed(5, 11))]
    assert ledger.claim(*asked(5, A, done=11)) == [SendReply(5, Claimed(16, 1))]


def test_a_claim_asked_again_gives_the_same_steps_though_lower_ones_have_come_back() -> None:
    ledger = Ledger(DurableRecords())
    ledger.ask(1, ClaimSteps("run", A, 100, 1))
    first, second = ClaimSteps("run", B, 100, 1), ClaimSteps("run", B, 100, 2, 1, 10)
    assert ledger.ask(2, first) == [SendReply(2, Claimed(16, 10))]
    ledger.leave(A)
    assert ledger.ask(3, first) == [SendReply(3, Claimed(16, 10))]
    for ask in (4, 5):
        assert ledger.ask(ask, second) == [SendReply(ask, Claimed(0, 1))]
    assert done_in(ledger) == ledger.workers()[1].steps == 10


def test_a_second_ask_takes_the_place_of_one_that_waits() -> None:
    ledger = Numbered()
    ledger.claim(*asked(1, A, total=1))
    ledger.claim(*asked(2, B, total=1))
    [reply] = ledger.claim(*asked(3, B, total=1))
    assert reply.ask == 2
    assert isinstance(reply.message, Failure)
    assert "a later claim of worker:1 has taken the place" in reply.message.text


@pytest.mark.parametrize(
    ("claim", "text"),
    [
        (ClaimSteps("run", A, 100, 4), "claim 4 of worker:0 came after its claim 5"),
        (ClaimSteps("run", A, 100, 6, 5, 17), "worker:0 reports 17 steps done of a claim of 16"),
        (ClaimSteps("run", B, 100, 3, 2, 1), "worker:1 reports claim 2 in claim 3, and its newest is 0"),
        (ClaimSteps("run", B, 50, 1), "it has 100 steps and worker:1 asks for 50"),
        (ClaimSteps("other", B, -1, 1), "asks for -1 steps"),
    ],
)
def test_a_claim_that_contradicts_what_is_known_is_refused(claim: ClaimSteps, text: str) -> None:
    ledger = Ledger(DurableRecords())
    ledger.ask(1, ClaimSteps("run", A, 100, 5))
    [reply] = ledger.ask(2, claim)
    assert isinstance(reply.message, Failure)
    assert text in reply.message.text
    assert total_of(ledger) == 100


def test_progress_keeps_the_newest_of_each_worker() -> None:
    ledger = Numbered()
    ledger.claim(*asked(1, A))
    ledger.claim(*asked(2, A, done=16, step_s=0.05, metrics={"loss": 2.0}))
    ledger.claims.note_done(StepsDone("run", A, 16, 3, metrics={"loss": 1.0}))
    ledger.claim(*asked(3, A, done=4))
    [worker] = ledger.claims.workers()
    assert (worker.steps, worker.step_s, worker.metrics) == (20, 0.05, {"loss": 1.0})


@pytest.mark.parametrize(
    ("step_s", "least", "count"),
    [
        (0.0, 1, FIRST_CLAIM),
        (1e-6, 8, LARGEST_CLAIM),
        (0.01, 8, 100),
        (0.4, 1, 2),
        (0.9, 1, 1),
        (50.0, 1, 1),
        (50.0, 8, 8),
        (50.0, 10**9, 24_996),  # of one worker, a quarter of the rest
    ],
)
def test_a_claim_is_about_a_second_of_work(step_s: float, least: int, count: int) -> None:
    ledger = Numbered()
    ledger.claim(*asked(1, A, total=100_000))
    [reply] = ledger.claim(*asked(2, A, done=16, total=100_000, step_s=step_s, least=least))
    assert reply.message == Claimed(16, count)


@pytest.mark.parametrize("report", [("run", B, 0, 1), ("other", A, 0, 1), ("run", A, 1, 1), ("run", A, 0, 17)])
def test_a_report_of_steps_that_the_worker_has_not_claimed_is_ignored(report: tuple[str, str, int, int]) -> None:
    ledger = Numbered()
    ledger.claim(*asked(1, A))
    assert ledger.claims.note_done(StepsDone(*report)) == []
    assert done_in(ledger.claims) == 0


class RandomRun(RuleBasedStateMachine):
    """Workers that claim, do part of a claim, report that, stop, die and return in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Numbered()
        self.total = 0
        self.claims: dict[str, range] = {}
        #: Number of reported steps of each claim; `claims` has the others.
        self.reported: Counter[str] = Counter()
        self.asks: dict[int, str] = {}
        self.answered: set[int] = set()
        self.done: list[int] = []
        self.next_ask = 0

    def take(self, replies: list[SendReply]) -> None:
        for reply in replies:
            assert reply.ask not in self.answered
            self.answered.add(reply.ask)
            task = self.asks.pop(reply.ask)
            if isinstance(reply.message, Claimed):
                self.claims[task] = range(reply.message.first, reply.message.first + reply.message.count)

    def ask(self, task: str, done: int, *, more: bool = True) -> None:
        held = self.claims.pop(task, range(0))
        self.done += held[:done]
        self.asks[self.next_ask] = task
        done += self.reported.pop(task, 0)
        self.take(self.ledger.claim(*asked(self.next_ask, task, done, self.total, more=more)))
        self.next_ask += 1

    @rule(task=st.sampled_from([A, B, C]), part=st.floats(0, 1))
    def report(self, task: str, part: float) -> None:
        held = self.claims.get(task, range(0))
        done = round(part * len(held))
        if done and task not in self.asks.values():
            self.done += held[:done]
            self.claims[task] = held[done:]
            first = held.start - self.reported[task]
            self.reported[task] += done
            self.take(
                self.ledger.noted(self.ledger.claims.note_done(StepsDone("run", task, first, self.reported[task])))
            )

    @precondition(lambda self: self.next_ask == 0)
    @rule(total=st.integers(0, 60))
    def choose_total(self, total: int) -> None:
        self.total = total

    @rule(task=st.sampled_from([A, B, C]), part=st.floats(0, 1))
    def claim(self, task: str, part: float) -> None:
        if task not in self.asks.values():
            self.ask(task, round(part * len(self.claims.get(task, ()))))

    @rule(task=st.sampled_from([A, B, C]), part=st.floats(0, 1))
    def want_no_more(self, task: str, part: float) -> None:
        if task not in self.asks.values():
            self.ask(task, round(part * len(self.claims.get(task, ()))), more=False)
            assert task not in self.asks.values(), "one that wants no more is answered at once"
            assert not self.claims[task]

    @rule(task=st.sampled_from([A, B, C]))
    def die(self, task: str) -> None:
        self.claims.pop(task, None)
        self.reported.pop(task, None)
        self.take(self.ledger.leave(task))
        assert task not in self.asks.values(), "a dead worker's ask is answered too"

    @invariant()
    def no_step_is_held_twice(self) -> None:
        held = [*self.done, *(step for claim in self.claims.values() for step in claim)]
        assert len(held) == len(set(held))
        assert all(0 <= step < self.total for step in held)
        assert done_in(self.ledger.claims) == len(self.done)

    @invariant()
    def an_ask_waits_only_for_another_workers_claim(self) -> None:
        assert not self.asks or any(self.claims.values())

    def teardown(self) -> None:
        """After every history the remaining workers end the run, and no claim waits."""
        for task in (A, B, C):
            if task not in self.asks.values():
                self.ask(task, len(self.claims.get(task, ())))
        while holders := [task for task, claim in self.claims.items() if claim]:
            self.ask(holders[0], len(self.claims[holders[0]]))
        assert not self.asks
        assert sorted(self.done) == list(range(self.total))
        assert done_in(self.ledger.claims) == self.total


TestRandomRun = RandomRun.TestCase
TestRandomRun.settings = settings(max_examples=examples(200), stateful_step_count=40, deadline=None)


def test_the_sums_of_a_run_have_each_step_once() -> None:
    records = DurableRecords()
    ledger, one, looks = Ledger(records), {"loss": 1.5, "examples": 1.0}, itertools.count(1)

    def claim(task: str, number: int, done: int = 0, last: int | None = None) -> list[SendReply]:
        last = number - 1 if last is None else last
        sums = {name: value * done for name, value in one.items()}
        return ledger.ask(number, ClaimSteps("run", task, 4, number, last, done, sums=sums))

    def sums(drops: bool = False) -> dict[str, float]:
        [reply] = ledger.ask(99, ClaimSteps("run", C, 4, next(looks), more=False, drops_sums=drops))
        assert isinstance(reply.message, Claimed)
        return reply.message.sums

    claim(A, 1)
    [reply] = claim(B, 1)
    assert sums() == {}
    for _ in range(2):  # sent again
        [reply] = claim(A, 2, done=1)
        assert reply.message == Claimed(2, 1)
        assert sums() == one
    claim(A, 3, done=1, last=1)  # the answer to claim 2 was lost
    assert sums() == one
    before = ledger.copy()
    ledger.leave(B)
    claim(B, 1, done=1, last=0)  # of a claim that was given to others
    assert sums() == one
    claim(A, 4, done=1)
    rows = {key: row for key, row in records.changed.items() if row is not None}
    ledger = Ledger(DurableRecords(rows))  # started again
    assert claim(A, 5, done=1) == []  # waits for B
    for reply in claim(B, 2, done=1):
        assert reply.message == Claimed(4, 0, {"loss": 6.0, "examples": 4.0})
    ledger.return_to(before)
    claim(A, 6, done=1)  # of a claim from before the return
    assert sums() == one
    assert sums(drops=True) == sums() == {}


@pytest.mark.parametrize("is_training", [False, True])
def test_only_runs_of_training_are_in_the_status(is_training: bool) -> None:
    ledger = Ledger(DurableRecords())
    before = ledger.copy()
    ledger.ask(1, ClaimSteps("run", A, 1, 1, is_training=is_training))
    ledger.ask(2, ClaimSteps("run", A, 1, 2, 1, done=1, metrics={"loss": 1.0}, is_training=is_training))
    assert (done_in(ledger), total_of(ledger), done_in(ledger)) == (is_training,) * 3
    assert [worker.task for worker in ledger.workers()] == [A] * is_training
    ledger.return_to(before)
    ledger.ask(3, ClaimSteps("run", A, 1, 3, 2, more=False, is_training=is_training))
    assert len(ledger.progress.take_news()) == 2 * is_training  # of the return, and of the end of its only worker


def test_the_end_of_a_run_whose_last_worker_failed_is_announced_after_its_error() -> None:
    ledger = Ledger(DurableRecords())
    ledger.ask(1, ClaimSteps("run", A, 20, 1))
    ledger.note_done(StepsDone("run", A, 0, 2, has_failed=True))
    ledger.ask(2, ClaimSteps("run", A, 20, 2, 1, done=2, more=False, has_failed=True))
    ledger.tick(1.0)
    ledger.ask(3, ClaimSteps("run", A, 20, 3))  # it has come back
    ledger.tick(9.0)
    ledger.leave(A)
    for at_s, count in ((10.0, 0), (10.0 + FAILURE_S, 1), (20.0, 0)):
        ledger.tick(at_s)
        assert len(ledger.progress.take_news()) == count


@pytest.mark.parametrize(("total", "is_over", "says"), [(4, False, True), (8, False, False), (8, True, True)])
def test_a_trainer_repeats_its_parts_until_it_has_ended(total: int, is_over: bool, says: bool) -> None:
    plans = RunProgress(core_of(DurableRecords()))
    ledger = Ledger(DurableRecords(), plans)
    before = ledger.copy()
    plans.note_plan(TrainingPlan("run", A, 0, total, is_over))
    for part in ("run 0-2", "run 2-4"):
        ledger.ask(1, ClaimSteps(part, A, 2, 1))
        ledger.ask(2, ClaimSteps(part, A, 2, 2, 1, done=1))
        ledger.ask(3, ClaimSteps(part, A, 2, 3, 2, done=1))
    assert not ledger.progress.take_news()
    ledger.return_to(before)
    line = f"run 'run' was complete, and has 0 of {total} steps done now: run it again"
    assert ledger.progress.take_news() == [line] * says


def test_a_run_whose_worker_waits_for_steps_goes_on_by_itself() -> None:
    ledger = Ledger(DurableRecords())
    before = ledger.copy()
    ledger.ask(1, ClaimSteps("run", A, 1, 1))
    ledger.hold(True)
    ledger.ask(2, ClaimSteps("run", A, 1, 2, 1, done=1))
    ledger.return_to(before)
    assert not ledger.progress.take_news()
