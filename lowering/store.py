"""The values of variables, and the queues and accumulators, on one host.

A step owns the variables of a program for the moment of its dispatch (`StepState`), so several steps may run at once
and none sees a variable half written; between its calls it may keep their values. Whoever asks for one of these
(`claim`) has all of them put back first, and waits while the step is dispatched. An array that has been handed out
stays valid: it is marked `lent`, and the next program that would overwrite its buffer gets a copy, once.

Invariant, by which no two wait for each other: the lock of the store is held for moments only. Who holds it tries the
lock of a step and never waits for it; who waits for a step has let go of the store's.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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


@dataclass(slots=True, eq=False)
class _Held:
    value: jax.Array
    type: ArrayType
    lent: bool = False
    #: The step that has the value now.
    at: StepState | None = None
    #: How many wait for the step.
    wanted: int = 0


#: A variable of this size is made before the next one is begun.
_LARGE_BYTES = 1 << 20

#: How long to wait for a value that another thread makes, in s.
MAKING_S = 600.0

#: How long to wait for a variable while a step is dispatched that has it, in s.
STEP_S = 600.0

#: How long a step gives way to others before its next call, in s: bounded, for it may be what they wait for.
PATIENCE_S = 0.05

#: How long a finalizer waits for the lock of the store, in s: bounded, for it may stand in the way of who has it.
FINALIZER_S = 1.0


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
        #: Tells those who wait that a step was dispatched, and steps that nobody waits any more.
        self._changed = threading.Condition(self._lock)
        #: What is to be let go of when no step has it.
        self._dropped: deque[str] = deque()

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
        """Let go of a value; nothing happens when there is none. A finalizer may, on whatever thread it runs."""
        self._dropped.append(key)
        if self._lock.acquire(timeout=FINALIZER_S):
            try:
                self._sweep()
            finally:
                self._lock.release()

    def _sweep(self) -> None:
        """Let go of what was dropped, other than what a step has that is dispatched now."""
        for _ in range(len(self._dropped)):
            key = self._dropped.popleft()
            held = self._held.get(key)
            at = None if held is None else held.at
            if at is not None and (at.written is None or not at.gives_back()):
                self._dropped.append(key)
                continue
            self._held.pop(key, None)
            self._gone.pop(key, None)

    def forget(self, key: str, reason: str, remedy: str) -> None:
        """Let go of a value before its last user is gone: who asks for it gets a VariableError that says these two."""
        with self._lock:
            if key in self._held:
                self.claim([key])
                del self._held[key]
                self._gone[key] = reason, remedy

    def types(self) -> dict[str, ArrayType]:
        """The type of everything held, by key."""
        return {key: held.type for key, held in dict(self._held).items()}

    def place(self, key: str) -> Sharding | None:
        """Where the value is to stay; None where it may go wherever a program puts it."""
        return self.shardings([key])[key]

    def read(self, key: str) -> jax.Array:
        """A copy of the value, which is the caller's: it stays valid whatever is written, and may be donated."""
        with self._lock:
            (held,) = self.claim_values([key])
            return jnp.copy(held.value)

    def snapshot(self, keys: Iterable[str]) -> dict[str, jax.Array]:
        """The values as of one moment, between two programs; they stay valid, and are not the caller's to donate.

        Nothing is copied here: the next program that would overwrite one of the buffers gets a copy instead. Raises
        VariableError.
        """
        with self._lock:
            keys = list(keys)
            found = self.claim_values(keys)
            for held in found:
                held.lent = True
            return {key: held.value for key, held in zip(keys, found, strict=True)}

    def wait(self, keys: Iterable[str]) -> None:
        """Wait until the values are computed. They are neither copied nor lent. Raises VariableError."""
        with self._lock:
            values = [held.value for held in self.claim_values(list(keys))]
        jax.block_until_ready(values)

    def shardings(self, keys: Iterable[str]) -> dict[str, Sharding | None]:
        """Where the values are; None for one that JAX may put anywhere. Raises VariableError."""
        with self._lock:
            keys = list(keys)
            values = [held.value for held in self.claim(keys)]
        return {key: value.sharding if value.committed else None for key, value in zip(keys, values, strict=True)}

    def replace(self, values: Mapping[str, jax.Array]) -> None:
        """Replace all of these values in one moment, or none; the arrays are the store's from now on.

        Raises VariableError when one is not held, and VariableShapeError when one has another type.
        """
        with self._lock:
            found = self.claim(values)
            for held, (key, value) in zip(found, values.items(), strict=True):
                _check_type(key, held.type, value)
            for held, value in zip(found, values.values(), strict=True):
                held.value, held.lent = value, False

    def write(self, key: str, value: Any) -> None:
        """Replace the value. Raises VariableShapeError when the type is another."""
        with self._lock:
            (held,) = self.claim([key])
            _check_type(key, held.type, value)
            held.value, held.lent = _placed(jnp.array(value, copy=True), held), False

    def gather(self, key: str, indices: Any) -> jax.Array:
        """The rows at `indices`."""
        with self._lock:
            (held,) = self.claim_values([key])
            rows: jax.Array = looked_up(held.value, _beside(indices, held))
            return rows

    def update(self, key: str, kind: str, *operands: Any) -> None:
        """Change the value in place; `kind` is a key of `updates.KINDS`. Raises VariableShapeError."""
        if kind == "assign":
            self.write(key, *operands)
            return
        with self._lock:
            (held,) = self.claim_values([key])
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
        if not writes and not reads:
            return program(*operands)
        state = StepState(self, writes, reads)
        # As C code puts them down, so that an interrupt right after the call finds them.
        given: list[Sequence[jax.Array]] = []
        try:
            with state.lock:
                written = state.take()
                state.written = None
                try:
                    program.run_into(given, [*written, *state.read, *operands])
                finally:
                    state.written = list(given[0][: len(written)]) if given else written
                    with self._lock:
                        state.put_back()
        finally:
            if state.wanted:
                state.tell()
        return given[0][len(writes) :]

    def create_resource(self, key: str, resource: Held) -> None:
        """Hold a queue or an accumulator under `key`."""
        with self._lock:
            self._resources[key] = resource

    def drop_resource(self, key: str) -> None:
        """Let go of a queue or an accumulator, which may still serve those that wait in it."""
        self._resources.pop(key, None)  # without the lock: a finalizer does this

    def resource(self, key: str) -> Held:
        """The queue or accumulator under `key`. Raises DflowError when there is none."""
        held = self._resources.get(key)
        if held is None:
            raise DflowError(f"no resource {key!r} is held here; there are {sorted(self._resources) or 'none'}")
        return held

    def claim(self, keys: Collection[str]) -> list[_Held]:
        """What is held under `keys`, the values here; the caller has the lock, which is let go of to wait for steps.

        Raises VariableError for what is not held, DeadlineExceeded when a step has it for longer than `STEP_S`.
        """
        self._sweep()
        wanted: dict[int, Any] = {}
        until = 0.0
        try:
            while True:
                found = [self._find(key) for key in keys]
                busy = next((held.at for held in found if held.at is not None and not held.at.gives_back()), None)
                if busy is None:
                    return found
                until = until or time.monotonic() + STEP_S
                if id(busy) not in wanted:
                    # And look again, for it may have ended before it could know.
                    among: list[Any] = [busy, *found]
                    for one in among:
                        if id(one) not in wanted:
                            wanted[id(one)] = one
                            one.wanted += 1
                elif not self._changed.wait(until - time.monotonic()) and time.monotonic() >= until:
                    name = next(key for key, held in zip(keys, found, strict=True) if held.at is busy)
                    raise DeadlineExceeded(
                        f"variable {shown(name)!r} is asked for, but a call of {busy.name}, which has it, has not "
                        f"ended within {STEP_S:g} s{at(caller())}\n"
                        "  does a callback of that call wait for this thread?"
                    )
        finally:
            if wanted:
                for one in wanted.values():
                    one.wanted -= 1
                self._changed.notify_all()

    def claim_values(self, keys: Collection[str]) -> list[_Held]:
        """As `claim`, for who needs the values. Raises VariableError too when a step that failed took one along."""
        found = self.claim(keys)
        for key, held in zip(keys, found, strict=True):
            if held.value.is_deleted():
                raise VariableError(
                    f"the value of variable {shown(key)!r} was lost, since a step that writes it failed as it ran"
                    f"{at(caller())}\n  assign it a new value, such as from what was saved last"
                )
        return found

    def _are_wanted(self, keys: Iterable[str]) -> bool:
        return any(held is not None and held.wanted for held in map(self._held.get, keys))

    def _find(self, key: str) -> _Held:
        held = self._held.get(key)
        if held is None and key in self._gone:
            reason, remedy = self._gone[key]
            raise VariableError(f"{reason}{at(caller())}\n  {remedy}")
        if held is None:
            there = sorted(map(shown, self._held)) or "none"
            raise VariableError(f"no variable {shown(key)!r} is held here; there are {there}")
        return held

    def state_of(self, writes: Sequence[str], reads: Sequence[str], name: str = "a function") -> StepState:
        """The state of a step, called `name`, that writes and reads these variables."""
        return StepState(self, writes, reads, name)


