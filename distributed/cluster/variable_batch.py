"""Creation of many variables of parameter servers together: one request to the coordinator, then few to each task.

Why: a request and its answer take longer than creating a small variable. Variables made within one
`parameter_servers()` are created when the block ends, or when one of them is used, whichever is first.

Invariants: tasks are first asked which variables they have, so that a process that joins late computes and sends
nothing; a variable that a task cannot create does not prevent any other; each use of a variable that is not created
tries again.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from dflow.distributed.cluster.outgoing_requests import OutgoingRequests
from dflow.distributed.steps.retries import MOST_FAILURES, RETRY_S
from dflow.distributed.steps.step_gate import is_in_step
from dflow.distributed.wire.codec import KEYS, Payload, dtype_name, encode_arrays
from dflow.distributed.wire.failures import error_of
from dflow.distributed.wire.messages.basic import Failure
from dflow.distributed.wire.messages.placement import Placed, PlaceVariable
from dflow.distributed.wire.messages.variables import (
    CreateVariable,
    CreateVariables,
    StoredArray,
    VariableLayout,
    VariablesCreated,
)
from dflow.lowering.programs.initial_ops import Exports, InitialOps, Recipe
from dflow.lowering.values.stored_value import StoredValue
from dflow.tracing.context_values import within
from dflow.tracing.errors import DflowError, TaskLost
from dflow.tracing.moments import reach
from dflow.tracing.source import at
from dflow.tracing.state.initial_value import TypedInitial
from dflow.tracing.state.resources import Variable
from dflow.tracing.weak_by_identity import WeakDict

#: Most variables, and most bytes of values, that one message creates.
MOST_VARIABLES = 256
MOST_BYTES = 16 << 20
#: A batch with more bytes than this to send is created before its block ends.
FULL_BYTES = 64 << 20
#: A value on the host. Keys are a `jax.Array`, for NumPy has no dtype of keys.
HostArray = npt.NDArray[Any] | jax.Array


def on_host(value: jax.Array) -> HostArray:
    """Return the value on the host; keys as they are."""
    return value if dtype_name(value.dtype) in KEYS else np.asarray(value)


_NOT_PLACED = Placed("")


@dataclass(eq=False)
class PendingVariable:
    """A variable to create on a task of `job`, or on the task of `near`; `first` returns or is its initial value.

    `on`      the task that must hold it; empty for any
    `layout`  how it is spread over the devices of the task
    `placed`  the coordinator's answer; empty before it
    """

    variable: Variable
    job: str
    near: Variable | None
    first: TypedInitial | HostArray
    on: str
    layout: VariableLayout | None
    placed: Placed = _NOT_PLACED

    @property
    def ops(self) -> InitialOps | None:
        """The ops that make the initial value on its task; None if the value is sent there."""
        return self.first if isinstance(self.first, InitialOps) and self.first.are_sent else None

    @property
    def size_bytes(self) -> int:
        """Bytes kept in memory until it is created, or sent then."""
        if isinstance(self.first, StoredValue):
            return 0
        return (self.variable.type if self.ops is None else self.ops).size_bytes

    def placing(self) -> PlaceVariable:
        """Return the request for its task."""
        type = self.variable.type
        return PlaceVariable(
            self.variable.name, dtype_name(type.dtype), type.shape, type.size_bytes, self.job, self._near, on=self.on
        )

    def asked(self) -> CreateVariable:
        """Return the request without an initial value, which finds out if the variable exists."""
        type, limit = self.variable.type, self.variable.memory_limit
        return CreateVariable(
            self.variable.name,
            dtype_name(type.dtype),
            type.shape,
            process=self.placed.process,
            layout=self.layout,
            near=self._near,
            memory=None if limit is None else (limit[0].name, limit[1]),
        )

    @property
    def _near(self) -> str:
        return self.near.name if self.near is not None else ""

    def value(self, computed: dict[int, HostArray]) -> HostArray:
        """Return the initial value. Results of initialisers are cached in `computed`, by the initialiser's identity."""
        if not isinstance(self.first, TypedInitial):
            return self.first
        try:
            if id(self.first) not in computed:
                computed[id(self.first)] = on_host(jnp.asarray(self.first(), self.variable.dtype))
            return computed[id(self.first)]
        except Exception as error:
            error.add_note(f"in the initialiser of variable {self.variable.name!r}{at(self.variable.loc)}")
            raise


