"""The state of a cluster as JSON data for pages, and the values of its curves, from two looks.

Invariant: the data is bounded, however many tasks, edges and variables there are; `..._left_out` counts the others.
Tasks have their short names. A number that is not known is None.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from msgspec.structs import asdict

from dflow.dashboard.history import SeriesName, finite
from dflow.dashboard.looks import Condition, Look, condition, largest_first, part_use, stragglers, type_text
from dflow.dashboard.observing import live_tasks
from dflow.dashboard.traffic import grouped_traffic, recent_traffic
from dflow.distributed.coordinator.membership import NORMAL_ENDS
from dflow.distributed.wire.messages.observing import TaskState, TaskUsage
from dflow.distributed.wire.messages.roster import TaskInfo
from dflow.distributed.wire.messages.status import Status, TaskHealth, WorkerProgress
from dflow.tracing.devices.task_name import short_task_name, split_task_name

MOST_TASKS, MOST_EDGES, MOST_VARIABLES, MOST_QUEUES, MOST_METRICS = 1000, 100, 200, 20, 50
#: What is not known of a task that does not answer, and what it used if that is not known.
_LOAD = ("steps", "steps_per_s", "step_s", "parts", "parts_per_s", "running", "waiting", "held")
_USE = ("processor", "messages_per_s", "bytes_per_s", "python_us", "xla_us", "wakeups", "missed")

Data = dict[str, Any]


def cluster_json(before: Look | None, now: Look, steps_per_s: float, earlier: Look | None) -> Data:
    """Return the state at the look `now`; rates are None without one `before`.

    The rates of edges are since the look `earlier`, some seconds ago: their traffic comes with heartbeats, and
    a second may have none or two heartbeats.
    """
    status = now.status
    tasks, left_out = _tasks(before, now)
    return {
        "at_s": status.now_s,
        "steps": {"done": status.steps_done, "total": status.steps_total, "per_s": steps_per_s},
        "tasks": tasks,
        "tasks_left_out": left_out,
        "jobs": _jobs(tasks),
        **_edges(earlier, now),
        **_variables(status),
        "snapshot": None if status.snapshot is None else asdict(status.snapshot),
        "results": {name: finite(value) for name, value in status.results.items()},
        "not_finite": [
            {**asdict(one), "value": str(one.value), "task": short_task_name(one.task)} for one in status.not_finite
        ],
    }


def result_values(results: Mapping[str, float], names: Collection[str]) -> dict[SeriesName, float]:
    """Return the values of the curves of these results, such as evaluations'; NaN for one that is not finite."""
    return {SeriesName("", name): results[name] if math.isfinite(results[name]) else math.nan for name in names}


def curve_values(state: Data, reported: Collection[str]) -> dict[SeriesName, float]:
    """Return the new value of each curve but those of results, from the JSON data of a state.

    reported  short names of the workers that have reported steps since the last state. The metrics of the others are
              old: a worker that has died keeps its last ones.
    """
    found: dict[SeriesName, float] = {}

    def add(task: str, name: str, unit: str, value: float | None) -> None:
        if value is not None:
            found[SeriesName(task, name, unit)] = value

    if state["steps"]["done"]:
        add("", "steps/s", "1/s", state["steps"]["per_s"])
    rates = [task["bytes_per_s"] for task in state["tasks"] if task["bytes_per_s"] is not None]
    if rates:
        add("", "bytes/s", "B/s", sum(rates))
    # Metrics first: they are what a program reports, should there be more series than are kept.
    for task in state["tasks"]:
        for name, value in task["metrics"].items() if task["task"] in reported else ():
            add(task["task"], name, "", float("nan") if value is None else value)
    for task in state["tasks"]:
        if task["steps"]:
            add(task["task"], "steps/s", "1/s", task["steps_per_s"])
        add(task["task"], "processor", "cores", task["processor"])
        add(task["task"], "missed", "updates", task["missed"])
        for queue in task["queues"]:
            add(task["task"], f"queue {queue['name']}", "elements", queue["size"])
    return found


def is_over(status: Status, give_up_s: float) -> bool:
    """Whether the run has ended: tasks that started steps were there, none is now, and none is expected.

    Without any steps, the tasks that hold no variables count. A task that failed may be started again, so a failure
    ends the run only after the last step, or `give_up_s` seconds later.
    """
    holders = {variable.task for variable in status.variables}
    workers = {worker.task for worker in status.workers} or {info.task for info in status.tasks} - holders
    live = {info.task for info in status.tasks if info.left_at_s is None}
    if not workers or workers & live or status.expected:
        return False
    newest = {info.task: info for info in status.tasks if info.task in workers}
    failed_at_s = [info.left_at_s or 0.0 for info in newest.values() if info.left not in NORMAL_ENDS]
    is_done = status.steps_done >= status.steps_total > 0
    return is_done or all(status.now_s - at_s > give_up_s for at_s in failed_at_s)


