"""The values of variables, and the queues and accumulators, on one host.

An array that was handed out stays valid: its variable is marked as aliased, and the next program that would overwrite
the buffer gets a copy, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from threading import Event, get_ident
from types import MappingProxyType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import jit as jax_jit
from jax.sharding import Sharding

from dflow.lowering.files.saved_arrays import SavedArrays
from dflow.lowering.files.whole_arrays import own_copy, placed
from dflow.lowering.paging.paged_memory import PIECE_BYTES, PagedMemory
from dflow.lowering.programs.program import Program
from dflow.lowering.queues.pending_operations import HeldResource
from dflow.lowering.state.applied_steps import AppliedSteps
from dflow.lowering.state.held_value import HeldValue, StepState
from dflow.lowering.state.variable_table import VariableTable
from dflow.lowering.values.computed import wait_until_computed
from dflow.lowering.values.conversion import converted
from dflow.lowering.values.first_value import first_value, wait_until_made
from dflow.lowering.values.host_values import device_copy
from dflow.lowering.values.kept_shardings import beside, is_spread, refuse_divided
from dflow.lowering.values.variable_key import shown
from dflow.lowering.values.wide_types import admit
from dflow.tracing.errors import DflowError, VariableError, VariableShapeError
from dflow.tracing.ir.row_marks import SUFFIX, fresh_marks, marked
from dflow.tracing.ir.types import ArrayType, array_type_of
from dflow.tracing.ir.updates import KINDS, looked_up, operand_types, updated
from dflow.tracing.rows.axis_slice import AxisSlice

Result = TypeVar("Result")
_StatesByKeys = WeakValueDictionary[tuple[tuple[str, ...], tuple[str, ...]], StepState]

#: By key of a variable: the name of the memory that it is paged in with others, and its limit in bytes.
Limits = dict[str, tuple[str, int]]

#: Number of attempts to view values that steps write meanwhile, before the values are read as arrays instead.
MOST_LOOKS = 5


class Store:
    """Named values. Every method may be called from any thread."""

    def __init__(self) -> None:
        self.table = VariableTable()
        #: The steps of shared runs that have changed the values, queues and accumulators here.
        self.applied = AppliedSteps()
        #: The values being created: the thread of each, and the event at its end.
        self._making: dict[str, tuple[int, Event]] = {}
        #: The queues and accumulators, by key. One that was removed may still serve its waiters.
        self.resources: dict[str, HeldResource] = {}
        #: The memories that variables share, by name and limit.
        self._memories: WeakValueDictionary[tuple[str, int], PagedMemory] = WeakValueDictionary()
        #: What calls of a program on some variables share, by the keys of those written and of those only read.
        self._states: WeakKeyDictionary[Program, _StatesByKeys] = WeakKeyDictionary()

    def create(
        self,
        key: str,
        type: ArrayType,
        make: Callable[[], Any],
        sharding: Sharding | None = None,
        memory: PagedMemory | None = None,
    ) -> bool:
        """Create the value `make()` under `key`, with `sharding` if given. Return False if `key` exists.

        With `memory`, a large value is paged there.

        `make` runs without the lock, so it may use the store. Only threads that create the same key wait for it; when
        it fails, one of them calls its own `make`.

        Raises VariableError when the value under `key` or the value of `make()` has another type than `type`, or when
        `make` creates `key` itself; DeadlineExceeded when another thread's `make` takes longer than `MAKING_S`.
        """
        admit([type.dtype])
        mine = get_ident(), Event()
        while True:
            with self.table.lock:
                self.table.sweep()
                held, making = self.table.entries.get(key), self._making.get(key)
                if held is None and making is None:
                    self._making[key] = mine
                    break
            if held is not None:
                _check_again(key, held, type)
                return False
            assert making is not None
            wait_until_made(key, *making)
        try:
            value = first_value(key, type, make, sharding, memory)
            if key.endswith(SUFFIX):
                value = _new_marks(type, value.sharding if value.committed else None)
                value = value if memory is None else memory.adopted(value)
                self.table.has_marks = True
            created = HeldValue(value, type, memory=memory)
            if memory is not None and created.pages is None:
                memory.hold(key, type)
            with self.table.lock:
                self.table.entries[key] = created
        finally:
            with self.table.lock:
                del self._making[key]
            mine[1].set()
        return True

    def keys(self) -> tuple[str, ...]:
        """Return the keys of all values."""
        with self.table.lock:
            self.table.sweep()
            return tuple(self.table.entries)

    def type(self, key: str) -> ArrayType:
        """Return the type of a value. Raises VariableError."""
        return self.table.entry(key).type

    def __contains__(self, key: str) -> bool:
        return key in self.table.entries

    def sharding(self, key: str) -> Sharding | None:
        """Return the sharding of the value; None for one that JAX may put anywhere. Raises VariableError."""
        return self.shardings([key])[key]

    def shardings(self, keys: Iterable[str]) -> dict[str, Sharding | None]:
        """Return the shardings of the values; None for one that JAX may put anywhere. Raises VariableError."""
        values = {key: self.table.buffer(key) for key in keys}
        return {key: value.sharding if value.committed else None for key, value in values.items()}

    def read(self, key: str) -> jax.Array:
        """Return a copy of the value. It stays valid after later writes, and the caller may donate it."""
        copied: jax.Array = self.table.section(lambda: device_copy(self.table.values([key])[0]))
        return copied

    def look(self, keys: Iterable[str], do: Callable[[Sequence[jax.Array]], Result]) -> Result:
        """Return `do(values)`, called while no step writes them. It must not keep the values. Raises VariableError."""
        names = list(keys)
        return self.table.section(lambda: do(self.table.values(names)))

    def wait(self, keys: Iterable[str]) -> None:
        """Wait until the values are computed. They are neither copied nor marked as aliased. Raises VariableError."""
        names = list(keys)
        jax.block_until_ready(self.table.section(lambda: self.table.values(names)))

    def gather(self, key: str, indices: Any) -> jax.Array:
        """Return the rows at `indices`."""

        def gather() -> jax.Array:
            (value,) = self.table.values([key])
            rows: jax.Array = looked_up(value, beside(indices, value))
            return rows

        return self.table.section(gather)

    def read_together(self, keys: Iterable[str]) -> dict[str, jax.Array]:
        """Return the values at one moment, between two programs. They stay valid; the caller must not donate them.

        The next program that would overwrite one of the buffers gets a copy instead. So nothing is copied here, except
        for a callback of the step that writes the value. Raises VariableError.
        """
        keys = list(keys)

        def read() -> list[jax.Array]:
            values = self.table.values(keys)
            for number, entry in enumerate(map(self.table.entry, keys)):
                holder = entry.holder
                if holder is not None and holder.results is not None:
                    values[number] = jnp.copy(values[number])  # for a callback of the step, or a signal handler
                    continue
                if holder is not None:
                    holder.release()
                entry.is_aliased = True
            return values

        return dict(zip(keys, self.table.section(read), strict=True))

    def views(self, keys: Sequence[str]) -> list[jax.Array | npt.NDArray[Any]]:
        """Return the values at one moment, to be sent and then freed.

        For values on the CPU, waits until they are computed and returns NumPy views of their buffers. While a view
        exists, a program that would overwrite its buffer writes elsewhere, which costs a copy. For values on other
        devices, or when steps keep overwriting them, returns the arrays of `read_together`. Raises VariableError.
        """
        # A view of a paged value would have a program write elsewhere, to memory that is not paged.
        is_paged = any(self.table.entry(key).pages is not None for key in keys)
        for _ in range(0 if is_paged else MOST_LOOKS):
            values, are_views = self.table.section(lambda: self._views_now(keys))
            if are_views:
                return values
            if not all(map(has_view, values)):
                break
            with suppress(RuntimeError):  # a program has overwritten a value since
                wait_until_computed(values)
        found = self.read_together(keys)
        return [found[key] for key in keys]

    def _views_now(self, keys: Sequence[str]) -> tuple[list[Any], bool]:
        """Return the values, as NumPy views if all are on the CPU and computed, and whether they are views."""
        values: list[Any] = self.table.values(keys)
        if all(has_view(value) and value.is_ready() for value in values):
            return [np.asarray(value) for value in values], True
        return values, False

    def replace(self, values: Mapping[str, jax.Array]) -> None:
        """Replace all of these values in one moment, or none. The store owns the arrays from then on.

        All rows of variables whose changes are tracked are marked, in a new life of the marks.

        Raises VariableError when a variable does not exist, and VariableShapeError when a value has another type.
        """
        if self.table.has_marks:
            marks = {key if key.endswith(SUFFIX) else key + SUFFIX for key in values}.intersection(self.table.entries)
            new = {key: _new_marks(self.type(key), sharding) for key, sharding in self.shardings(marks).items()}
            values = {**values, **new}
        values = {key: self._paged(key, value) for key, value in values.items()}
        self.table.replace(values, lambda key, entry, value: _check_type(key, entry.type, value))

    def read_saved(
        self,
        files: SavedArrays,
        keys: Mapping[str, str],
        parts: Mapping[str, tuple[str, AxisSlice]] = MappingProxyType({}),
    ) -> dict[str, jax.Array]:
        """Return arrays for `replace`, each as its variable is sharded now; `keys` are by array name.

        parts  for each further variable by key, the array that it is a part of, and the indices

        Arrays of another dtype are converted. Raises CheckpointError, which names the array, for one that is missing or
        damaged, and as `converted` does.
        """
        paged = {key: (name, None) for name, key in keys.items()} | dict(parts)
        paged = {key: one for key, one in paged.items() if self.table.entry(key).pages is not None}
        found = {key: self._read_paged(files, key, *one) for key, one in paged.items()}
        keys = {name: key for name, key in keys.items() if key not in paged}
        parts = {key: one for key, one in parts.items() if key not in paged}
        shardings = self.shardings([*keys.values(), *parts])
        dtypes = {key: self.table.entry(key).type.dtype for key in shardings}
        others = {name for name, key in keys.items() if files.types[name].dtype != dtypes[key]}
        read = files.each({name: None if name in others else shardings[key] for name, key in keys.items()})
        for name, value in read:
            key = keys[name]
            if name in others:
                found[key] = self._own(converted(name, value, dtypes[key]), shardings[key])
            else:  # one without a sharding may be in the memory that was read into
                found[key] = own_copy(value) if shardings[key] is None else value
        for (key, (name, _)), value in zip(parts.items(), files.parts([*parts.values()]), strict=True):
            same = value if files.types[name].dtype == dtypes[key] else converted(name, value, dtypes[key])
            found[key] = self._own(same, shardings[key])
        return found

    def limits(self) -> Limits:
        """Return the name and limit of the memory of each variable that shares one."""
        with self.table.lock:
            held = {key: entry.memory for key, entry in self.table.entries.items()}
        return {key: (memory.name, memory.most_bytes) for key, memory in held.items() if memory is not None}

    def memory_for(self, key: str, limit: tuple[str, int] | None) -> PagedMemory | None:
        """Return the memory for a variable, which the first one of that name and limit in bytes makes; None for none.

        Raises VariableError if there is a variable of this key with another limit.
        """
        with self.table.lock:
            if (held := self.table.entries.get(key)) is not None:
                own = None if held.memory is None else (held.memory.name, held.memory.most_bytes)
                if limit != own:
                    first, given = ("none" if one is None else f"{one[1]} bytes" for one in (own, limit))
                    raise VariableError(
                        f"max_memory of {shown(key)!r}: expected {first}, with which it was made, got {given}",
                        "give the same limit in all processes",
                    )
                return held.memory
            if limit is None:
                return None
            if (memory := self._memories.get(limit)) is None:
                memory = self._memories[limit] = PagedMemory(*limit, self.table.lock)
            return memory

    def _paged(self, key: str, value: Any) -> Any:
        """Return a value that is to replace another one, paged as that is."""
        entry = self.table.entries.get(key)
        if entry is None or entry.pages is None or array_type_of(value).strong != entry.type:
            return value
        return entry.pages.adopted(value)

    def _read_paged(self, files: SavedArrays, key: str, name: str, part: AxisSlice | None) -> jax.Array:
        entry = self.table.entry(key)
        assert entry.pages is not None
        return read_paged(files, name, entry.pages, part, entry.type.dtype)

    @staticmethod
    def _own(value: Any, sharding: Any) -> jax.Array:
        own = own_copy(value)
        return own if sharding is None else placed(own, sharding)

    def write(self, key: str, value: Any) -> None:
        """Replace the value by a copy of `value`. Raises VariableShapeError when its type differs."""
        held = self.table.entry(key)
        _check_type(key, held.type, value)
        own, before = device_copy(value), self.table.buffer(key)
        if before.committed:
            own = placed(own, before.sharding)
        else:
            refuse_divided(key, own)
        self.replace({key: own})

    def update(self, key: str, kind: str, *operands: Any) -> None:
        """Change the value in place; `kind` is a key of `updates.KINDS`. Raises VariableShapeError."""
        if not KINDS[kind].reads:
            self.write(key, *operands)
            return
        held = self.table.entry(key)
        given = [array_type_of(operand) for operand in operands]
        for wanted, operand in zip(operand_types(kind, held.type, given), operands, strict=True):
            _check_type(key, wanted.strong, operand)
        value = self.table.buffer(key)
        sharding = value.sharding if value.committed and is_spread(value.sharding) else None
        if not value.committed:
            for operand in operands:
                refuse_divided(key, operand)
        moved = [beside(operand, value) for operand in operands]
        if sharding is not None and not KINDS[kind].by_rows:
            moved = [placed(operand, sharding) for operand in operands]
        marks = [key + SUFFIX] if key + SUFFIX in self.table.entries else []
        self.call(_in_place(kind, sharding, bool(marks)), [key, *marks], [], moved)

    def call(
        self,
        program: Program,
        writes: Sequence[str],
        reads: Sequence[str],
        operands: Sequence[Any],
        step: StepState | None = None,
    ) -> Sequence[jax.Array]:
        """Run a program on variables and operands, keep the variables' new values and return its other results.

        `step`, from `step_state`, keeps the values that it writes for the next call with it, which costs nothing per
        variable then.
        """
        if not writes and not reads:
            return program(*operands)
        run = self.table.runner(writes)
        results: Sequence[jax.Array] = program.run(
            partial(run, step or self.step_state(program, writes, reads)),
            operands,
            lambda: [*map(self.table.buffer, (*writes, *reads)), *operands],
        )
        return results

    def call_on_copies(
        self, program: Program, writes: Sequence[str], reads: Sequence[str], operands: Sequence[Any]
    ) -> Sequence[jax.Array]:
        """Return the results of `call` without its changes: the program runs on copies of the variables."""
        values = self.read_together([*writes, *reads])
        pages = [self.table.entry(key).pages for key in writes]
        written = [
            jnp.copy(values[key]) if own is None else own.copy(values[key])
            for key, own in zip(writes, pages, strict=True)
        ]
        read = [values[key] for key in reads]
        results: Sequence[jax.Array] = program.run(
            lambda call, args: call(written, read, *args)[1], operands, lambda: [*written, *read, *operands]
        )
        return results

    def step_state(self, program: Program, writes: Sequence[str], reads: Sequence[str]) -> StepState:
        """Return what repeated calls of a program on the same variables pass to `call`: one object for all callers.

        So the values need not return to the table between calls of different workers' plans.
        """
        with self.table.lock:
            states = self._states.setdefault(program, WeakValueDictionary())
            key = tuple(writes), tuple(reads)
            state = states.get(key)
            if state is None:
                state = states[key] = StepState(writes, reads, "part of a function", program.keeps)
        return state

    def resource(self, key: str) -> HeldResource:
        """Return the queue or accumulator under `key`. Raises DflowError when there is none."""
        held = self.resources.get(key)
        if held is None:
            raise DflowError(f"no resource {key!r} is held here; there are {sorted(self.resources) or 'none'}")
        return held


def read_paged(
    files: SavedArrays, name: str, memory: PagedMemory, part: AxisSlice | None = None, dtype: Any = None
) -> jax.Array:
    """Return a saved array, or a part of it, as a paged one, of another dtype if given; it is never whole in memory."""
    type = files.types[name]
    whole = AxisSlice(0, 0, type.shape[0]) if part is None else part
    pieces = (
        (start, values if dtype in (None, values.dtype) else converted(name, values, dtype))
        for start, values in files.rows(name, whole, PIECE_BYTES)
    )
    return memory.filled(ArrayType(dtype or type.dtype, whole.shape(type.shape)), pieces)


def _new_marks(type: ArrayType, sharding: Sharding | None) -> jax.Array:
    """Return marks of changed rows in a new life, with this sharding."""
    marks = jnp.array(fresh_marks(type))
    return marks if sharding is None else placed(marks, sharding)


def _check_again(key: str, held: HeldValue, type: ArrayType) -> None:
    if held.type != type:
        raise VariableError(
            f"variable {key!r} exists and holds {held.type}, but is created again with {type}; "
            "give one of them another name or `prefix=`"
        )


@cache
def _in_place(kind: str, sharding: Sharding | None, has_marks: bool) -> Program:
    """Return the program of an update in place, which also marks the changed rows if the variable has marks.

    The value has `sharding`, if that is given.
    """

    def update(written: Sequence[Any], read: Sequence[Any], *operands: Any) -> tuple[list[Any], list[Any]]:
        changed = operands[: KINDS[kind].by_rows]
        return [updated(kind, written[0], *operands), *(marked(marks, *changed) for marks in written[1:])], []

    shardings: Any = None if sharding is None else ([sharding, *[None] * has_marks], [])
    return Program(jax_jit(update, donate_argnums=0, out_shardings=shardings))


def has_view(value: jax.Array) -> bool:
    """Whether NumPy can use the buffer: it is one, of numbers and not of keys, on a CPU.

    It may be deleted: another thread may dispatch a program that overwrites it.
    """
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return False
    devices: set[Any] = value.sharding.device_set
    return [device.platform for device in devices] == ["cpu"]


def _check_type(key: str, wanted: ArrayType, value: Any) -> None:
    given = array_type_of(value).strong
    if given != wanted:
        raise VariableShapeError(f"variable {key!r} holds {wanted} but was given {given}")
