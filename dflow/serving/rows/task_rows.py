"""Rows of tables asked of the tasks that hold them, by messages that are no steps of the cluster.

Why no steps: a step waits for a dead task as long as training would, and training would wait for a slow server. A read
is one request to each task, over separate connections.

Invariants:
- a task that refuses connections is tried once in `RETRY_S`; requests meanwhile fail immediately, with its name;
- `changes` counts the times when rows that were read earlier may have ceased to be those of the tasks: a task was
  started again, or all tasks have returned to a snapshot.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.task.row_read_messages import ReadRows, RowRead, RowsRead
from dflow.distributed.transport.base import Handler, Peer, PendingReply, Transport
from dflow.distributed.wire.codec import decode_arrays, encode_arrays
from dflow.exporting.export_manifest import ExportManifest
from dflow.exporting.task_tables import array_type
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import DeadlineExceeded, DflowError, TaskLost, TransportClosed, VariableError
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.rows.id_rows import IdRows
from dflow.tracing.rows.slices import ArrayPart
from dflow.tracing.state.resources import Variable

#: Longest attempt to connect to a task, or to resume a connection that broke, in s.
DIAL_S = 1.0
#: Time between two attempts, in s.
RETRY_S = 1.0
#: Longest wait for the rows of a task that is connected, in s.
ANSWER_S = 5.0
#: Most rows that one message asks for.
MOST_ROWS = 1 << 16


@dataclass(frozen=True, eq=False)
class TableShard:
    """A table, or a shard of one, that functions of an export look rows up in.

    name     of the variable in the export
    part     what part of an array it is, as its variable says
    id_rows  how ids have rows in it; None for a shard that is asked for numbers of rows
    """

    name: str
    type: ArrayType
    part: ArrayPart | None
    id_rows: IdRows | None = None

    @property
    def table(self) -> str:
        """The name of the table."""
        return self.name if self.part is None or self.part.indices.axis else self.name.rpartition("/")[0]

    @property
    def numbering(self) -> tuple[int, int]:
        """The number in the table of its first row, and the step to the next."""
        if self.part is None or self.part.indices.axis:
            return 0, 1
        return self.part.indices.start, self.part.indices.step

    @property
    def rows_of_table(self) -> int:
        """The number of rows of the table."""
        return int(self.type.shape[0] if self.part is None else self.part.whole[0])


def shards_of(path: Path, manifest: ExportManifest, *, of_ids: bool) -> list[TableShard]:
    """Return the shards that the functions of the export at `path` look rows up in. Raises ExportError.

    of_ids  whether the tasks find the rows of ids
    """
    lookups = [one.lookups for one in manifest.signatures.values() if one.lookups is not None and not one.vjp_order]
    id_rows = {name: how for one in lookups for name, how in one.id_rows.items()} if of_ids else {}
    shards = []
    for name in dict.fromkeys(name for one in lookups for name in one.tables):
        entry = manifest.variables[name]
        part = None if entry.part is None else ArrayPart(tuple(entry.part.shape), entry.part.indices)
        shards.append(TableShard(name, array_type(path, entry.type), part, id_rows.get(name)))
    return shards


class Location(NamedTuple):
    """The task that holds a shard, its address and process, and the variable's name there."""

    task: str
    address: str
    process: str
    name: str


class TableLocations(ABC):
    """The tasks that hold some tables.

    is_lost  whether a task has lost rows of the tables, so that they must be loaded again
    """

    is_lost = False

    @abstractmethod
    def find(self, shard: TableShard) -> Location:
        """Return where a shard is. Raises TaskLost, with the reason, if no live task has it."""

    def explain(self, task: str) -> str:
        """Return what is known of a task that did not answer, as the end of an error, and look for news of it."""
        return ""


class TablesOfCluster(TableLocations):
    """Tables that variables of a cluster hold, such as those of an export that were loaded there.

    variables  by the name of the shard
    """

    def __init__(self, cluster: Cluster, variables: Mapping[str, Variable]) -> None:
        self._cluster, self._variables = cluster, variables

    def find(self, shard: TableShard) -> Location:
        """See `TableLocations`."""
        variable = self._variables[shard.name]
        task = str(variable.device)
        info = next((one for one in reversed(self._cluster.coordinator.session.roster.tasks) if one.task == task), None)
        if info is None or info.left_at_s is not None:
            self.is_lost = True
            raise TaskLost(f"{short_task_name(task)} has left: {'' if info is None else info.left}")
        return Location(task, info.address, info.process, variable.key)