def _tasks(before: Look | None, now: Look) -> tuple[list[Data], int]:
    status = now.status
    health = {each.task: each for each in status.health}
    progress = {each.task: each for each in status.workers}
    slow = stragglers(now.states)
    newest = {info.task: info for info in status.tasks}
    lives: dict[str, int] = {}
    for info in status.tasks:
        lives[info.task] = lives.get(info.task, 0) + 1
    live = {info.task for info in live_tasks(status)}
    shown = sorted(newest, key=lambda task: (task not in live, split_task_name(task)))[:MOST_TASKS]
    rows = []
    for task in shown:
        info = newest[task]
        found = condition(info, health.get(task), slow, now) if task in live else _ended(info)
        row = _task(info, found, lives[task] - 1)
        row |= _heard(status, health.get(task) if task in live else None)
        row |= _load(before, now, task)
        rows.append(row | _progress(progress.get(task)))
    for task in status.expected[: MOST_TASKS - len(rows)]:
        absent = TaskInfo(task, "", 0.0)
        row = _task(absent, Condition("expected", "warn", "has not joined yet"), 0) | {"joined_at_s": None}
        rows.append(row | _heard(status, None) | _load(None, now, task) | _progress(None))
    rows.sort(key=lambda row: (row["job"], row["index"]))
    return rows, len(newest) + len(status.expected) - len(rows)


def _ended(info: TaskInfo) -> Condition:
    if info.left in NORMAL_ENDS:
        return Condition("finished", "off", "finished")
    return Condition("left", "off", f"left: {info.left or 'no reason given'}")


def _task(info: TaskInfo, found: Condition, restarts: int) -> Data:
    job, index = split_task_name(info.task)
    return {
        "task": short_task_name(info.task),
        "job": job,
        "index": index,
        **found._asdict(),
        "address": info.address,
        "joined_at_s": info.joined_at_s,
        "left_at_s": info.left_at_s,
        "restarts": restarts,
    }


def _heard(status: Status, known: TaskHealth | None) -> Data:
    if known is None:
        return {"heard_s": None, "doing": ""}
    return {"heard_s": max(status.now_s - known.heard_at_s, 0.0), "doing": known.doing}


def _load(before: Look | None, now: Look, task: str) -> Data:
    state = now.states.get(task)
    if state is None:
        return {**dict.fromkeys((*_LOAD, *_USE)), "queues": [], "queues_left_out": 0}
    earlier = before.states.get(task) if before is not None else None
    took_s = now.at_s - before.at_s if before is not None else 0.0
    fullest = sorted(state.depths, key=lambda depth: -depth.size)[:MOST_QUEUES]
    return {
        "steps": state.steps,
        "steps_per_s": _rate(earlier, state, "steps", took_s),
        "step_s": state.step_s or None,
        "parts": state.parts,
        "parts_per_s": _rate(earlier, state, "parts", took_s),
        "running": state.running,
        "waiting": state.waiting,
        "held": state.held,
        "queues": [asdict(depth) for depth in fullest],
        "queues_left_out": len(state.depths) - len(fullest),
        **_use(part_use(earlier, state), took_s),
    }


def _rate(earlier: TaskState | None, state: TaskState, count: str, took_s: float) -> float | None:
    if earlier is None or took_s <= 0:
        return None
    return float(max(getattr(state, count) - getattr(earlier, count), 0) / took_s)


def _use(use: tuple[int, TaskUsage] | None, took_s: float) -> Data:
    """Return what the task used: per s, and per part that ended."""
    if use is None or took_s <= 0:
        return dict.fromkeys(_USE)
    parts, used = use
    return {
        "processor": (used.python_s + used.other_s) / took_s,
        "messages_per_s": used.messages / took_s,
        "bytes_per_s": used.size_bytes / took_s,
        "python_us": 1e6 * used.python_s / parts if parts else None,
        "xla_us": 1e6 * used.other_s / parts if parts else None,
        "wakeups": used.wakeups / parts if parts else None,
        "missed": used.missed / used.updates if used.updates > 0 else None,
    }


def _progress(worker: WorkerProgress | None) -> Data:
    if worker is None:
        return {"metrics": {}, "dropped": 0, "claimed": 0}
    metrics = list(worker.metrics.items())[:MOST_METRICS]
    return {
        "metrics": {name: finite(value) for name, value in metrics},
        "dropped": worker.dropped,
        "claimed": worker.held,
    }


def _jobs(tasks: list[Data]) -> Data:
    jobs: dict[str, Data] = {}
    for task in tasks:
        job = jobs.setdefault(task["job"], {"live": 0, "steps_per_s": 0.0})
        job["live"] += task["level"] != "off" and task["state"] != "expected"
        job["steps_per_s"] += task["steps_per_s"] or 0.0
    return jobs


def _edges(before: Look | None, now: Look) -> Data:
    rows = grouped_traffic(now.status.traffic)
    rates: Mapping[tuple[str, str, str], tuple[float, float]] = {}
    if before is not None and now.at_s > before.at_s:
        took_s = now.at_s - before.at_s
        rates = {
            row.key: (row.messages / took_s, row.size_bytes / took_s)
            for row in grouped_traffic(recent_traffic(before.status, now.status))
        }
    shown = []
    for row in rows[:MOST_EDGES]:
        unknown = (0.0, 0.0) if before is not None else (None, None)
        messages, size = rates.get(row.key, unknown)
        shown.append({**asdict(row), "messages_per_s": messages, "bytes_per_s": size})
    return {
        "edges": shown,
        "edges_left_out": len(rows) - len(shown),
        "sent_bytes": sum(row.size_bytes for row in rows),
    }


def _variables(status: Status) -> Data:
    largest = largest_first(status.variables)
    shown = [
        {
            "name": info.name,
            "type": type_text(info),
            "size_bytes": info.size_bytes,
            "task": short_task_name(info.task),
            "kind": info.kind,
        }
        for info in largest[:MOST_VARIABLES]
    ]
    return {
        "variables": shown,
        "variables_left_out": len(largest) - len(shown),
        "variables_bytes": sum(info.size_bytes for info in largest),
    }
