"""What the dashboard knows of a run: its last state, its curves and its events; a state machine without I/O.

Looks at the cluster and failures to take one go in, and updates for the pages come out. Times come with the calls.
Invariants: memory is bounded; after a failure the last state stays, with the phase that tells why it is old.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

from dflow.dashboard.cluster_json import cluster_json, curve_values, is_over, result_values
from dflow.dashboard.history import History, SeriesName
from dflow.dashboard.looks import RATE_WINDOW_S, Look, StepRate, steps_worked
from dflow.distributed.wire.messages.status import ClusterEvents, Status
from dflow.tracing.devices.task_name import short_task_name

MOST_EVENTS = 500
#: Most looks that are kept for the rates of edges.
MOST_RECENT = 8
#: After this time without an answer of the coordinator, or after the failure of all workers, in s, the run has ended.
GIVE_UP_S = 60.0
ENDED = "the run has ended; its last state is shown"
#: Kinds of events that a coordinator tells again after its restart.
_OF_MEMBERS = ("joined", "restarted", "left", "finished")

Data = dict[str, Any]
#: JSON data for all pages, after its name: state, points, news or timeline.
PageUpdate = tuple[str, Data]


class DashboardRecord:
    """The record of the cluster whose coordinator is at the address `coordinator`."""

    def __init__(self, coordinator: str) -> None:
        self._coordinator = coordinator
        self._begin()

    def _begin(self) -> None:
        self.history = History()
        self._rate = StepRate()
        self._look: Look | None = None
        #: The last looks of `RATE_WINDOW_S` seconds, the oldest first.
        self._recent: deque[Look] = deque(maxlen=MOST_RECENT)
        self._cluster: Data = {}
        self._wall_s: float | None = None
        #: While the coordinator does not answer: since when, the time of the last try, and its error.
        self._failed_since_s: float | None = None
        self._now_s, self._why = 0.0, ""
        self._events: deque[Data] = deque(maxlen=MOST_EVENTS)
        self._newest = 0
        self._snapshot: int | None = None
        #: Number of the coordinator's newest event that was seen, and the start of the coordinator that it is of.
        self.seen_event, self.seen_start = 0, ""

    def seen(self, look: Look, told: ClusterEvents, *, wall_s: float) -> list[PageUpdate]:
        """Record a look, and the coordinator's events since the last one; `wall_s` is the Unix time."""
        if self.seen_start and told.start.partition("/")[0] != self._run():
            newest = self._newest
            self._begin()
            self._newest = newest
        status, is_restarted = look.status, self.seen_start not in ("", told.start)
        news = self._news_of(told)
        if is_restarted:
            news.append(self._event(status.now_s, "log", "", "the coordinator has been started again"))
        if self._failed_since_s is not None:
            news.append(self._event(status.now_s, "answers", "", "the coordinator answers again"))
        if status.snapshot is not None and status.snapshot.number != self._snapshot:
            if self._look is not None:
                news.append(self._event(status.now_s, "snapshot", "", f"snapshot {status.snapshot.number} is complete"))
            self._snapshot = status.snapshot.number
        if is_over(status, GIVE_UP_S) and not self._is_over():
            news.append(self._event(status.now_s, "ended", "", "the run has ended"))
        self._failed_since_s, self._why = None, ""
        while len(self._recent) > 1 and look.at_s - self._recent[1].at_s >= RATE_WINDOW_S:
            self._recent.popleft()
        rate = self._rate.add(status.now_s, status.steps_done, steps_worked(status))
        earlier = {} if self._look is None else {worker.task: worker.steps for worker in self._look.status.workers}
        reported = {short_task_name(one.task) for one in status.workers if one.steps != earlier.get(one.task)}
        results = _new_results(None if self._look is None else self._look.status, status)
        self._cluster = cluster_json(self._look, look, rate, self._recent[0] if self._recent else None)
        self._recent.append(look)
        self._look, self._wall_s = look, wall_s
        curves: dict[int, dict[SeriesName, float]] = {}
        for name, value in result_values(status.results, results).items():
            curves.setdefault(status.result_steps.get(name.name, status.steps_done), {})[name] = value
        curves.setdefault(status.steps_done, {}).update(curve_values(self._cluster, reported))
        return [*self._told(news), *(self._points(status.now_s, *each) for each in curves.items())]

    def _points(self, at_s: float, step: int, values: Mapping[SeriesName, float]) -> PageUpdate:
        """Add points to the curves, after this number of steps."""
        kept = self.history.add(at_s, step, values)
        return "points", {"run": self._run(), "at_s": at_s, "step": step, "values": kept}

    def failed(self, why: str, *, now_s: float) -> list[PageUpdate]:
        """Record that no look could be taken at the time `now_s` of any clock that does not go back."""
        news = []
        if self._failed_since_s is None:
            self._failed_since_s = now_s
            if self._look is not None:
                news.append(self._event(self._look.status.now_s, "silent", "", "the coordinator does not answer"))
        self._now_s, self._why = now_s, why
        return self._told(news)

    def state(self) -> Data:
        """Return the JSON data of the last state, with the phase of the run.

        `run` names the run, as in the points: another one means that the curves and tables begin again. Empty before
        the first look.
        """
        phase, text = self._phase()
        head: Data = {
            "phase": phase,
            "phase_text": text,
            "coordinator": self._coordinator,
            "run": self._run(),
            "wall_s": self._wall_s,
            "newest_event": self._newest,
        }
        return head | (self._cluster or {"at_s": None})

    def events(self, since: int) -> Data:
        kept = [event for event in self._events if event["number"] > since]
        lost = max(self._newest - max(since, 0) - len(kept), 0)
        return {"events": kept, "newest": self._newest, "lost": lost}

    def _phase(self) -> tuple[str, str]:
        over = self._is_over()
        if self._failed_since_s is None:
            return ("ended", ENDED) if over else ("running" if self._look is not None else "connecting", "")
        silent_s = self._now_s - self._failed_since_s
        if self._look is None:
            return "connecting", f"no answer of the coordinator at {self._coordinator} yet: {self._why}"
        status = self._look.status
        # A launch ends its processes right after the last step, maybe between two looks.
        if over or status.steps_done >= status.steps_total > 0:
            return "ended", ENDED
        if silent_s > GIVE_UP_S:
            return "ended", f"the coordinator has not answered for {silent_s:.0f} s, so the run has probably ended"
        return "unreachable", f"the coordinator has not answered for {silent_s:.0f} s; its last state is shown"

    def _run(self) -> str:
        """Return the identity of the run, which stays when the coordinator is started again."""
        return self.seen_start.partition("/")[0]

    def _is_over(self) -> bool:
        return self._look is not None and is_over(self._look.status, GIVE_UP_S)

    def _news_of(self, told: ClusterEvents) -> list[Data]:
        known = {(event["kind"], event["task"], event["at_s"]) for event in self._events}
        news = []
        for event in told.events:
            task = short_task_name(event.task) if event.task else ""
            if event.kind not in _OF_MEMBERS or (event.kind, task, event.at_s) not in known:
                news.append(self._event(event.at_s, event.kind, task, event.text))
        self.seen_event, self.seen_start = told.newest, told.start
        return news

    def _event(self, at_s: float, kind: str, task: str, text: str) -> Data:
        self._newest += 1
        event = {"number": self._newest, "at_s": at_s, "kind": kind, "task": task, "text": text}
        self._events.append(event)
        return event

    def _told(self, news: Collection[Data]) -> list[PageUpdate]:
        return [("state", self.state()), *([("news", {"events": [*news]})] if news else [])]


def _new_results(before: Status | None, now: Status) -> list[str]:
    """Return the names of the results that are new: they have another value, or come after another step."""
    known = {} if before is None else dict(_told_results(before))
    return [name for name, told in _told_results(now) if known.get(name) != told]


def _told_results(status: Status) -> list[tuple[str, tuple[str, int | None]]]:
    # As texts, since NaN differs from itself.
    return [(name, (repr(value), status.result_steps.get(name))) for name, value in status.results.items()]
