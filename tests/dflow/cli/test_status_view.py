"""The output of `dflow status`, from a picture of a cluster and from two snapshots of a running one."""

from __future__ import annotations

import contextlib
from contextlib import closing
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from msgspec.structs import replace

import dflow
from dflow.cli.closing_summary import closing_summary
from dflow.cli.live_status import live_view, show_status
from dflow.cli.status_view import Closing, LoggedView, PlainView, closing_tables, launch_view, progress_line
from dflow.cli.tables import size_text
from dflow.dashboard.looks import Look, StepRate, stragglers, type_text
from dflow.dashboard.traffic import grouped_traffic
from dflow.distributed.launching.run_logs import RunLogs
from dflow.distributed.wire.messages.observing import ResourceDepth, TaskState, TaskUsage
from dflow.distributed.wire.messages.roster import EdgeTraffic, TaskInfo
from dflow.distributed.wire.messages.status import (
    NotFinite,
    PartCosts,
    Status,
    TaskHealth,
    VariableInfo,
    WorkerProgress,
)
from dflow.testing import memory_cluster
from tests.dflow.cli.printed import console, printed

PS0, PS1 = "/job:ps/task:0", "/job:ps/task:1"
WORKERS = tuple(f"/job:worker/task:{index}" for index in range(3))


def status(**changes: object) -> Status:
    made: dict[str, object] = {
        "now_s": 10.0,
        "tasks": (TaskInfo(PS0, "h:1", 0.5), TaskInfo(WORKERS[0], "h:2", 1.0), TaskInfo(WORKERS[1], "h:3", 1.0)),
        "expected": (),
        "workers": (
            WorkerProgress(WORKERS[0], 40, 0.0123, {"loss": 0.5}),
            WorkerProgress(WORKERS[1], 20, 0.025, {"loss": 1.0, "accuracy": 0.9}),
        ),
        "steps_done": 60,
        "steps_total": 100,
        "variables": (),
        "traffic": (),
        "results": {},
    }
    return Status(**{**made, **changes})  # type: ignore[arg-type]


def closed(view: Status, *, closing: Closing = closing_tables, **ends: str) -> str:
    by_task = {f"/job:{name.replace('_', '/task:')}": end for name, end in ends.items()}
    return printed(closing(view, by_task), width=100)


def sent(edge: str, source: str, destination: str, values: int = 2, size_bytes: int = 100) -> EdgeTraffic:
    return EdgeTraffic(edge, source, destination, values, size_bytes)


def test_progress_has_steps_rate_mean_loss_and_step_times() -> None:
    line = progress_line(status(), 12.34)
    assert line == "step 60/100  12.3 steps/s  loss 0.7500  worker:0 12.3 ms  worker:1 25.0 ms"


def test_progress_of_a_job_that_goes_on_names_the_tasks_that_have_not_come() -> None:
    began = status(workers=(), expected=(WORKERS[2],))
    assert progress_line(began, 0.0) == "step 60/100  0.0 steps/s  3 of 4 tasks are up; waiting for worker:2"
    assert progress_line(status(workers=()), 0.0) == "step 60/100  0.0 steps/s"
    assert "waiting for" not in progress_line(status(expected=(WORKERS[2],)), 0.0)


def test_the_closing_tables_name_losses_that_were_not_finite() -> None:
    found = NotFinite(37, "loss", float("nan"), "run_0", WORKERS[1])
    shown = closed(status(not_finite=(found,)))
    assert "Not finite" in shown
    assert [line.split() for line in shown.splitlines() if "run_0" in line] == [
        ["run_0", "loss", "nan", "37", "worker:1"]
    ]
    assert "Not finite" not in closed(status())


def test_progress_leaves_out_the_step_time_of_a_worker_that_left() -> None:
    gone = (TaskInfo(WORKERS[0], "h:2", 1.0, 5.0, "killed"), TaskInfo(WORKERS[1], "h:3", 1.0))
    assert "worker:0" not in progress_line(status(tasks=gone), 1.0)


def test_before_the_first_step_progress_says_who_is_awaited() -> None:
    assert progress_line(status(steps_total=0, expected=(PS1, WORKERS[2])), 0.0) == (
        " 10.0 s  3 of 5 tasks are up; waiting for ps:1, worker:2"
    )


