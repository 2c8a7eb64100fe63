"""The results of programs: values that they report, and evaluations and checkpoints of trainers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from dflow.distributed.coordinator.coordinator_events import Command
from dflow.distributed.coordinator.coordinator_part import CoordinatorCore, CoordinatorPart, Notices, Received, Requests
from dflow.distributed.training.work_messages import TrainingEvent
from dflow.distributed.wire.handler_table import HandlerTable
from dflow.distributed.wire.messages.basic import Ok
from dflow.distributed.wire.messages.status import Report

_RESULT = "result/"


class _Result(msgspec.Struct, frozen=True):
    value: float
    steps: int | None = None


class ReportedResults(CoordinatorPart):
    """The newest results of one cluster, by name, kept in its records."""

    requests: ClassVar[Requests[ReportedResults]] = HandlerTable()
    notices: ClassVar[Notices[ReportedResults]] = HandlerTable()
    may_be_lost = (_RESULT,)

    def __init__(self, core: CoordinatorCore) -> None:
        super().__init__(core)
        self._results = dict(core.records.load(_RESULT, _Result))

    @requests.handles(Report)
    def _report(self, report: Report, received: Received) -> Ok:
        self._put(report.name, _Result(report.value))
        return Ok()

    @notices.handles(TrainingEvent)
    def _note(self, told: TrainingEvent, received: Received) -> Sequence[Command]:
        for name, value in told.metrics.items():
            self._put(f"{told.kind}/{name}", _Result(value, told.steps))
        self._core.news.add(received.at_s, told.kind, told.task, told.text)
        return []

    def _put(self, name: str, result: _Result) -> None:
        self._results[name] = result
        self._core.records.put(_RESULT + name, result)

    def status(self) -> Mapping[str, Any]:
        """Return the results by name, and the numbers of steps after which evaluations and checkpoints were made."""
        return {
            "results": {name: result.value for name, result in self._results.items()},
            "result_steps": {name: result.steps for name, result in self._results.items() if result.steps is not None},
        }
