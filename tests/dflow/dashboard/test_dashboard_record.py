"""The record of a run while tasks are killed: phases, events and bounded curves, at the times of a manual clock."""

from __future__ import annotations

import math
import sys
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from dflow.dashboard.dashboard_record import GIVE_UP_S, MOST_EVENTS, DashboardRecord, PageUpdate
from dflow.dashboard.history import History, Series, SeriesName
from dflow.dashboard.looks import Look
from dflow.distributed.wire.messages.observing import ResourceDepth, TaskState, TaskUsage
from dflow.distributed.wire.messages.roster import EdgeTraffic, TaskInfo
from dflow.distributed.wire.messages.status import (
    ClusterEvent,
    ClusterEvents,
    NotFinite,
    SnapshotSize,
    Status,
    TaskHealth,
    VariableInfo,
    WorkerProgress,
)
from tests.effort import examples
from tests.manual_clock import ManualClock

PS, W0, W1 = "/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1"


class SimulatedRun:
    """A cluster whose tasks do 10 steps a second each, seen once a second by a record."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.record = DashboardRecord("h:1")
        self.tasks = [TaskInfo(task, "h:2", 0.0, life=life) for life, task in enumerate((PS, W0, W1))]
        self.news: list[ClusterEvent] = []
        self.start = "c/1"
        self.status = Status(0.0, (), (), (), 0, 10_000, (VariableInfo("w", "float32", (4,), 16, PS),), (), {})
        self.silent: set[str] = set()
        self.progress: dict[str, WorkerProgress] = {}
        #: How long the newest heartbeat had traffic; None means until now.
        self.heard_s: float | None = None

    def tell(self, kind: str, task: str, text: str) -> None:
        number = len(self.news) + 1
        self.news.append(ClusterEvent(number, self.clock.now_s, kind, task, text))

    def kill(self, task: str, why: str = "no heartbeat") -> None:
        self.tasks = [
            replace(info, left_at_s=self.clock.now_s, left=why) if info.task == task and not info.left else info
            for info in self.tasks
        ]
        self.tell("left", task, f"{task} left: {why}")

    def look(self, seconds: float = 1.0, **changes: Any) -> list[PageUpdate]:
        """Let time pass, and have the record see the cluster then."""
        self.clock.advance(seconds)
        now_s = self.clock.now_s
        heard_s = now_s if self.heard_s is None else self.heard_s
        live = {info.task for info in self.tasks if info.left_at_s is None}
        steps = {task: int(10 * now_s) for task in live & {W0, W1}}
        for task in (W0, W1):  # a worker that has left keeps its last report
            if task in live or task not in self.progress:
                self.progress[task] = WorkerProgress(task, int(10 * now_s), 0.1, {"loss": 1 / now_s})
        self.status = replace(
            self.status,
            now_s=now_s,
            tasks=tuple(self.tasks),
            workers=tuple(self.progress.values()),
            steps_done=max(self.status.steps_done, sum(steps.values())),
            health=tuple(TaskHealth(task, now_s - 0.5, 1, "step 1", None) for task in sorted(live)),
            traffic=(EdgeTraffic("w", PS, W0, int(heard_s), int(1000 * heard_s), int(heard_s)),),
            **changes,
        )
        states = {
            task: TaskState(
                steps.get(task, 0),
                0.1 if task in steps else 0.0,
                int(10 * now_s),
                1,
                0,
                0,
                (ResourceDepth("examples", 3, 10),) if task == PS else (),
                TaskUsage(
                    0.2 * now_s, 0.3 * now_s, int(50 * now_s), int(20 * now_s), 0, 0, int(10 * now_s), int(15 * now_s)
                ),
            )
            for task in live - self.silent
        }
        seen = self.record.seen_event if self.record.seen_start == self.start else 0
        told = ClusterEvents(self.start, len(self.news), tuple(self.news[seen:]))
        return self.record.seen(Look(now_s, self.status, states), told, wall_s=1e9 + now_s)

    def fail(self, seconds: float = 1.0) -> list[PageUpdate]:
        self.clock.advance(seconds)
        return self.record.failed("no answer", now_s=self.clock.now_s)

    def row(self, task: str) -> dict[str, Any]:
        (row,) = (row for row in self.record.state()["tasks"] if row["task"] == task)
        return row


def texts(updates: list[PageUpdate]) -> list[str]:
    return [event["text"] for name, data in updates if name == "news" for event in data["events"]]


def test_before_the_first_snapshot_it_connects() -> None:
    run = SimulatedRun()
    assert run.record.state()["phase"] == "connecting"
    ((_, update),) = run.fail()
    assert update["phase"] == "connecting"
    assert update["phase_text"] == "no answer of the coordinator at h:1 yet: no answer"
    assert run.record.events(0) == {"events": [], "newest": 0, "lost": 0}


def test_a_running_cluster_has_rates_and_curves() -> None:
    run = SimulatedRun()
    run.look()
    assert run.row("worker:0")["steps_per_s"] is None, "one snapshot has no rates"
    updates = run.look()
    assert [name for name, _ in updates] == ["state", "points"]
    state = run.record.state()
    assert state["phase"] == "running"
    assert state["wall_s"] == 1e9 + 2
    worker = run.row("worker:0")
    expected = {"steps_per_s": 10.0, "parts_per_s": 10.0, "processor": 0.5, "wakeups": 5.0, "missed": 1.5}
    assert {name: round(worker[name], 6) for name in expected} == expected
    assert worker["python_us"] is not None
    assert round(worker["xla_us"]) == 30_000
    assert run.row("ps:0")["queues"] == [{"name": "examples", "size": 3, "capacity": 10}]
    assert state["edges"][0]["bytes_per_s"] == 1000.0
    assert state["jobs"] == {"ps": {"live": 1, "steps_per_s": 0.0}, "worker": {"live": 2, "steps_per_s": 20.0}}
    _, points = updates[-1]
    assert (points["at_s"], points["step"]) == (2.0, 40)
    assert points["values"]["worker:1/loss"] == 0.5
    assert (
        {one["id"] for one in run.record.history.json()["series"]}
        == set(points["values"])
        == {
            "steps/s",
            "bytes/s",
            "ps:0/processor",
            "ps:0/missed",
            "ps:0/queue examples",
            *(f"worker:{index}/{name}" for index in (0, 1) for name in ("loss", "steps/s", "processor", "missed")),
        }
    )


def test_the_rates_of_edges_are_steady_though_heartbeats_bring_none_or_two_a_second() -> None:
    run, rates = SimulatedRun(), []
    for second in range(1, 15):
        run.heard_s = 2.0 * (second // 2)  # the traffic of two seconds arrives in every second one
        run.look()
        rates.append(run.record.state()["edges"][0]["bytes_per_s"] if run.heard_s else None)
    assert {round(rate) for rate in rates[-6:]} <= {800, 1000, 1200}, rates


def test_killed_tasks_are_events_and_rows_that_are_off() -> None:
    run = SimulatedRun()
    for task in (PS, W0, W1):
        run.tell("joined", task, f"{task} joined")
    run.look()
    run.kill(W1)
    assert texts(run.look()) == [f"{W1} left: no heartbeat"]
    assert (run.row("worker:1")["state"], run.row("worker:1")["level"]) == ("left", "off")
    assert run.row("worker:1")["steps"] is None
    run.tasks.append(TaskInfo(W1, "h:9", run.clock.now_s, life=9))
    run.tell("restarted", W1, f"{W1} joined again")
    assert texts(run.look()) == [f"{W1} joined again"]
    assert (run.row("worker:1")["state"], run.row("worker:1")["restarts"]) == ("live", 1)
    run.silent = {W0}
    run.look()
    assert (run.row("worker:0")["state"], run.row("worker:0")["steps_per_s"]) == ("not reached", None)
    told = run.record.events(3)
    assert [event["kind"] for event in told["events"]] == ["left", "restarted"]
    assert [event["task"] for event in told["events"]] == ["worker:1", "worker:1"]


def test_the_curve_of_a_killed_worker_ends_with_its_last_report() -> None:
    run = SimulatedRun()
    for _ in range(3):
        run.look()
    run.kill(W1)
    (points,) = (data["values"] for name, data in run.look() if name == "points")
    assert points["worker:0/loss"] == 1 / 4
    assert not [name for name in points if name.startswith("worker:1/")]


def test_while_the_coordinator_is_away_the_last_state_stays() -> None:
    run = SimulatedRun()
    run.tell("joined", W0, "worker:0 joined")
    run.look()
    done = run.record.state()["steps"]["done"]
    assert texts(run.fail()) == ["the coordinator does not answer"]
    assert texts(run.fail(10.0)) == [], "it is told once"
    state = run.record.state()
    assert (state["phase"], state["steps"]["done"]) == ("unreachable", done)
    assert state["phase_text"] == "the coordinator has not answered for 10 s; its last state is shown"
    run.start = "c/2"  # started again, with the same tasks, which it tells again
    assert texts(run.look()) == ["the coordinator has been started again", "the coordinator answers again"]
    assert run.record.state()["phase"] == "running"
    assert [event["text"] for event in run.record.events(0)["events"]].count("worker:0 joined") == 1


def test_the_end_of_the_run_is_told_and_its_last_state_stays() -> None:
    run = SimulatedRun()
    run.look()
    run.kill(W0, "finished")
    run.kill(W1, "finished")
    assert "the run has ended" in texts(run.look())
    assert run.row("worker:0")["state"] == "finished"
    run.fail()
    state = run.record.state()
    assert (state["phase"], state["phase_text"]) == ("ended", "the run has ended; its last state is shown")
    assert state["tasks"]


def test_a_coordinator_that_is_gone_after_the_last_step_has_ended_the_run() -> None:
    run = SimulatedRun()
    run.look(steps_total=20)
    assert run.record.state()["phase"] == "running", "a program may go on after its steps"
    run.fail()
    assert run.record.state()["phase"] == "ended"


def test_a_coordinator_that_never_comes_back_ends_the_run() -> None:
    run = SimulatedRun()
    run.look()
    run.fail()
    run.fail(GIVE_UP_S + 1)
    state = run.record.state()
    assert state["phase"] == "ended"
    assert "has not answered for 61 s, so the run has probably ended" in state["phase_text"]


def test_another_run_at_the_same_address_begins_a_new_record() -> None:
    run = SimulatedRun()
    run.tell("joined", W0, "worker:0 joined")
    run.look()
    run.fail()
    numbered = run.record.events(0)["newest"]
    run.start, run.news = "d/1", []
    run.tell("joined", W0, "worker:0 of another run joined")
    before = run.record.state()["run"]
    updates = run.look()
    assert texts(updates) == ["worker:0 of another run joined"]
    assert (before, {name: data.get("run") for name, data in updates}) == (
        "c",
        {"state": "d", "news": None, "points": "d"},
    )
    assert run.record.events(0)["newest"] == numbered + 1, "pages see it as news"
    assert len(run.record.history.json(["loss"])["series"][0]["at_s"]) == 1


def test_events_are_bounded_and_lost_ones_counted() -> None:
    run = SimulatedRun()
    for number in range(MOST_EVENTS + 20):
        run.tell("log", "", f"event {number}")
    run.look()
    told = run.record.events(0)
    assert (len(told["events"]), told["newest"], told["lost"]) == (MOST_EVENTS, MOST_EVENTS + 20, 20)
    assert run.record.events(MOST_EVENTS + 19)["events"][0]["text"] == f"event {MOST_EVENTS + 19}"
    assert run.record.events(10**9)["lost"] == 0


def test_snapshots_are_told_and_values_that_json_lacks_are_none() -> None:
    run = SimulatedRun()
    run.look(snapshot=SnapshotSize(3, 10, 100))
    not_finite = (NotFinite(7, "loss", float("nan"), "run_0", W1),)
    updates = run.look(snapshot=SnapshotSize(4, 5, 100), not_finite=not_finite, results={"accuracy": float("inf")})
    assert texts(updates) == ["snapshot 4 is complete"]
    state = run.record.state()
    assert state["snapshot"] == {"number": 4, "written_bytes": 5, "full_bytes": 100}
    assert state["results"] == {"accuracy": None}
    assert state["not_finite"] == [{"step": 7, "metric": "loss", "value": "nan", "run": "run_0", "task": "worker:1"}]


def test_the_state_of_thousands_of_tasks_is_bounded() -> None:
    run = SimulatedRun()
    run.tasks += [TaskInfo(f"/job:worker/task:{index}", "h:2", 0.0, life=index + 10) for index in range(2, 3000)]
    expected = tuple(f"/job:late/task:{index}" for index in range(10))
    run.look(expected=expected)
    run.look(expected=expected)
    state = run.record.state()
    assert len(state["tasks"]) == 1000
    assert state["tasks_left_out"] == 2011
    assert run.record.history.json()["left_out"] > 0
    assert len(run.record.history.json()["series"]) == 200


def test_workers_that_are_all_down_between_two_restarts_have_not_ended_the_run() -> None:
    run = SimulatedRun()
    run.look()
    run.kill(W0, "exit status 1")
    run.kill(W1, "finished")
    assert "the run has ended" not in texts(run.look())
    assert run.record.state()["phase"] == "running"
    run.tasks.append(TaskInfo(W0, "h:3", run.clock.now_s, life=9))
    run.look()
    run.kill(W0, "finished")
    assert "the run has ended" in texts(run.look()), "the newest life counts"


def test_workers_that_failed_end_the_run_after_its_steps_or_a_long_time() -> None:
    for seconds, total in ((1.0, 20), (GIVE_UP_S + 1, 10_000)):
        run = SimulatedRun()
        run.look()
        run.kill(W0)
        run.kill(W1)
        run.look(seconds, steps_total=total)
        assert run.record.state()["phase"] == "ended"


def test_results_such_as_those_of_evaluations_are_curves_with_a_value_for_each_change() -> None:
    run = SimulatedRun()

    def shown(**results: float) -> Any:
        (points,) = [data for name, data in run.look(results=results) if name == "points"]
        return points["values"].get(SeriesName("", "auc", "").id)

    assert [shown(), shown(auc=0.5), shown(auc=0.5), shown(auc=0.75, other=1.0)] == [None, 0.5, None, 0.75]


@pytest.mark.parametrize("value", [0.5, float("nan")])
def test_the_value_of_an_evaluation_is_at_its_own_step_also_if_it_is_the_same_again(value: float) -> None:
    run, name = SimulatedRun(), "evaluation/auc"
    told = []
    for steps in (125, 125, 250):
        updates = run.look(results={name: value}, result_steps={name: steps})
        told.append([data["step"] for _, data in updates if name in data.get("values", ())])
        assert any("steps/s" in data.get("values", ()) for _, data in updates)
    assert told == [[125], [], [250]]
    (series,) = run.record.history.json([name])["series"]
    assert series["step"] == [125, 250]


WEEK_S = 7 * 24 * 3600


def column(series: Series, name: str) -> list[float]:
    return [math.nan if value is None else value for value in series.json()[name]]


def test_a_week_of_values_stays_within_the_limits() -> None:
    series = Series(400)
    for second in range(0, WEEK_S, 4):
        series.add(float(second), 10 * second, 5.0 if second == 123_456 else 1.0)
    assert 200 <= len(series) <= 400
    assert column(series, "at_s")[-1] == WEEK_S - 4
    assert column(series, "step")[-1] == 10 * (WEEK_S - 4)
    assert max(column(series, "high")) == 5.0, "a spike of one value is seen after a week"
    steps_s = [later - earlier for earlier, later in pairwise(column(series, "at_s"))]
    assert max(steps_s[:-1]) == min(steps_s[:-1]), "old and new parts of the curve are equally fine"
    held = sum(sys.getsizeof(each) for each in series._columns())
    assert held <= 5 * 8 * 400 * 2


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=60), st.integers(2, 9))
def test_points_cover_all_values_in_order(values: list[float], most: int) -> None:
    series = Series(most)
    for index, value in enumerate(values):
        series.add(float(index), index, value)
        assert len(series) <= most
    ends = [int(at_s) for at_s in column(series, "at_s")]
    assert ends == sorted(set(ends))
    begins = [0, *(end + 1 for end in ends)]
    for begin, end, low, high, value in zip(
        begins, ends, *(series.json()[name] for name in ("low", "high", "value")), strict=False
    ):
        known = [each for each in values[begin : end + 1] if math.isfinite(each)]
        assert (low, high) == ((min(known), max(known)) if known else (None, None))
        assert value == (values[end] if math.isfinite(values[end]) else None)
    assert not values or ends[-1] == len(values) - 1


def test_series_beyond_the_limit_are_counted_and_dropped() -> None:
    history = History(most_points=10, most_series=2)
    names = [SeriesName(f"worker:{index}", "loss") for index in range(3)]
    kept = history.add(1.0, 1, dict.fromkeys(names, 0.5))
    history.add(2.0, 2, {names[2]: 1.0, SeriesName("", "x" * 500): 1.0})
    assert kept == {"worker:0/loss": 0.5, "worker:1/loss": 0.5}
    told = history.json()
    assert [one["id"] for one in told["series"]] == ["worker:0/loss", "worker:1/loss"]
    assert told["left_out"] == 2


def test_series_are_chosen_by_quantity() -> None:
    history = History()
    history.add(1.0, 1, {SeriesName("worker:0", "loss"): math.inf, SeriesName("", "steps/s", "1/s"): 2.0})
    (one,) = history.json({"loss"})["series"]
    named = {"id": "worker:0/loss", "task": "worker:0", "name": "loss", "unit": ""}
    assert one == named | {"at_s": [1.0], "step": [1], "value": [None], "low": [None], "high": [None]}


@pytest.mark.parametrize("name", ["steps/s", "processor", "missed", "queue examples", "metric steps/s"])
def test_a_metric_with_the_name_of_a_rate_is_a_curve_of_its_own(name: str) -> None:
    history = History()
    kept = history.add(1.0, 1, {SeriesName("worker:0", name): 5.0, SeriesName("worker:0", name, "1/s"): 70.0})
    assert kept == {f"worker:0/metric {name}": 5.0, f"worker:0/{name}": 70.0}