def test_progress_says_what_is_compiled() -> None:
    doing = "tracing and compiling train_step"
    health = tuple(TaskHealth(worker, 9.0, 0, doing, None) for worker in WORKERS[:2])
    named = f"worker:0, worker:1: {doing}"
    now = status(workers=(), steps_done=0, health=(*health, TaskHealth(PS0, 9.0, 0, "step 1 of worker:0", None)))
    assert progress_line(now, 0.0) == f"step 0/{now.steps_total}  0.0 steps/s  {named}"
    before = replace(now, steps_total=0)
    assert progress_line(before, 0.0).endswith(f" tasks are up  {named}")
    many = tuple(TaskHealth(f"/job:worker/task:{index}", 9.0, 0, doing, None) for index in range(9))
    assert progress_line(replace(now, health=many), 0.0).endswith(f"  9 tasks: {doing}")


def test_the_rate_leaves_out_steps_of_an_earlier_job() -> None:
    rate = StepRate()
    assert rate.add(0.0, 0, 0) == 0.0
    assert rate.add(0.2, 448, 0) == 0.0  # of the snapshot
    assert rate.add(20.2, 448, 0) == 0.0  # the first step is compiled
    assert rate.add(21.2, 458, 12) == 10.0
    assert rate.add(22.2, 440, 30) == 0.0  # after a return to a snapshot
    assert rate.add(23.2, 445, 35) == 5.0


