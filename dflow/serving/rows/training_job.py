"""The tables of a running training job, as a server sees them that is no task of it.

Why no task: the coordinator counts tasks. A member takes part in pauses of the steps, in snapshots and in the end of
the job, so a slow server would delay them. This one asks the coordinator what `dflow status` asks, and the tasks for
rows.

Invariant: a background thread asks the coordinator, every `LOOK_S` and when a task does not answer. So no request waits
for the coordinator, and requests are answered without a coordinator while the tasks answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Mapping
from types import TracebackType

import numpy as np

from dflow.distributed.client.coordinator_client import CoordinatorClient
from dflow.distributed.client.coordinator_session import SessionSettings
from dflow.distributed.coordinator.membership import NORMAL_ENDS
from dflow.distributed.transport.base import Transport
from dflow.distributed.wire.messages.roster import TaskInfo
from dflow.distributed.wire.messages.status import GetStatus, Status, VariableInfo
from dflow.serving.rows.task_rows import Location, TableLocations, TableShard, TaskRows
from dflow.tables.vocabulary import EVICTIONS, Vocabulary
from dflow.tracing.devices.task_name import short_task_name, split_task_name
from dflow.tracing.errors import DeadlineExceeded, DflowError, ExportError, TaskLost
from dflow.tracing.ir.types import ArrayType

#: Time between two questions to the coordinator, and longest wait for its answer, in s.
LOOK_S = 2.0
#: Longest wait for a job that starts to make the tables of an export, and after that for one that lost them, in s.
START_S, AGAIN_S = 60.0, 5.0
#: Shortest time between two looks, in s.
_AGAIN_S = 0.2
#: Jobs whose tasks do not train.
_NOT_TRAINING = frozenset({"ps", "server"})
#: Connects again after any outage.
_SESSION = SessionSettings(give_up_s=1e9)


class TrainingJob(TableLocations):
    """The job whose coordinator is at `address`. As a context manager it ends its connections.

    name    of this process towards the job; its certificate is for this name
    raises  DeadlineExceeded if the coordinator does not answer within `timeout_s`
    """

    def __init__(self, address: str, transport: Transport, *, name: str, timeout_s: float = START_S) -> None:
        self.address, self.transport, self.name = address, transport, name
        self._client = CoordinatorClient(transport, address, name=name, timeout_s=timeout_s, settings=_SESSION)
        self._until_s = time.monotonic() + START_S
        self._look_now, self._is_closed = threading.Event(), False
        try:
            self._see(self._client.ask(GetStatus(), timeout_s))
        except BaseException:
            self._client.close()
            raise
        self._thread = threading.Thread(target=self._watch, name="dflow serve job", daemon=True)
        self._thread.start()

    def __enter__(self) -> TrainingJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection to the coordinator; a second call does nothing."""
        self._is_closed = True
        self._look_now.set()
        self._client.close()

    def trains(self, names: Collection[str]) -> bool:
        """Whether tasks of the cluster train, or variables of these names are there."""
        jobs = {split_task_name(task)[0] for task in (*self._live, *self._left, *self._expected)}
        return bool(jobs - _NOT_TRAINING) or any(name in self._variables for name in names)

    def rows(self, shards: Collection[TableShard]) -> TaskRows:
        """Return a reader of these tables, when they are there and as the export has them.

        Raises ExportError, with both, for a table that differs, and DeadlineExceeded for one that is not made.
        """
        reader = TaskRows(self.transport, self.name, self)
        until_s = max(self._until_s, time.monotonic() + AGAIN_S)
        try:
            while True:
                try:
                    self._check(shards, reader)
                except TaskLost as error:
                    if time.monotonic() >= until_s:
                        text = f"the job at {self.address} does not give the tables of the export: {error}"
                        raise DeadlineExceeded(text) from error
                else:
                    return reader
                self._look_now.set()
                time.sleep(_AGAIN_S)
        except BaseException:
            reader.close()
            raise

    def find(self, shard: TableShard) -> Location:
        """See `TableLocations`."""
        info = self._variables.get(shard.name)
        if info is None:
            raise TaskLost(f"the job at {self.address} has no variable {shard.name!r} now{self._ended()}")
        if refusal := self._refusal(shard, info):
            raise TaskLost(refusal)
        task, name = self._live.get(info.task), short_task_name(info.task)
        if task is None:
            left = self._left.get(info.task)
            raise TaskLost(f"{name} has left: {'' if left is None else left.left}{self._ended()}")
        if info.process not in ("", task.process):
            raise TaskLost(f"{name} was started again, and {shard.name!r} is not restored yet")
        return Location(info.task, task.address, task.process, shard.name)

    def explain(self, task: str) -> str:
        """See `TableLocations`."""
        self._look_now.set()
        return self._ended()

    def _refusal(self, shard: TableShard, info: VariableInfo) -> str:
        """Return why a variable is not the one of the export, or an empty text."""
        wanted = shard.type.dtype.name, shard.type.shape
        if (info.kind, info.dtype, info.shape) == ("variable", *wanted):
            return ""
        given = f"{info.dtype}{[*info.shape]}" if info.kind == "variable" else f"a {info.kind}"
        return (
            f"table {shard.table!r}: expected {shard.name!r} of {wanted[0]}{[*wanted[1]]}, as exported, got {given} at "
            f"the job at {self.address}"
        )

    def _check(self, shards: Collection[TableShard], reader: TaskRows) -> None:
        for shard in shards:
            if (info := self._variables.get(shard.name)) and (refusal := self._refusal(shard, info)):
                raise ExportError(refusal, "export again from this job")
        first = {shard.table: shard for shard in reversed([*shards])}
        for table, shard in first.items():
            self._check_vocabulary(table, shard, reader)
        none = np.zeros((1, 2), np.uint32), np.zeros(1, np.int32)
        reader.read({shard: none[shard.id_rows is None] for shard in shards})

    def _check_vocabulary(self, table: str, shard: TableShard, reader: TaskRows) -> None:
        """Raise ExportError unless the table has a vocabulary in the job if the export says so, with its settings."""
        self.find(shard)  # raises for a table that is not made yet
        record = TableShard(f"{table}/vocabulary", ArrayType(np.dtype(np.uint32), (4,)), None)
        there: list[int] | None = None
        if record.name in self._variables:
            there = reader.read({record: np.arange(4, dtype=np.int32)})[record].tolist()
        exported = None if shard.id_rows is None else [*shard.id_rows.settings]
        if there != exported:
            raise ExportError(
                f"table {table!r}: expected {_settings(exported)}, as exported, got {_settings(there)} at the job at "
                f"{self.address}",
                "export again from this job",
            )

    def _ended(self) -> str:
        """Return the end of an error: whether the job has ended, as far as is known."""
        workers = {task for task in (*self._live, *self._left, *self._expected) if _trains(task)}
        if workers and all(task in self._left and self._left[task].left in NORMAL_ENDS for task in workers):
            return "; the job has ended"
        return "; the job has ended, or its coordinator is away" if self._is_away else ""

    def _watch(self) -> None:
        while not self._is_closed:
            self._look_now.wait(LOOK_S)
            self._look_now.clear()
            try:
                self._see(self._client.ask(GetStatus(), LOOK_S))
            except DflowError:
                self._is_away = True
            time.sleep(_AGAIN_S)  # each request that fails asks for a look

    def _see(self, status: Status) -> None:
        self._variables: Mapping[str, VariableInfo] = {info.name: info for info in status.variables}
        newest = _newest(status.tasks)
        self._live = {task: info for task, info in newest.items() if info.left_at_s is None}
        self._left = {task: info for task, info in newest.items() if info.left_at_s is not None}
        #: The tasks that are expected, and whether the coordinator did not answer since.
        self._expected, self._is_away = status.expected, False


def _newest(tasks: Iterable[TaskInfo]) -> dict[str, TaskInfo]:
    """Return the newest life of each task."""
    return {info.task: info for info in sorted(tasks, key=lambda info: info.life)}


def _trains(task: str) -> bool:
    return split_task_name(task)[0] not in _NOT_TRAINING


def _settings(numbers: list[int] | None) -> str:
    if numbers is None:
        return "no vocabulary"
    evict, admit_after, bucket, expire_after = numbers
    return str(Vocabulary(EVICTIONS[evict], admit_after, bucket, expire_after or None))
