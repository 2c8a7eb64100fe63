"""Batches that tasks of another job read, and give to workers by their numbers.

Why by numbers, and not through a queue: which rows are in a batch then depends on its number alone. So a reader has no
state that could be lost, any reader can give any batch, and the position is that of the steps, which snapshots and
checkpoints have already.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import numpy as np

from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.task.arrivals import Answering, Arrival, Handled, RequestArrival, RequestTable, answer
from dflow.distributed.task.request_queues import RequestQueues
from dflow.distributed.task.task_part import TaskPart
from dflow.distributed.task.task_server import TaskServer
from dflow.distributed.training.batch_messages import BatchCount, CountBatches, GetBatch, ServedBatch
from dflow.distributed.transport.base import PendingReply
from dflow.distributed.wire.codec import decode_arrays, encode_arrays
from dflow.distributed.wire.handler_table import HandlerTable
from dflow.distributed.wire.messages.message import Message
from dflow.tracing.argument_ids import is_list_of_strings, with_string_ids
from dflow.tracing.devices.task_name import split_task_name, task_name
from dflow.tracing.errors import DflowError, InputError, TaskLost, TransportClosed
from dflow.tracing.path_names import leaf_names
from dflow.tracing.wide_ids import IntegerIds, StringIds, WideIds

#: Longest wait of a worker for a reader that serves the batches, in s.
SERVED_S = 120.0
#: Number of batches that a worker asks for ahead.
AHEAD = 4
#: Largest distance of two numbers that a worker asks for one after another and takes as its usual one.
_FARTHEST = 64
#: Time between two attempts to reach a reader, in s.
_AGAIN_S = 0.2
#: Kinds of ids in the structure of a batch; a plain array is 0.
_IDS: dict[str, type[WideIds]] = {"strings": StringIds, "integers": IntegerIds, "ids": WideIds}


class BatchReader(TaskPart):
    """Answers the requests for batches that this task serves; thread-safe.

    Batches may be slow to read, so their requests have queues of their own: other requests of a worker do not wait for
    them. A request for batches that are not served is refused immediately, and the worker asks again.
    """

    requests: ClassVar[RequestTable[BatchReader]] = RequestTable()
    notices: ClassVar[HandlerTable[BatchReader, Arrival, None]] = HandlerTable()

    def __init__(self, task: TaskServer) -> None:
        self._task = task
        self._served: dict[str, Any] = {}
        self._queues = RequestQueues(task.threads)

    def serve(self, name: str, batches: Any) -> None:
        """Serve batches by number under a name; they replace earlier ones of the name."""
        self._served[name] = batches

    def close(self, error: DflowError) -> None:
        """See `TaskPart`."""
        self._served.clear()
        self._queues.close()

    @requests.handles(GetBatch)
    def give(self, message: GetBatch, arrival: RequestArrival) -> None:
        """Answer with a batch, on a thread. Raises TaskLost if nothing is served under the name."""
        self._on_thread(partial(_given, self._batches(message.name)), message, arrival)

    @requests.handles(CountBatches)
    def count(self, message: CountBatches, arrival: RequestArrival) -> None:
        """Answer with the number of batches, on a thread. Raises TaskLost if nothing is served under the name."""
        self._on_thread(partial(_counted, self._batches(message.name)), message, arrival)

    def _on_thread(self, handle: Answering, message: Message, arrival: RequestArrival) -> None:
        check = self._task.member_gate.refuse_departed
        self._queues.submit(arrival.peer.name, answer, handle, message, arrival, check)

    def _batches(self, name: str) -> Any:
        if name in self._served:
            return self._served[name]
        raise TaskLost(
            f"{self._task.name}: expected batches under {name!r}, got none",
            "call dflow.data.serve(batches, cluster) in its program",
        )


def _given(batches: Any, message: GetBatch, arrival: RequestArrival) -> Handled:
    if message.number < 0:  # a list would give a batch from its end
        return ServedBatch("")
    try:
        batch = batches[message.number]
    except IndexError:
        return ServedBatch("")
    arrays: list[Any] = []
    form = json.dumps(_form(batch, arrays))
    infos, payload = encode_arrays(arrays)
    return ServedBatch(form, infos), payload


def _counted(batches: Any, message: CountBatches, arrival: RequestArrival) -> Handled:
    try:
        return BatchCount(len(batches))
    except TypeError:
        return BatchCount(None)


class ServedBatches:
    """Batches that tasks read for this worker: `batches[number]` and `len(batches)` are those of the tasks.

    Batches come as read-only arrays of NumPy, and their strings as ids. The next ones are asked for ahead. Batch
    `number` is asked of reader `number` modulo the number of readers; while that is down, of another one.

    Raises TaskLost if no reader serves them for 120 s, and the error of a reader.
    """

    def __init__(self, cluster: Cluster, readers: Sequence[str], name: str) -> None:
        self._cluster, self._readers, self._name = cluster, readers, name
        self._lock = threading.Lock()
        #: The requests for batches ahead, by number.
        self._ahead: OrderedDict[int, PendingReply[ServedBatch]] = OrderedDict()
        self._last, self._step = -1, 1

    def __len__(self) -> int:
        """Return the number of batches. Raises TypeError for batches without end."""
        asked = CountBatches(self._name)
        count: int | None = self._retried(0, lambda task: self._cluster.requests.begin(task, asked)).message.count
        if count is None:
            raise TypeError("batches without end have no len()")
        return count

    def __getitem__(self, number: int) -> Any:
        """Return the batch of a number. Raises IndexError after the last one."""
        with self._lock:
            begun = self._ahead.pop(number, None)
            self._ask_ahead(number)
        reply = None
        if begun is not None:
            with suppress(TaskLost, TransportClosed):
                reply = begun.wait(self._cluster.requests.timeout_s)
        if reply is None:
            reply = self._retried(number, lambda task: self._begin(number, task))
        if not reply.message.form:
            raise IndexError(f"a batch by its number: expected the number of a batch, got {number}")
        arrays = decode_arrays(reply.message.arrays, reply.payload)
        return _batch(json.loads(reply.message.form), iter(arrays))

    def _ask_ahead(self, number: int) -> None:
        """Ask for the batches that this worker takes next, if its numbers go on as before."""
        if 0 < number - self._last <= _FARTHEST:
            self._step = number - self._last
        self._last = number
        wanted = [number + self._step * each for each in range(1, AHEAD + 1)]
        for known in [known for known in self._ahead if known not in wanted]:
            del self._ahead[known]
        for one in wanted:
            if one not in self._ahead and (task := self._reader_of(one)) is not None:
                try:
                    self._ahead[one] = self._begin(one, task)
                except (TaskLost, TransportClosed):
                    return

    def _begin(self, number: int, task: str) -> PendingReply[ServedBatch]:
        return self._cluster.requests.begin(task, GetBatch(self._name, number))

    def _reader_of(self, number: int) -> str | None:
        """Return the reader to ask for a batch; None if none runs."""
        live = {*self._cluster.tasks}
        running = [task for task in self._readers if task in live]
        own = self._readers[number % len(self._readers)]
        return own if own in live else running[number % len(running)] if running else None

    def _retried(self, number: int, begin: Any) -> Any:
        """Return the reply of a reader. While readers are lost or do not serve yet, ask others, or wait for them."""
        until, why = time.monotonic() + SERVED_S, ""
        while True:
            task = self._reader_of(number)
            try:
                if task is not None:
                    return begin(task).wait(self._cluster.requests.timeout_s)
            except (TaskLost, TransportClosed) as error:
                why = f"; {error}"
            if time.monotonic() > until:
                raise TaskLost(
                    f"expected a reader of batches {self._name!r}, one of {[*self._readers]}, "
                    f"waited {SERVED_S:g} s{why}",
                    "start them again: dflow launch --restart reader=on-failure",
                )
            time.sleep(_AGAIN_S)


def served_batches(cluster: Cluster, job: str, name: str) -> ServedBatches | None:
    """Return the batches that the tasks of a job serve under a name; None if the cluster has no such job."""
    expected = {*cluster.coordinator.session.roster.expected, *cluster.tasks}
    readers = sorted(split_task_name(task)[1] for task in expected if split_task_name(task)[0] == job)
    if not readers:
        return None
    return ServedBatches(cluster, [task_name(job, index) for index in readers], name)


def batch_reader(cluster: Cluster) -> BatchReader:
    """Return the part of this task that serves batches."""
    return next(part for part in cluster.server.parts if isinstance(part, BatchReader))


def _form(batch: Any, arrays: list[Any]) -> Any:
    """Add the arrays of a batch to `arrays`; return its structure for JSON. A list of that begins with its type.

    Raises InputError for other values.
    """
    batch = with_string_ids(batch, lambda: leaf_names("serve: batch", batch, is_list_of_strings))
    if type(batch) is dict and all(isinstance(key, str) for key in batch):
        return {key: _form(part, arrays) for key, part in batch.items()}
    if type(batch) in (tuple, list):
        return [type(batch).__name__, *(_form(part, arrays) for part in batch)]
    if isinstance(batch, WideIds):
        arrays += [np.asarray(batch.high), np.asarray(batch.low)]
        return next(name for name, kind in _IDS.items() if type(batch) is kind)
    if isinstance(batch, np.ndarray | np.generic | int | float | bool):
        arrays.append(np.asarray(batch))
        return 0
    raise InputError(
        f"serve: expected batches of arrays in dicts by name and tuples, got a {type(batch).__name__}",
        "give dflow.data.batches of such elements",
    )


def _batch(form: Any, arrays: Any) -> Any:
    """Return the batch of a structure, whose arrays are next."""
    if isinstance(form, dict):
        return {key: _batch(part, arrays) for key, part in form.items()}
    if isinstance(form, list):
        parts = [_batch(part, arrays) for part in form[1:]]
        return tuple(parts) if form[0] == "tuple" else parts
    return next(arrays) if form == 0 else _IDS[form](next(arrays), next(arrays))