class VariableBatch:
    """Variables that are created together on the tasks of one cluster; thread-safe."""

    def __init__(self, requests: OutgoingRequests) -> None:
        self.requests = requests
        self._lock = threading.RLock()
        self._wanted: list[PendingVariable] = []
        self._size_bytes = 0
        self._failed: dict[Variable, PendingVariable] = {}

    def add(self, wanted: PendingVariable) -> None:
        """Add a variable; create the whole batch now if it is full."""
        with self._lock:
            self._wanted.append(wanted)
            _batches[wanted.variable] = self
            self._size_bytes += wanted.size_bytes
            is_full = self._size_bytes > FULL_BYTES
        if is_full:
            self.create()

    def create(self, again: Collection[Variable] = ()) -> None:
        """Create the variables that are not created yet, and those of `again` that have failed before.

        Those of a lost task are tried again once all tasks have returned to a snapshot.
        raises  the error of the first that fails, with its line
        """
        failed: dict[Variable, DflowError] = {}
        for failures in range(MOST_FAILURES + 1):
            with self._lock:
                self._wanted += [self._failed.pop(variable) for variable in again if variable in self._failed]
                tried = {*map(id, again)}  # by identity: a variable equals another one by value
                others = {variable: error for variable, error in failed.items() if id(variable) not in tried}
                failed = others | self._tried()
            again = [variable for variable, error in failed.items() if isinstance(error, TaskLost)]
            # Not with the lock: a step may need it, and the return waits for the step.
            if not again or failures == MOST_FAILURES or not self._is_recovered(failures):
                break
        for variable, error in failed.items():
            raise type(error)(f"{error}{at(variable.loc)}") from None

    def _tried(self) -> dict[Variable, DflowError]:
        """Create the variables added since the last attempt; return the errors by failed variable."""
        wanted, self._wanted, self._size_bytes = self._wanted, [], 0
        try:
            return _Creation(self.requests).create(wanted)
        finally:
            # Also after an error: the next use of a variable without a location creates it.
            self._failed.update((each.variable, each) for each in wanted if "device" not in vars(each.variable))

    def _is_recovered(self, failures: int) -> bool:
        """Wait until no state of tasks is lost; return whether that is so. Within a step, return false immediately."""
        if is_in_step():
            return False
        try:
            self.requests.await_recovery()
        except DflowError:  # there is no snapshot, or it cannot be restored
            return False
        time.sleep(RETRY_S * failures)  # the coordinator may not know of the loss yet
        return True


_batches: WeakDict[Variable, VariableBatch] = WeakDict()
_current: ContextVar[VariableBatch | None] = ContextVar("dflow_variable_batch", default=None)


@contextmanager
def created_together(requests: OutgoingRequests) -> Iterator[None]:
    """Return a context that creates the variables made inside together, at the latest when the block ends."""
    batch = _batch_of(requests)
    with within(_current, batch):
        yield
    batch.create()


def create(requests: OutgoingRequests, wanted: PendingVariable) -> None:
    """Add a variable to the batch that is open in this context, which creates it later; without one, create it now.

    A variable `near` that waits for another batch is created first.
    """
    batch = _batch_of(requests)
    if wanted.near is not None and _batches[wanted.near] is not batch:
        settle(wanted.near)
    batch.add(wanted)
    if batch is not _current.get():
        batch.create()


def settle(variable: Variable) -> None:
    """Create a variable that waits for its batch, with the whole batch; does nothing if it was created."""
    if "device" not in vars(variable):
        _batches[variable].create([variable])


def _batch_of(requests: OutgoingRequests) -> VariableBatch:
    open_one = _current.get()
    return open_one if open_one is not None and open_one.requests is requests else VariableBatch(requests)


#: A message to a task, with its payload, and the variables that it is about.
_Parcel = tuple[tuple[str, CreateVariables, Payload], Sequence[PendingVariable]]


