"""Compare the workers of one run: the variables that their steps write, and their optimizers' settings.

Why: parameter tasks identify a variable by its name. Workers that use other names would train separate models, and each
of them would do its part of the steps without an error.

Invariants:
- the first description of a run and key counts, as long as a worker that sent it is live or has ended normally. A
  worker may send several, for functions of one name; the other workers must then send the same ones;
- when a description differs, its sender and all later senders get an error with both sides, and all live tasks are
  notified;
- a run without such a worker is forgotten, so that corrected programs may use its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import ClassVar, TypeVar

from dflow.distributed.coordinator.coordinator_events import Broadcast, Command, SendReply
from dflow.distributed.coordinator.coordinator_part import CoordinatorCore, CoordinatorPart, Received, Requests
from dflow.distributed.coordinator.membership import NORMAL_ENDS, ReleaseTask
from dflow.distributed.training.work_messages import CompareStep, RunRefused, StepCompared
from dflow.distributed.wire.handler_table import HandlerTable
from dflow.distributed.wire.messages.basic import Failure
from dflow.tracing.devices.task_name import short_task_name

#: Runs, and keys of each run, that are kept at most; the one compared longest ago is dropped.
KEPT_RUNS, KEPT_KEYS = 64, 1024
T = TypeVar("T")
_REMEDY = (
    "make the same variables, with the same names, and the same optimizers on all workers of a run, and start them "
    "again, or give the run another name"
)


@dataclass
class _Described:
    """The description of a step, and the tasks that sent it."""

    digest: str
    items: tuple[str, ...]
    tasks: dict[str, None]


@dataclass
class _Run:
    """The descriptions of a run's steps by key, and its tasks; `refusal` says what differs, empty if nothing does."""

    by_key: dict[str, list[_Described]] = field(default_factory=dict)
    tasks: dict[str, None] = field(default_factory=dict)
    refusal: str = ""


class StepComparisons(CoordinatorPart):
    """Compares the steps of the workers of each run, by the descriptions of those compared last."""

    requests: ClassVar[Requests[StepComparisons]] = HandlerTable()

    def __init__(self, core: CoordinatorCore) -> None:
        super().__init__(core)
        self._runs: dict[str, _Run] = {}

    @requests.handles(CompareStep)
    def compare(self, request: CompareStep, received: Received) -> Sequence[Command]:
        """Compare a worker's description with the known ones, record it, and answer.

        Answers that it is not known if only its digest was sent and is new. If it differs, refuses it and all later
        ones of the run, and notifies all live tasks.
        """
        ask = received.ask
        run = _recent(self._runs, request.run, _Run, KEPT_RUNS)
        run.tasks[request.task] = None
        if run.refusal:
            return [SendReply(ask, Failure("StrategyError", run.refusal))]
        known = _recent(run.by_key, request.key, list[_Described], KEPT_KEYS)
        equal = next((one for one in known if one.digest == request.digest), None)
        if equal is not None:
            equal.tasks[request.task] = None
            return [SendReply(ask, StepCompared(True))]
        if not request.items:
            return [SendReply(ask, StepCompared(False))]
        if not known or any(request.task in one.tasks for one in known):
            known.append(_Described(request.digest, request.items, {request.task: None}))
            return [SendReply(ask, StepCompared(True))]
        run.refusal = _difference(known[0], request)
        told = Broadcast(self._core.members.live_peers(), RunRefused(request.run, run.refusal))
        return [SendReply(ask, Failure("StrategyError", run.refusal)), told]

    def on_leave(self, left: Sequence[ReleaseTask], at_s: float) -> Sequence[Command]:
        """Forget the descriptions that only failed tasks have sent, and the runs of which no other task is left."""
        for task in [one.task for one in left if one.reason not in NORMAL_ENDS]:
            for name, run in [*self._runs.items()]:
                run.tasks.pop(task, None)
                for described in run.by_key.values():
                    for one in described:
                        one.tasks.pop(task, None)
                    described[:] = [one for one in described if one.tasks]
                if not run.tasks:
                    del self._runs[name]
        return []


def _recent(kept: dict[str, T], key: str, make: Callable[[], T], most: int) -> T:
    """Return the value of a key, made if there is none, and drop the least recently used ones beyond `most`."""
    value = kept.pop(key, None)
    kept[key] = found = make() if value is None else value
    while len(kept) > most:
        del kept[next(iter(kept))]
    return found


def _difference(known: _Described, request: CompareStep) -> str:
    pairs = zip_longest(known.items, request.items, fillvalue="nothing more")
    first, second = next(((one, other) for one, other in pairs if one != other), ("", ""))
    sides = sorted([(next(iter(known.tasks)), first), (request.task, second)])
    described = "".join(f"\n    {short_task_name(task)}: {item}" for task, item in sides)
    return f"run {request.run!r}: expected steps that write the same on all workers, got{described}\n  {_REMEDY}"
