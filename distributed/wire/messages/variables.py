"""Variables on a task: creation, reads, writes, and the end of their state."""

from __future__ import annotations

import msgspec

from dflow.distributed.wire.messages.basic import ArrayInfo, Arrays, Failure, Ok
from dflow.distributed.wire.messages.message import Message, Request
from dflow.tracing.rows.axis_slice import AxisSlice


class VariableLayout(msgspec.Struct, frozen=True):
    """A mesh of the first devices of a task, and the axes over which each dimension of a variable is divided.

    `mesh`  name and size of each axis
    `spec`  names of axes, for each of the first dimensions
    """

    mesh: tuple[tuple[str, int], ...]
    spec: tuple[tuple[str, ...], ...]


class StoredArray(msgspec.Struct, frozen=True):
    """The fields of a `StoredValue` in a folder that every task can access."""

    path: str
    id: str
    name: str
    indices: AxisSlice | None


class CreateVariable(msgspec.Struct, frozen=True):
    """A variable to create unless it exists.

    `arrays`  number of the message's arrays for its initial value, after those of the variables before it
    `calls`   programs to run, in order, by number, and the numbers of the values that each takes
    `result`  number of the initial value: values are numbered, these arrays first, then the results of each call
    `process` process of the task that must hold it, from `Placed`; another process of that task refuses
    `layout`  how it is spread over the task's devices; None for one device
    `near`    a variable of the task whose layout this one has, if both have the same shape; or empty
    `memory`  name and limit in bytes of the memory that it is paged in with others; None for none
    `starts`  if the result is some rows of the initial value, the rows where such parts begin; value number 0 has the
              row of the part that is computed
    `stored`  the initial value, in a file

    Without arrays, calls and `stored` there is no initial value.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    arrays: int = 0
    calls: tuple[tuple[int, tuple[int, ...]], ...] = ()
    result: int = 0
    process: str = ""
    layout: VariableLayout | None = None
    near: str = ""
    starts: tuple[int, ...] = ()
    stored: StoredArray | None = None
    memory: tuple[str, int] | None = None


class VariablesCreated(Message, frozen=True):
    """The variables exist, except those at the indices in `missing` (sent without initial value) and in `failures`.

    A variable that existed before, with the same dtype and shape, is unchanged.
    """

    missing: tuple[int, ...] = ()
    failures: dict[int, Failure] = msgspec.field(default_factory=dict)


class CreateVariables(Request[VariablesCreated], frozen=True):
    """Create each of the variables unless it exists.

    The payload holds the `arrays`, then the exported programs for the calls, `program_sizes` bytes each.
    """

    variables: tuple[CreateVariable, ...]
    arrays: tuple[ArrayInfo, ...] = ()
    program_sizes: tuple[int, ...] = ()


class ReadVariables(Request[Arrays], frozen=True):
    """Read the variables `keys`; answered by `Arrays`, in that order, their values between the same two steps."""

    keys: tuple[str, ...]


class WriteVariable(Request[Ok], frozen=True):
    """Replace the variable's value with the payload."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class ForgetState(Request[Ok], frozen=True):
    """Free a variable's value, or the contents of a queue or an accumulator.

    Ops that use it later or wait for it now fail with an error that contains `reason` and `remedy`.
    """

    key: str
    is_variable: bool
    reason: str
    remedy: str
