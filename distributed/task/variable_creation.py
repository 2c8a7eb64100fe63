"""Creation of variables on a task, many per message.

Why: a model has hundreds of variables, most of them small, and a message and its answer take longer than creating one.
Invariants: the first process to send a variable's value creates it, and the others find it; a variable that cannot be
created does not prevent the others of its message.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import jax
from jax.sharding import Sharding

from dflow.distributed.task.arrivals import RequestArrival, RequestTable
from dflow.distributed.task.task_part import TaskPart
from dflow.distributed.task.task_server import TaskServer
from dflow.distributed.task.variable_layout import on_devices
from dflow.distributed.wire.codec import KEYS, decode_arrays, parse_dtype
from dflow.distributed.wire.failures import failure_of
from dflow.distributed.wire.messages.basic import Failure
from dflow.distributed.wire.messages.variables import CreateVariable, CreateVariables, VariablesCreated
from dflow.lowering.programs.program import Program
from dflow.lowering.values.first_value import Unshared, joined_rows, unshared
from dflow.lowering.values.kept_shardings import is_spread
from dflow.lowering.values.stored_value import StoredValue
from dflow.tracing.errors import DflowError, VariableError, WireError
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.ir.types import parse_dtype as parse_key_dtype
from dflow.tracing.moments import reach


class VariableCreation(TaskPart):
    """Creates variables in the store of a task; thread-safe."""

    requests: ClassVar[RequestTable[VariableCreation]] = RequestTable()

    def __init__(self, task: TaskServer) -> None:
        self._task, self._store = task, task.store

    @requests.queued(CreateVariables)
    def create(self, message: CreateVariables, arrival: RequestArrival) -> VariablesCreated:
        """Create the variables of a message that do not exist; see `VariablesCreated` for the answer.

        A variable that cannot be created is an entry of `failures`. Raises WireError when the parts of the message do
        not match.
        """
        arrays, blobs = _parts(message, arrival.payload)
        reach("creation", self._task.name)
        # Several variables may use one, which the registry keeps for a while only.
        programs = [cache(partial(self._task.plans.program, blob, arrival.peer.name)) for blob in blobs]
        ends = itertools.accumulate(variable.arrays for variable in message.variables)
        missing: list[int] = []
        failures: dict[int, Failure] = {}
        for index, (variable, end) in enumerate(zip(message.variables, ends, strict=True)):
            values = arrays[end - variable.arrays : end]
            try:
                self._task.refuse_for_another_process(variable.name, variable.process)
                is_asked = not values and not variable.calls and variable.stored is None
                if is_asked and variable.name not in self._store:
                    missing.append(index)
                else:
                    self._create(variable, partial(self._first_value, variable, values, programs))
            except Exception as error:
                failures[index] = failure_of(error)
        return VariablesCreated(tuple(missing), failures)

    def _create(self, variable: CreateVariable, make: Callable[[], Any]) -> None:
        dtype = parse_key_dtype(variable.dtype) if variable.dtype in KEYS else parse_dtype(variable.dtype)
        sharding = self._sharding(variable)
        self._store.create(
            variable.name,
            ArrayType(dtype, variable.shape),
            make if sharding is None else lambda: jax.device_put(unshared(make()), sharding),
            memory=self._store.memory_for(variable.name, variable.memory),
        )

    def _sharding(self, variable: CreateVariable) -> Sharding | None:
        if variable.layout is not None:
            return on_devices(variable.layout, variable.name)
        sharding = self._store.sharding(variable.near) if variable.near in self._store else None
        is_alike = is_spread(sharding) and self._store.table.buffer(variable.near).shape == variable.shape
        return sharding if is_alike else None

    def _first_value(
        self, variable: CreateVariable, arrays: Sequence[Any], programs: Sequence[Callable[[], Program]]
    ) -> Any:
        try:
            if (stored := variable.stored) is not None:
                type = ArrayType(parse_dtype(variable.dtype), variable.shape)
                return StoredValue(Path(stored.path), stored.id, stored.name, stored.indices, type)()
            if variable.starts:
                dtype = parse_dtype(variable.dtype)
                return joined_rows(
                    ArrayType(dtype, variable.shape),
                    variable.starts,
                    lambda start: _computed(variable, [start, *arrays[1:]], programs),
                )
            result = _computed(variable, arrays, programs)
            is_new = variable.result >= len(arrays)  # the result of a program: nothing else refers to it
            is_data = variable.dtype in KEYS and result.dtype.name not in KEYS  # as the ops of an initialiser give it
            if is_data:
                return jax.random.wrap_key_data(result, impl=KEYS[variable.dtype][0])
            return Unshared(result) if is_new and isinstance(result, jax.Array) else result
        except DflowError:
            raise
        except Exception as error:
            raise VariableError(f"the initialiser of variable {variable.name!r} cannot be run here: {error}") from error


def _computed(variable: CreateVariable, arrays: Sequence[Any], programs: Sequence[Callable[[], Program]]) -> Any:
    """Run the variable's calls and return the result. Raises WireError for a number that is out of range."""
    values = list(arrays)
    for program, takes in variable.calls:
        operands = [_numbered(values, number, "value") for number in takes]
        values += _numbered(programs, program, "program")()(*operands)
    return _numbered(values, variable.result, "value")


def _parts(message: CreateVariables, payload: memoryview) -> tuple[Sequence[Any], Sequence[memoryview]]:
    """Split the payload into the arrays and the exported programs. Raises WireError when it does not fit."""
    taken = [variable.arrays for variable in message.variables]
    if min((*taken, *message.program_sizes), default=0) < 0 or sum(taken) != len(message.arrays):
        raise WireError(
            f"variables that take {taken} arrays and programs of {list(message.program_sizes)} bytes "
            f"were sent {len(message.arrays)} arrays"
        )
    border = len(payload) - sum(message.program_sizes)
    if border < 0:
        raise WireError(f"programs of {list(message.program_sizes)} bytes in a payload of {len(payload)} bytes")
    ends = list(itertools.accumulate(message.program_sizes, initial=border))
    programs = [payload[start:end] for start, end in itertools.pairwise(ends)]
    return decode_arrays(message.arrays, payload[:border]), programs


def _numbered(things: Sequence[Any], number: int, what: str) -> Any:
    if not 0 <= number < len(things):
        raise WireError(f"an initialiser names {what} {number}, of {len(things)}")
    return things[number]
