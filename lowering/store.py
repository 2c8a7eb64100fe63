"""The values of variables, and the queues and accumulators, on one host.

A step owns the variables of a program for the moment of its dispatch, so several steps may run at once and none
sees a variable half written. An array that has been handed out stays valid: its slot is marked `lent`, and the next
program that would overwrite its buffer gets a copy, once. Between its calls a compiled step may keep the values of its
variables (`StepState`); invariant: whatever asks for one of them by `find` has all of them put back first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import jit as jax_jit
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from dflow.lowering.program import Program
from dflow.lowering.resource_use import Held
from dflow.tracing.errors import DeadlineExceeded, DflowError, VariableError, VariableShapeError
from dflow.tracing.source import at, caller
from dflow.tracing.types import ArrayType, array_type_of
from dflow.tracing.updates import looked_up, operand_types, updated


@dataclass(slots=True)
class _Held:
    value: jax.Array
    type: ArrayType
    lent: bool = False
    #: The step that has the value now.
    at: StepState | None = None


#: A variable of this size is made before the next one is begun.
_LARGE_BYTES = 1 << 20

#: How long to wait for a value that another thread makes, in s.
MAKING_S = 600.0


class _Making:
    """An initialiser that runs, and on which thread."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.ended = threading.Event()

    def wait(self, key: str) -> None:
        """Wait until it has ended, in whatever way."""
        if self.thread == threading.get_ident():
            raise VariableError(
                f"the initialiser of variable {key!r} creates variable {key!r} itself\n  give one of them another name"
            )
        if not self.ended.wait(MAKING_S):
            raise DeadlineExceeded(
                f"the initialiser of variable {key!r}, on another thread, has not ended within {MAKING_S:g} s\n"
                "  does it wait for this thread?"
            )