class _Link:
    """The connection to one process of a task, which is opened when it is needed."""

    def __init__(self, transport: Transport, name: str, location: Location) -> None:
        self._transport, self._name, self._whole_name = transport, name, location.task
        self._task = short_task_name(location.task)
        self.address, self.process = location.address, location.process
        #: The newest number of returns to a snapshot that the task has reported.
        self.returns = 0
        self._dialling = threading.Lock()
        self._peer: Peer | None = None
        self._failed_s, self._why = -RETRY_S, ""

    def peer(self) -> Peer:
        """Return the open connection. Raises TaskLost after one attempt, or if one has failed a moment ago."""
        if (peer := self._peer) is not None and not peer.closed:
            return peer
        with self._dialling:
            if (peer := self._peer) is not None and not peer.closed:
                return peer
            if time.monotonic() < self._failed_s + RETRY_S:
                raise TaskLost(self._why)
            try:
                peer = self._transport.connect(
                    self.address,
                    name=self._name,
                    handler=Handler(),
                    who=self._task,
                    timeout_s=DIAL_S,
                    is_wanted=lambda: False,
                    resume_s=DIAL_S,
                )
            except (DflowError, OSError) as error:
                cause = error.__cause__
                is_refused = isinstance(cause, ConnectionRefusedError | FileNotFoundError | TransportClosed)
                why = "its process has ended" if is_refused else "it does not answer"
                if not isinstance(error, DeadlineExceeded):
                    why = str(error).partition("\n")[0]
                self._failed_s, self._why = time.monotonic(), f"{self._task} is not reached: {why}"
                raise TaskLost(self._why) from error
            if peer.name != self._whole_name:
                peer.close("another was wanted there")
                self._failed_s, self._why = time.monotonic(), f"{self._task} is not reached: its process has ended"
                raise TaskLost(self._why)
            self._peer = peer
            return peer

    def close(self, reason: str) -> None:
        """End the connection."""
        if self._peer is not None:
            self._peer.close(reason)


class _Asked(NamedTuple):
    link: _Link
    task: str
    shards: Sequence[TableShard]
    reply: PendingReply[RowsRead]


class TaskRows:
    """Reads rows of tables at `locations`, as `name` towards the tasks; thread-safe."""

    def __init__(self, transport: Transport, name: str, locations: TableLocations) -> None:
        self._transport, self._name, self.locations = transport, name, locations
        self._lock = threading.Lock()
        self._links: dict[str, _Link] = {}
        #: See the invariants of this file.
        self.changes = 0

    def read(self, asked: Mapping[TableShard, npt.NDArray[Any]]) -> dict[TableShard, npt.NDArray[Any]]:
        """Return the rows of each shard at numbers, i32[n], or those of ids, u32[n, 2].

        Raises TaskLost, which names the task, within `ANSWER_S`; immediately for one that is known not to answer.
        """
        pieces: dict[TableShard, list[npt.NDArray[Any]]] = {shard: [] for shard in asked}
        for first in range(0, max(map(len, asked.values()), default=0), MOST_ROWS):
            some = {shard: array[first : first + MOST_ROWS] for shard, array in asked.items()}
            for one in [self._ask(*one) for one in self._by_task({k: v for k, v in some.items() if len(v)})]:
                for shard, rows in zip(one.shards, self._answer(one), strict=True):
                    pieces[shard].append(rows)
        none = {shard: np.zeros((0, *shard.type.shape[1:]), shard.type.dtype) for shard in asked}
        return {shard: np.concatenate(several) if several else none[shard] for shard, several in pieces.items()}

    def close(self) -> None:
        """End the connections."""
        for link in self._links.values():
            link.close("the server needs no rows any more")

    def _by_task(
        self, asked: Mapping[TableShard, npt.NDArray[Any]]
    ) -> list[tuple[Location, list[tuple[str, TableShard, npt.NDArray[Any]]]]]:
        """Return the names, shards and numbers for each task, with a location there."""
        found: dict[str, tuple[Location, list[tuple[str, TableShard, npt.NDArray[Any]]]]] = {}
        for shard, array in asked.items():
            at = self.locations.find(shard)
            found.setdefault(at.task, (at, []))[1].append((at.name, shard, array))
        return [*found.values()]

    def _ask(self, at: Location, wanted: Sequence[tuple[str, TableShard, npt.NDArray[Any]]]) -> _Asked:
        reads = tuple(RowRead(name, str(shard.type), shard.id_rows) for name, shard, _ in wanted)
        infos, payload = encode_arrays([array for _, _, array in wanted])
        link = self._link(at)
        try:
            reply = link.peer().start(ReadRows(reads, infos), payload)
        except (TaskLost, TransportClosed) as error:
            raise self._lost(at.task, error) from error
        return _Asked(link, at.task, [shard for _, shard, _ in wanted], reply)

    def _answer(self, asked: _Asked) -> list[npt.NDArray[Any]]:
        try:
            message, payload = asked.reply.wait(ANSWER_S)
        except (DeadlineExceeded, TransportClosed) as error:
            asked.link.close("no answer came")
            raise self._lost(asked.task, error) from error
        except (TaskLost, VariableError) as error:
            self.locations.is_lost = True  # as the task was started again
            raise TaskLost(str(error)) from error
        if message.returns > asked.link.returns:
            with self._lock:
                asked.link.returns, self.changes = message.returns, self.changes + 1
        return decode_arrays(message.arrays, payload)

    def _link(self, at: Location) -> _Link:
        """Return the link to the present process of a task."""
        if (link := self._links.get(at.task)) is not None and (link.address, link.process) == (at.address, at.process):
            return link
        with self._lock:
            before = self._links.get(at.task)
            if before is not None and (before.address, before.process) == (at.address, at.process):
                return before
            link = self._links[at.task] = _Link(self._transport, self._name, at)
            self.changes += before is not None
        if before is not None:
            before.close("the task was started again")
        return link

    def _lost(self, task: str, error: DflowError) -> TaskLost:
        name = short_task_name(task)
        if isinstance(error, DeadlineExceeded):
            text = f"{name} did not answer within {ANSWER_S:g} s"
        else:
            text = str(error) if isinstance(error, TaskLost) else f"{name} is not reached: its connection has ended"
        return TaskLost(text + self.locations.explain(task))