class StepState:
    """The variables of one compiled step, whose values stay with it from call to call.

    They stay as the very lists that its program takes and gives, so that a call costs nothing for each variable. It
    does not keep the program, which may be gone before another step asks for the values. A call holds `lock` and takes
    `written` away, leaving None, until it has the new values; if `wanted` after it has let go of the lock, it `tell`s.
    """

    __slots__ = ("_store", "held", "lock", "name", "read", "reads", "wanted", "writes", "written")

    def __init__(
        self, store: Store, writes: Sequence[str], reads: Sequence[str], name: str = "part of a function"
    ) -> None:
        self._store, self.name = store, name
        self.lock = threading.RLock()
        self.writes, self.reads = tuple(writes), tuple(reads)
        self.held: tuple[list[_Held], list[_Held]] = [], []
        #: The values, while they are here.
        self.written: list[Any] | None = None
        self.read: list[Any] = []
        #: How many wait for the values.
        self.wanted = 0

    def ready(self) -> None:
        """Before a call: give way to those who wait for the values, and wait for a call on another thread.

        Raises DeadlineExceeded.
        """
        store = self._store
        if self.wanted:
            with store._changed:
                store._changed.wait_for(lambda: not self.wanted, PATIENCE_S)
        if self.written is None and any(self.held):
            if not self.lock.acquire(timeout=STEP_S):
                raise DeadlineExceeded(
                    f"{self.name} has been in a call on another thread for {STEP_S:g} s{at(caller())}\n"
                    "  does a callback of that call wait for this thread?"
                )
            self.lock.release()

    def tell(self) -> None:
        """Tell those who wait that the values may be had."""
        with self._store._changed:
            self._store._changed.notify_all()

    def values(self) -> tuple[list[Any], list[Any]]:
        """The values written and the values read, to know their types and places by."""
        self.ready()
        with self.lock:
            written = self.take() if self.written is None else self.written
            return list(written), list(self.read)

    def take(self) -> list[Any]:
        """Take the values from the store, those written as its own, and give these; the caller holds `lock` alone."""
        store = self._store
        with store._lock:
            keys = (*self.writes, *self.reads)
            if not any(self.held) and store._are_wanted(keys):
                store._changed.wait(PATIENCE_S)
            found = store.claim_values(keys)
            written, read = found[: len(self.writes)], found[len(self.writes) :]
            self.read = [held.value for held in read]
            values = [_own(held) for held in written]
            self.held, self.written = (written, read), values
            for held in found:
                held.at = self
        return values

    def after_failure(self) -> None:
        """Let the store say of values that a failed call took along that they are lost; the caller holds `lock`."""
        if self.written is not None and any(value.is_deleted() for value in self.written):
            with self._store._lock:
                self.put_back()

    def gives_back(self) -> bool:
        """Put the values back unless a call is under way on another thread; the caller holds the store's lock.

        Raises VariableError when it is under way on this one.
        """
        if not self.lock.acquire(blocking=False):
            return False
        try:
            self.put_back()
        finally:
            self.lock.release()
        return True

    def put_back(self) -> None:
        """Give the store its values again; the caller holds both locks."""
        written, read = self.held
        if self.written is None and (written or read):
            raise VariableError(
                f"a variable is asked for within the very step that uses it, such as by a callback{at(caller())}\n"
                "  pass the callback what it is to see"
            )
        for held, value in zip(written, self.written or (), strict=True):
            held.value, held.lent = value, False
        for held in (*written, *read):
            held.at = None
        self.held, self.written, self.read = ([], []), None, []


def shown(key: str) -> str:
    """The name of a variable, without what tells it apart from others of that name."""
    return key.partition("#")[0]


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