class Store:
    """Named values. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        #: What is being created, each by one thread.
        self._making: dict[str, _Making] = {}
        #: Why each value that someone may still ask for was let go of.
        self._gone: dict[str, tuple[str, str]] = {}
        self._resources: dict[str, Held] = {}
        self._lock = threading.RLock()

    def create(self, key: str, type: ArrayType, make: Callable[[], Any], place: Sharding | None = None) -> bool:
        """Hold `make()` under `key`, at `place` if given, unless something is held there; whether it was created.

        `make` runs without the lock, so it may use the store and nobody else waits for it but who creates the same
        key; when it fails, one of those who wait makes its own.

        Raises VariableError when what is held has another type, `make` gives another type than `type`, or `make`
        creates `key` itself; DeadlineExceeded when another thread's `make` takes longer than `MAKING_S`.
        """
        mine = _Making()
        while True:
            with self._lock:
                held, making = self._held.get(key), self._making.get(key)
                if held is None and making is None:
                    self._making[key] = mine
                    break
            if held is not None:
                _check_again(key, held, type)
                return False
            assert making is not None
            making.wait(key)
        try:
            created = _made(key, type, make, place)
            with self._lock:
                self._held[key] = created
        finally:
            with self._lock:
                del self._making[key]
            mine.ended.set()
        return True

    def __contains__(self, key: str) -> bool:
        return key in self._held

    def drop(self, key: str) -> None:
        """Let go of a value; nothing happens when there is none."""
        with self._lock:
            self._pop(key)
            self._gone.pop(key, None)

    def forget(self, key: str, reason: str, remedy: str) -> None:
        """Let go of a value before its last user is gone: who asks for it gets a VariableError that says these two."""
        with self._lock:
            if self._pop(key) is not None:
                self._gone[key] = reason, remedy

    def _pop(self, key: str) -> _Held | None:
        held = self._held.pop(key, None)
        if held is not None and held.at is not None:
            held.at.put_back()
        return held

    def types(self) -> dict[str, ArrayType]:
        """The type of everything held, by key."""
        with self._lock:
            return {key: held.type for key, held in self._held.items()}

    def place(self, key: str) -> Sharding | None:
        """Where the value is to stay; None where it may go wherever a program puts it."""
        with self._lock:
            value = self.find(key).value
            return value.sharding if value.committed else None

    def read(self, key: str) -> jax.Array:
        """A copy of the value, which is the caller's: it stays valid whatever is written, and may be donated."""
        with self._lock:
            return jnp.copy(self.find_value(key).value)

    def snapshot(self, keys: Iterable[str]) -> dict[str, jax.Array]:
        """The values as of one moment, between two programs; they stay valid, and are not the caller's to donate.

        Nothing is copied here: the next program that would overwrite one of the buffers gets a copy instead. Raises
        VariableError.
        """
        with self._lock:
            found = {key: self.find_value(key) for key in keys}
            for held in found.values():
                held.lent = True
            return {key: held.value for key, held in found.items()}

    def shardings(self, keys: Iterable[str]) -> dict[str, Any]:
        """Where the values are; None for one that JAX may put anywhere. Raises VariableError."""
        with self._lock:
            values = {key: self.find(key).value for key in keys}
        return {key: value.sharding if value.committed else None for key, value in values.items()}

    def replace(self, values: Mapping[str, jax.Array]) -> None:
        """Replace all of these values in one moment, or none; the arrays are the store's from now on.

        Raises VariableError when one is not held, and VariableShapeError when one has another type.
        """
        with self._lock:
            found = {key: self.find(key) for key in values}
            for key, held in found.items():
                _check_type(key, held.type, values[key])
            for key, held in found.items():
                held.value, held.lent = values[key], False

    def write(self, key: str, value: Any) -> None:
        """Replace the value. Raises VariableShapeError when the type is another."""
        with self._lock:
            held = self.find(key)
            _check_type(key, held.type, value)
            held.value, held.lent = _placed(jnp.array(value, copy=True), held), False

    def gather(self, key: str, indices: Any) -> jax.Array:
        """The rows at `indices`."""
        with self._lock:
            held = self.find_value(key)
            rows: jax.Array = looked_up(held.value, _beside(indices, held))
            return rows

    def update(self, key: str, kind: str, *operands: Any) -> None:
        """Change the value in place; `kind` is a key of `updates.KINDS`. Raises VariableShapeError."""
        if kind == "assign":
            self.write(key, *operands)
            return
        with self._lock:
            held = self.find_value(key)
            given = [array_type_of(operand) for operand in operands]
            for wanted, operand in zip(operand_types(kind, held.type, given), operands, strict=True):
                _check_type(key, wanted.strong, operand)
            beside = [_beside(operand, held) for operand in operands]
            after: list[Any] = []
            try:
                after.extend(map(_in_place(kind), (_own(held),), *zip(beside)))
            finally:
                if after:
                    held.value = after[0]

    def call(
        self, program: Program, writes: Sequence[str], reads: Sequence[str], operands: Sequence[Any]
    ) -> Sequence[jax.Array]:
        """Run a program on variables and operands, keep what it writes, and give its other results."""
        with self._lock:
            written = [self.find_value(key) for key in writes]
            read = [self.find_value(key) for key in reads]
            arguments = [_own(held) for held in written]
            arguments += [held.value for held in read]
            # As C code puts them down, so that an interrupt right after the call finds them.
            given: list[Sequence[jax.Array]] = []
            try:
                program.run_into(given, [*arguments, *operands])
            finally:
                for held, value in zip(written, given[0] if given else (), strict=False):
                    held.value = value
                    held.lent = False
            if program.forwards:
                self._lend(program, written, read)
            return given[0][len(written) :]

    @staticmethod
    def _lend(program: Program, written: list[_Held], read: list[_Held]) -> None:
        """Mark what shares a buffer with something outside: a read variable handed out, an operand assigned."""
        for result, argument in program.forwards or ():
            if result < len(written):
                written[result].lent = True
            if argument - len(written) < len(read):
                read[argument - len(written)].lent = True

    def create_resource(self, key: str, resource: Held) -> None:
        """Hold a queue or an accumulator under `key`."""
        with self._lock:
            self._resources[key] = resource

    def drop_resource(self, key: str) -> None:
        """Let go of a queue or an accumulator, which may still serve those that wait in it."""
        with self._lock:
            self._resources.pop(key, None)

    def resource(self, key: str) -> Held:
        """The queue or accumulator under `key`. Raises DflowError when there is none."""
        held = self._resources.get(key)
        if held is None:
            raise DflowError(f"no resource {key!r} is held here; there are {sorted(self._resources) or 'none'}")
        return held

    def find(self, key: str) -> _Held:
        """What is held under `key`, its value here; the caller has the lock. Raises VariableError."""
        held = self._held.get(key)
        if held is None and key in self._gone:
            reason, remedy = self._gone[key]
            raise VariableError(f"{reason}{at(caller())}\n  {remedy}")
        if held is None:
            raise VariableError(f"no variable {key!r} is held here; there are {sorted(self._held) or 'none'}")
        if held.at is not None:
            held.at.put_back()
        return held

    def find_value(self, key: str) -> _Held:
        """As `find`, for who needs the value. Raises VariableError too when a step that failed took it along."""
        held = self.find(key)
        if held.value.is_deleted():
            raise VariableError(
                f"the value of variable {key!r} was lost, since a step that writes it failed as it ran{at(caller())}\n"
                "  assign it a new value, such as from what was saved last"
            )
        return held

    def state_of(self, writes: Sequence[str], reads: Sequence[str]) -> StepState:
        """The state of a step that writes and reads these variables."""
        return StepState(self, writes, reads)