class _Creation:
    """One creation of many variables."""

    def __init__(self, requests: OutgoingRequests) -> None:
        self._requests = requests
        self._exports = Exports()
        #: Results of initialisers that several variables share, by the initialiser's identity.
        self._computed: dict[int, HostArray] = {}
        self._failed: dict[Variable, DflowError] = {}
        self._epoch = requests.unsaved.epoch

    def create(self, wanted: Sequence[PendingVariable]) -> dict[Variable, DflowError]:
        """Create each variable, unless its task has it already; return the errors by failed variable."""
        placed = self._placed(wanted)
        questions: list[_Parcel] = [
            ((task, CreateVariables(tuple(each.asked() for each in part)), b""), part)
            for task, there in placed.items()
            for part in _parts(there)
        ]
        missing = self._send(questions)
        reach("creation", self._requests.task)
        self._send([parcel for task, there in _by_task(missing).items() for parcel in self._parcels(task, there)])
        return self._failed

    def _placed(self, wanted: Sequence[PendingVariable]) -> dict[str, list[PendingVariable]]:
        """Ask the coordinator for the task of each variable; return the variables by task, without refused ones."""
        answers = self._requests.place_all([each.placing() for each in wanted]) if wanted else ()
        for each, answer in zip(wanted, answers, strict=True):
            if isinstance(answer, Failure):
                self._failed[each.variable] = error_of(answer)
            else:
                each.placed = answer
        return _by_task(each for each in wanted if each.variable not in self._failed)

    def _parcels(self, task: str, missing: Sequence[PendingVariable]) -> Iterator[_Parcel]:
        """Yield messages that create variables, with many values in each.

        A variable whose value the task computes, which may take long, gets its own message.
        """
        for each in missing:
            if isinstance(stored := each.first, StoredValue):
                array = StoredArray(str(stored.path), stored.id, stored.name, stored.indices)
                yield (task, CreateVariables((replace(each.asked(), stored=array),)), b""), [each]
        missing = [each for each in missing if not isinstance(each.first, StoredValue)]
        for part in _parts([each for each in missing if each.ops is None]):
            values = [each.value(self._computed) for each in part]
            arrays, payload = encode_arrays(values)
            variables = tuple(replace(each.asked(), arrays=1) for each in part)
            yield (task, CreateVariables(variables, arrays), payload), part
        for each in missing:
            if each.ops is not None:
                yield self._recipe(task, each, each.ops.recipe(self._exports))

    def _recipe(self, task: str, wanted: PendingVariable, recipe: Recipe) -> _Parcel:
        arrays, payload = encode_arrays(recipe.arrays)
        used = list(dict.fromkeys(program for program, _ in recipe.calls))
        calls = tuple((used.index(program), takes) for program, takes in recipe.calls)
        made = {"calls": calls, "result": recipe.result, "starts": tuple(recipe.starts)}
        variable = replace(wanted.asked(), arrays=len(arrays), **made)
        blobs = [self._exports.blobs[program] for program in used]
        message = CreateVariables((variable,), arrays, tuple(map(len, blobs)))
        return (task, message, b"".join((payload, *blobs))), [wanted]

    def _send(self, parcels: Sequence[_Parcel]) -> list[PendingVariable]:
        """Send all messages; return the variables that the tasks lack and got no initial value for."""
        missing: list[PendingVariable] = []
        answers = self._requests.ask_all([request for request, _ in parcels])
        for ((task, _, _), wanted), answer in zip(parcels, answers, strict=True):
            if isinstance(answer, DflowError):
                self._failed.update((each.variable, answer) for each in wanted)
                continue
            created: VariablesCreated = answer.message
            for position, each in enumerate(wanted):
                if position in created.failures:
                    self._failed[each.variable] = error_of(created.failures[position], task)
                elif position in created.missing:
                    missing.append(each)
                else:
                    self._created(each, task)
        return missing

    def _created(self, each: PendingVariable, task: str) -> None:
        each.variable.key, each.variable.device, each.on = each.variable.name, task, task
        if each.placed.is_saved:
            self._requests.unsaved.note(each.variable.name, self._epoch, (self._requests, each), _make_again)


def _make_again(freed: Sequence[tuple[OutgoingRequests, PendingVariable]]) -> None:
    """Create variables that a return to a snapshot has freed, on the same tasks, with the same initial values."""
    failed = _Creation(freed[0][0]).create([each for _, each in freed])
    for variable, error in failed.items():
        raise type(error)(f"{error}{at(variable.loc)}") from None


def _by_task(wanted: Iterable[PendingVariable]) -> dict[str, list[PendingVariable]]:
    found: dict[str, list[PendingVariable]] = defaultdict(list)
    for each in wanted:
        found[each.placed.task].append(each)
    return found


def _parts(wanted: Sequence[PendingVariable]) -> Iterator[Sequence[PendingVariable]]:
    """Split into groups that each fit one message."""
    part: list[PendingVariable] = []
    size_bytes = 0
    for each in wanted:
        size_bytes += each.size_bytes
        if part and (len(part) == MOST_VARIABLES or size_bytes > MOST_BYTES):
            yield part
            part, size_bytes = [], each.size_bytes
        part.append(each)
    if part:
        yield part