def test_the_rate_is_that_of_the_last_seconds() -> None:
    rate = StepRate()
    assert rate.add(0.0, 0) == 0.0
    assert rate.add(2.0, 20) == 10.0
    for second in range(3, 20):
        newest = rate.add(float(second), 20 + 2 * (second - 2))
    assert newest == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("size_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_960, "1.0 MB"), (3_400_000, "3.4 MB")]
)
def test_a_size_has_the_unit_that_fits(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text


@pytest.mark.parametrize(
    ("dtype", "text"), [("float32", "f32[3,1]"), ("bfloat16", "bf16[3,1]"), ("uint8", "u8[3,1]"), ("bool", "bool[3,1]")]
)
def test_a_type_has_its_letter_bits_and_shape(dtype: str, text: str) -> None:
    assert type_text(VariableInfo("v", dtype, (3, 1), 0, "")) == text


def test_the_workers_that_get_or_send_the_same_are_one_row() -> None:
    rows = grouped_traffic(
        [
            *(sent("w", PS0, worker, size_bytes=300) for worker in WORKERS),
            *(sent("dw", worker, PS0) for worker in WORKERS[:2]),
            sent("b", PS1, WORKERS[0]),
        ]
    )
    assert rows == [
        EdgeTraffic("w", "ps:0", "worker:*", 6, 900),
        EdgeTraffic("dw", "worker:*", "ps:0", 4, 200),
        EdgeTraffic("b", "ps:1", "worker:0", 2, 100),
    ]


def test_all_edges_are_shown_on_request_and_else_the_largest_with_the_total() -> None:
    traffic = tuple(sent(f"edge{n:02}", PS0, WORKERS[0], size_bytes=n * 1_000_000) for n in range(40))
    assert closed(status(traffic=traffic)).count("edge") == 40
    assert closed(status(traffic=traffic), closing=closing_summary).endswith(
        "\nSent: 780.0 MB; largest: edge39 ps:0 -> worker:0 39.0 MB; edge38 ps:0 -> worker:0 38.0 MB; ... \n"
        "(--all-tables)\n"
    )


def test_the_summary_fits_one_screen_whatever_the_number_of_tasks_and_variables() -> None:
    tasks = [TaskInfo(f"/job:worker/task:{index}", "h:1", 0.5, 9.0, "stopped") for index in range(90)]
    tasks[70] = TaskInfo("/job:worker/task:70", "h:1", 0.5, 9.0, "killed by SIGKILL")
    variables = tuple(VariableInfo(f"v{n:02}", "float32", (n,), 4 * n, PS1) for n in range(90))
    progress = tuple(WorkerProgress(task.task, 1, 0.01, {"loss": 0.25}) for task in tasks)
    shown = closed(
        status(tasks=tuple(tasks), variables=variables, workers=progress, results={"accuracy": 0.9375}),
        closing=closing_summary,
    )
    lines = [line.rstrip() for line in shown.splitlines()]
    assert len(lines) < 24
    assert "Results: accuracy 0.9375" in lines
    assert "Steps: 60 of 100" in lines
    assert "Variables: 90, 16.0 kB; largest: v89 f32[89] 356 B on ps:1; v88 f32[88] 352 B on ps:1; ..." in lines
    assert lines[-1] == "(--all-tables)"
    rows = [line.split() for line in lines if "worker:" in line]
    assert " ".join(rows[0]) == "worker:70 0.5 s 9.0 s killed by SIGKILL 1 10.0 ms loss 0.25"
    assert len(rows) == 12
    assert [line.split() for line in lines if " more " in line] == [["78", "more", "78", "finished"]]


def test_the_summary_shows_earlier_processes_of_a_task_and_what_was_not_finite() -> None:
    again = (TaskInfo(WORKERS[0], "h:1", 0.5, 2.0, "killed"), TaskInfo(WORKERS[0], "h:1", 3.0))
    found = NotFinite(37, "loss", float("nan"), "run_0", WORKERS[0])
    shown = closed(status(tasks=again, not_finite=(found,)), closing=closing_summary)
    assert "Not finite: loss nan in run_0, first at step 37 on worker:0" in shown
    assert [line.split() for line in shown.splitlines() if line.startswith(" worker:0")] == [
        ["worker:0", "0.5", "s", "2.0", "s", "killed"],
        ["worker:0", "3.0", "s", "live", "40", "in", "all", "12.3", "ms", "loss", "0.5"],
    ]


def test_the_closing_tables_show_results_variables_and_edges() -> None:
    variables = (VariableInfo("conv1/kernel", "float32", (3, 3, 1, 16), 576, PS1),)
    counted = EdgeTraffic("w+9", PS0, WORKERS[0], 40, 5_000_000, messages=4)
    traffic = (counted, sent("v", PS0, WORKERS[0]))  # a task may count no messages
    text = closed(status(results={"test accuracy": 0.9375}, variables=variables, traffic=traffic))
    rows = [line.split() for line in text.splitlines()]
    assert ["test", "accuracy", "0.9375"] in rows
    assert ["conv1/kernel", "f32[3,3,1,16]", "576", "B", "ps:1"] in rows
    assert ["w+9", "ps:0", "->", "worker:0", "4", "40", "5.000"] in rows
    assert ["v", "ps:0", "->", "worker:0", "2", "0.000"] in rows


def test_tasks_say_what_their_parts_of_steps_cost_also_when_they_have_left() -> None:
    tasks = (TaskInfo(PS0, "h:1", 0.5, 9.0, "stopped"), TaskInfo(WORKERS[0], "h:2", 1.0))
    text = closed(status(tasks=tasks, costs=(PartCosts(PS0, 4000, 5.332, 19_200),), expected=(PS1,)))
    assert [line.rstrip() for line in text[text.index("Tasks") :].splitlines() if line.strip()] == [
        "Tasks",
        " task       joined    left   parts   processor   wake-ups   why",
        " ───────────────────────────────────────────────────────────────────",
        " ps:0        0.5 s   9.0 s    4000     1333 us        4.8   finished",
        " worker:0    1.0 s                                          live",
        " ps:1        never",
    ]
    assert "wake-ups" not in closed(status(tasks=tasks))


def test_tasks_say_when_they_left_and_why() -> None:
    tasks = (
        TaskInfo(PS0, "h:1", 0.5, 9.0, "stopped"),
        TaskInfo(WORKERS[0], "h:2", 1.0, 3.0, "connection reset"),
        TaskInfo(WORKERS[1], "h:3", 1.0, 8.0, "the other side closed the connection"),
        TaskInfo(WORKERS[2], "h:4", 1.0),
    )
    rows = closed(status(tasks=tasks, expected=(PS1,)), worker_0="killed by SIGKILL", worker_1="finished")
    lines = {line.split()[0]: line.strip() for line in rows[rows.index("Tasks") :].splitlines() if ":" in line}
    assert lines["ps:0"].endswith("finished")
    assert lines["worker:0"].endswith("3.0 s   killed by SIGKILL (connection reset)")
    assert lines["worker:1"].endswith("finished")
    assert lines["worker:2"].endswith("live")
    assert lines["ps:1"].endswith("never")


def test_output_to_a_file_is_plain_and_progress_comes_every_two_seconds() -> None:
    made, file = console()
    with launch_view(made, closing_summary) as view:
        assert isinstance(view, PlainView)
        view.show_line("worker:0", "[red]as it is[/red]")
        for tenth in range(20, 45):
            view.show_status(status(now_s=tenth / 10, steps_done=tenth), ())
        view.show_event("worker:0 ended")
        view.show_end(None, {})
    lines = file.getvalue().splitlines()
    assert lines[0] == "[worker:0] [red]as it is[/red]"
    assert len([line for line in lines if line.startswith("step ")]) == 2
    assert lines[-1] == "dflow: worker:0 ended"


def test_a_line_for_the_logs_alone_is_not_shown(tmp_path: Path) -> None:
    made, file = console()
    with launch_view(made, closing_summary) as shown, contextlib.closing(RunLogs(tmp_path)) as logs:
        view = LoggedView(shown, logs)
        view.show_line("coordinator", "of use")
        view.log_line("coordinator", "of no use now")
    assert file.getvalue() == "[coordinator] of use\n"
    assert logs.path("coordinator").read_text() == "of use\nof no use now\n"


def test_in_a_file_steps_are_told_when_there_are_more_and_every_half_minute() -> None:
    made, file = console()
    view = PlainView(made, closing_summary)
    for second in range(50):
        view.show_status(status(now_s=float(second), steps_done=max(second - 45, 0)), ())
    steps = [line.split()[1] for line in file.getvalue().splitlines()]
    assert steps == ["0/100", "0/100", "1/100", "3/100"]


def test_in_a_file_who_is_up_is_told_when_it_changes_and_every_half_minute() -> None:
    made, file = console()
    view = PlainView(made, closing_summary)
    for second in range(100):
        expected = (WORKERS[0],) if second < 10 else ()
        view.show_status(status(now_s=float(second), steps_total=0, expected=expected), ())
    times = [float(line.split()[0]) for line in file.getvalue().splitlines()]
    assert times == [2.0, 10.0, 40.0, 70.0]


PS, W0, W1, W2 = "/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1", "/job:worker/task:2"


def state(steps: int, step_s: float, *depths: ResourceDepth) -> TaskState:
    usage = TaskUsage(0.001 * steps, 0.002 * steps, 5 * steps, 2 * steps, 6 * steps, 100 * steps)
    return TaskState(steps, step_s, steps, 1, 2, 0, depths, usage)


def look(at_s: float, steps: int, sent: int, states: dict[str, TaskState]) -> Look:
    tasks = tuple(TaskInfo(task, "h:1", 0.0) for task in (PS, W0, W1, W2))
    health = (
        TaskHealth(PS, at_s - 0.5, steps, "", None),
        TaskHealth(W0, at_s - 0.5, steps, f"step {steps}", None),
        TaskHealth(W1, at_s - 0.5, 3, "step 4: waits for w", at_s - 70.0),
        TaskHealth(W2, at_s - 8.0, 3, "", None),
    )
    traffic = (EdgeTraffic("w", PS, W0, sent, 1000 * sent, messages=sent // 4),)
    workers = (WorkerProgress(W0, steps, 0.0, {}),)
    return Look(at_s, Status(at_s, tasks, (), workers, steps, 100, (), traffic, {}, health), states)


def text_of(view: Any) -> str:
    return printed(view, width=160)


def row(text: str, task: str) -> list[str]:
    return next(line for line in text.splitlines() if line.strip().startswith(task)).split()


def test_rates_are_those_between_two_looks() -> None:
    before = look(100.0, 10, 40, {PS: state(0, 0.0), W0: state(10, 0.01)})
    now = look(102.0, 30, 80, {PS: state(0, 0.0, ResourceDepth("ready", 3, 5)), W0: state(30, 0.02)})
    text = text_of(live_view(before, now))
    assert "step 30/100  10.0 steps/s" in text
    assert row(text, "worker:0")[:5] == ["worker:0", "live", "10.0", "20.0", "ms"]
    assert "ready 3/5" in text
    assert "Sent now: 20.0 kB/s" in text
    assert [line.split() for line in text.splitlines() if "ps:0 -> worker:0" in line] == [
        ["w", "ps:0", "->", "worker:0", "5.0", "20.0", "20.0", "kB/s"]
    ]


def test_what_a_part_costs_now_is_shown_for_each_task_that_says_so() -> None:
    before = look(100.0, 10, 40, {PS: replace(state(0, 0.0), usage=None), W0: state(10, 0.01)})
    now = look(102.0, 30, 80, {PS: replace(state(0, 0.0), usage=None), W0: state(30, 0.02)})
    text = text_of(live_view(before, now))
    assert row(text[text.index("A part of a step now") :], "worker:0") == [
        *("worker:0", "10.0", "3", "%", "1000", "us", "2000", "us", "5.0", "2.0", "6.0", "100", "B")
    ]
    assert "ps:0" not in text[text.index("A part of a step now") : text.index("Sent now")]
    assert "A part of a step now" not in text_of(live_view(look(1.0, 1, 0, {}), look(2.0, 1, 0, {})))


def test_a_task_that_is_stuck_or_silent_or_not_reached_is_told_so() -> None:
    at = look(100.0, 10, 0, {W1: state(3, 0.0), W2: state(3, 0.0)})
    text = text_of(live_view(at, at))
    assert "stalled for 70 s" in text
    assert "silent" in " ".join(row(text, "worker:2"))
    assert "8.0 s ago" in " ".join(row(text, "worker:2"))
    assert "not reached" in " ".join(row(text, "worker:0"))


def test_a_task_whose_connection_has_ended_is_away_and_not_silent() -> None:
    at = look(100.0, 10, 0, {})
    away = Look(at.at_s, replace(at.status, away=(W1, W2)), at.states)
    text = text_of(live_view(at, away))
    assert [row(text, task)[1] for task in ("worker:1", "worker:2")] == ["away", "away"]


def test_a_straggler_takes_more_than_half_as_long_again_as_the_median_of_its_job() -> None:
    states = {W0: state(9, 0.010), W1: state(9, 0.015), W2: state(9, 0.031), PS: state(0, 9.0)}
    assert list(stragglers(states)) == [W2]
    assert stragglers({W0: state(9, 0.010), W1: state(9, 0.0151)}).keys() == {W1}
    assert stragglers({W0: state(9, 0.010), W1: state(9, 0.015)}) == {}


def test_more_tasks_than_fit_are_counted_and_those_in_trouble_come_first() -> None:
    names = [f"/job:worker/task:{number}" for number in range(80)]
    tasks = tuple(TaskInfo(name, "h:1", 0.0) for name in names)
    health = tuple(TaskHealth(name, 100.0, 1, "", 10.0 if name == names[-1] else None) for name in names)
    status = Status(100.0, tasks, (), (), 0, 0, (), (), {}, health)
    at = Look(0.0, status, {name: state(1, 0.0) for name in names})
    text = text_of(live_view(at, at))
    assert "31 more" in text
    assert "stalled for 90 s" in text


def test_a_running_cluster_is_shown_once_or_until_it_is_interrupted() -> None:
    with memory_cluster(ps=1) as memory, closing(memory.worker()) as worker:
        with worker.parameter_servers():
            v = dflow.Variable(lambda: jnp.ones(4), name="v")
            queue = dflow.FIFOQueue(4, jnp.zeros(()), name="ready")
        queue.enqueue(jnp.float32(1))
        step = dflow.jit(lambda: v.read().sum())
        made, file = console(160)
        looks = 0

        def wait(seconds: float) -> None:
            nonlocal looks
            looks += 1
            step()
            if looks == 4:
                raise KeyboardInterrupt

        for watch in (False, True):
            show_status(memory.network, memory.coordinator.address, made, watch=watch, wait=wait)
    text = file.getvalue()
    assert looks == 4
    assert text.count("Variables: ") == 1
    assert "ready 1/4" in text
    assert "2 of 2 tasks are up" in text