class StepState:
    """The variables of one compiled step, whose values stay with it from call to call.

    They stay as the very lists that its program takes and gives, so that a call costs nothing for each variable. It
    does not keep the program, which may be gone before another step asks for the values. A call holds `lock` and takes
    `written` away, leaving None, until it has the new values.
    """

    __slots__ = ("_store", "held", "lock", "read", "reads", "writes", "written")

    def __init__(self, store: Store, writes: Sequence[str], reads: Sequence[str]) -> None:
        self._store, self.lock = store, store._lock
        self.writes, self.reads = tuple(writes), tuple(reads)
        self.held: tuple[list[_Held], list[_Held]] = [], []
        #: The values, while they are here.
        self.written: list[Any] | None = None
        self.read: list[Any] = []

    def values(self) -> tuple[list[Any], list[Any]]:
        """The values written and the values read, to know their types and places by."""
        with self.lock:
            written = self.take() if self.written is None else self.written
            return list(written), list(self.read)

    def take(self) -> list[Any]:
        """Take the values from the store, those written as its own, and give these; the caller holds the lock."""
        written = [self._store.find_value(key) for key in self.writes]
        read = [self._store.find_value(key) for key in self.reads]
        self.read = [held.value for held in read]
        self.written = [_own(held) for held in written]
        self.held = written, read
        for held in (*written, *read):
            held.at = self
        return self.written

    def after_failure(self) -> None:
        """Let the store say of values that a failed call has taken along that they are lost; the lock is held."""
        if self.written is not None and any(value.is_deleted() for value in self.written):
            self.put_back()

    def put_back(self) -> None:
        """Give the store its values again; the caller holds the lock."""
        written, read = self.held
        if self.written is None:
            raise VariableError(
                f"a variable is asked for within the very step that uses it, such as by a callback{at(caller())}\n"
                "  pass the callback what it is to see"
            )
        for held, value in zip(written, self.written, strict=True):
            held.value, held.lent = value, False
        for held in (*written, *read):
            held.at = None
        self.held, self.written, self.read = ([], []), None, []


def _check_again(key: str, held: _Held, type: ArrayType) -> None:
    if held.type != type:
        raise VariableError(
            f"variable {key!r} exists and holds {held.type}, but is created again with {type}; "
            "give one of them another name"
        )


def _made(key: str, type: ArrayType, make: Callable[[], Any], place: Sharding | None) -> _Held:
    # A copy, because JAX may alias the memory of a NumPy array, which must not be donated.
    value = jnp.array(make(), copy=True) if place is None else _made_at(place, make)
    if array_type_of(value).strong != type:
        raise VariableError(
            f"the initial value of variable {key!r} is {array_type_of(value)}, but it is to hold {type}"
        )
    if type.size_bytes >= _LARGE_BYTES:
        # JAX would run ahead, with the originals of many variables in memory beside their copies.
        value.block_until_ready()
    # A Python number gives a weak array; a variable holds one of its type, in a trace and out of it.
    return _Held(jax.lax.convert_element_type(value, type.dtype), type)


def _made_at(place: Sharding, make: Callable[[], Any]) -> jax.Array:
    """What `make` gives, at a place; over several devices it is made in its parts, where JAX can trace `make`."""
    made: jax.Array
    if len(place.device_set) == 1:
        with jax.default_device(next(iter(place.device_set))):
            made = jax.device_put(jnp.array(make(), copy=True), place)
        return made
    try:
        made = jax_jit(lambda: jnp.asarray(make()), out_shardings=place)()
    except (DflowError, jax.errors.JAXTypeError):  # it reads variables, or is no traceable function
        made = jax.device_put(jnp.array(make(), copy=True), place)
    return made


def _placed(value: jax.Array, held: _Held) -> jax.Array:
    """The value where the one before it is to stay."""
    return jax.device_put(value, held.value.sharding) if held.value.committed else value


def _beside(operand: Any, held: _Held) -> Any:
    """An operand of an update, on the devices that hold the value; spread over them as the value is, or whole."""
    value = held.value
    if not (isinstance(operand, jax.Array) and value.committed and operand.committed):
        return operand
    if operand.sharding.device_set == value.sharding.device_set:
        return operand
    if isinstance(value.sharding, NamedSharding):
        return jax.device_put(operand, NamedSharding(value.sharding.mesh, PartitionSpec()))
    return jax.device_put(operand, value.sharding)


@cache
def _in_place(kind: str) -> Callable[..., jax.Array]:
    return jax_jit(partial(updated, kind), donate_argnums=0)


def _own(held: _Held) -> jax.Array:
    if held.lent:
        held.value = jnp.copy(held.value)
        held.lent = False
    return held.value


def _check_type(key: str, wanted: ArrayType, value: Any) -> None:
    given = array_type_of(value).strong
    if given != wanted:
        raise VariableShapeError(f"variable {key!r} holds {wanted} but was given {given}")
