"""The values of variables, and the queues and accumulators, on one host.

A step owns the variables of its program while it is dispatched (`step_state`), so several steps may run concurrently
and none sees a variable half written. Between its calls the step keeps the values. A write to one of the variables
first returns all of the step's values to the store; a read takes the value from the store or the step. Both wait while
the step is being dispatched. An array that was handed out stays valid: it is marked `lent`, and the next program that
would overwrite its buffer gets a copy, once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import repeat
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import jit as jax_jit
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from dflow.lowering.programs.program import Program
from dflow.lowering.queues.resource_use import Held
from dflow.lowering.state.step_state import StepState
from dflow.lowering.state.store_lock import LOOK_S, STEP_S, Found, StoreLock
from dflow.lowering.values.computed import wait_until_computed
from dflow.lowering.values.first_value import Making, first_value
from dflow.lowering.values.held_value import READ, HeldValue, Owner, lost_value, owner_of, shown, within_the_step
from dflow.lowering.values.kept_shardings import is_spread, refuse_divided
from dflow.tracing.errors import DeadlineExceeded, DflowError, VariableError, VariableShapeError
from dflow.tracing.ir.types import ArrayType, array_type_of
from dflow.tracing.ir.updates import ASSIGNS, looked_up, operand_types, updated
from dflow.tracing.source import at, caller

#: Number of attempts to view a value that steps write meanwhile, before a snapshot is taken instead.
MOST_LOOKS = 5

#: Longest wait of a finalizer for the lock of the store, in s: the thread that holds the lock may wait for it.
FINALIZER_S = 1.0


class Store:
    """Named values. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._held: dict[str, HeldValue] = {}
        #: The values being created, each by one thread.
        self._making: dict[str, Making] = {}
        #: Reason and remedy of each value that was freed by `forget`.
        self._gone: dict[str, tuple[str, str]] = {}
        self._resources: dict[str, Held] = {}
        #: The lock of all this.
        self.turns = StoreLock()
        #: Keys of values to free when no step is being dispatched with them.
        self._dropped: deque[str] = deque()

    def create(self, key: str, type: ArrayType, make: Callable[[], Any], place: Sharding | None = None) -> bool:
        """Create the value `make()` under `key`, with sharding `place` if given. Return False if `key` exists.

        `make` runs without the lock, so it may use the store. Only threads that create the same key wait for it; when
        it fails, one of them calls its own `make`.

        Raises VariableError when the value under `key` or the value of `make()` has another type than `type`, or when
        `make` creates `key` itself; DeadlineExceeded when another thread's `make` takes longer than `MAKING_S`.
        """
        mine = Making()
        while True:
            with self.turns.lock:
                self._sweep()
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
            created = first_value(key, type, make, place)
            with self.turns.lock:
                self._held[key] = created
        finally:
            with self.turns.lock:
                del self._making[key]
            mine.ended.set()
        return True

    def __contains__(self, key: str) -> bool:
        return key in self._held

    def drop(self, key: str) -> None:
        """Free a value, if there is one. A finalizer may call this on any thread."""
        self._dropped.append(key)
        if self.turns.lock.acquire(timeout=FINALIZER_S):
            try:
                self._sweep()
            finally:
                self.turns.lock.release()

    def _sweep(self) -> None:
        """Free the dropped values, except those of steps being dispatched. The lock is held."""
        if self.turns.is_inside:
            return
        kept: list[str] = []
        while self._dropped:
            try:
                key = self._dropped.popleft()
            except IndexError:  # a finalizer that ran meanwhile took it
                break
            held = self._held.get(key)
            owner = None if held is None else owner_of(held)
            if owner is not None and owner.given is not None:
                kept.append(key)
                continue
            if owner is not None:
                owner.put_back()
            self._held.pop(key, None)
            self._gone.pop(key, None)
        self._dropped.extend(kept)

    def forget(self, key: str, reason: str, remedy: str) -> None:
        """Free a value that may still be used: a later use raises VariableError with this reason and remedy."""

        def forget() -> None:
            if key in self._held:
                self._claim([key])
                del self._held[key]
                self._gone[key] = reason, remedy

        self.alone(forget)

    def types(self) -> dict[str, ArrayType]:
        """Return the type of each variable, by key."""
        return {key: held.type for key, held in dict(self._held).items()}

    def place(self, key: str) -> Sharding | None:
        """Return the sharding of the value; None for one that JAX may put anywhere. Raises VariableError."""
        return self.shardings([key])[key]

    def shardings(self, keys: Iterable[str]) -> dict[str, Sharding | None]:
        """Return the shardings of the values; None for one that JAX may put anywhere. Raises VariableError."""
        values = {key: self.buffer(key) for key in keys}
        return {key: value.sharding if value.committed else None for key, value in values.items()}

    def read(self, key: str) -> jax.Array:
        """Return a copy of the value. It stays valid after later writes, and the caller may donate it."""
        return self.alone(lambda: jnp.copy(self._values([key])[0]))

    def wait(self, keys: Iterable[str]) -> None:
        """Wait until the values are computed. They are neither copied nor marked as aliased. Raises VariableError."""
        names = list(keys)
        jax.block_until_ready(self.alone(lambda: self._values(names)))

    def gather(self, key: str, indices: Any) -> jax.Array:
        """Return the rows at `indices`."""

        def gather() -> jax.Array:
            (value,) = self._values([key])
            rows: jax.Array = looked_up(value, _beside(indices, value))
            return rows

        return self.alone(gather)

    def snapshot(self, keys: Iterable[str]) -> dict[str, jax.Array]:
        """Return the values at one moment, between two programs. They stay valid; the caller must not donate them.

        The next program that would overwrite one of the buffers gets a copy instead. So nothing is copied here, except
        for a callback of the step that writes the value. Raises VariableError.
        """
        keys = list(keys)

        def snapshot() -> list[jax.Array]:
            values = self._values(keys)
            for number, held in enumerate(map(self._find, keys)):
                owner = owner_of(held)
                if owner is None or owner.given is None:
                    if owner is not None:
                        owner.put_back()
                    held.lent = True
                elif held.place == READ:
                    held.lent = True
                else:  # the caller is a callback of the step, or a signal handler
                    values[number] = jnp.copy(values[number])
            return values

        return dict(zip(keys, self.alone(snapshot), strict=True))

    def views(self, keys: Sequence[str]) -> list[jax.Array | npt.NDArray[Any]]:
        """Return the values at one moment, to be sent and then freed.

        For values on the CPU, waits until they are computed and returns NumPy views of their buffers. While a view
        exists, a program that would overwrite its buffer writes elsewhere, which costs a copy. For values on other
        devices, or when steps keep overwriting them, returns the arrays of `snapshot`. Raises VariableError.
        """
        for _ in range(MOST_LOOKS):
            values, are_views = self.alone(lambda: self._views_now(keys))
            if are_views:
                return values
            if not all(map(_is_of_cpu, values)):
                break
            with suppress(RuntimeError):  # a program has overwritten a value since
                wait_until_computed(values)
        found = self.snapshot(keys)
        return [found[key] for key in keys]

    def _views_now(self, keys: Sequence[str]) -> tuple[list[Any], bool]:
        """Return the values, as NumPy views if all are on the CPU and computed, and whether they are views."""
        values: list[Any] = self._values(keys)
        if all(_is_of_cpu(value) and value.is_ready() for value in values):
            return [np.asarray(value) for value in values], True
        return values, False

    def replace(self, values: Mapping[str, jax.Array]) -> None:
        """Replace all of these values in one moment, or none. The store owns the arrays from then on.

        Raises VariableError when a variable does not exist, and VariableShapeError when a value has another type.
        """

        def replace() -> None:
            found = self._claim(values)
            for held, (key, value) in zip(found, values.items(), strict=True):
                _check_type(key, held.type, value)
            for held in found:
                held.lent = False
            # In C code alone, which an interrupt cannot end halfway.
            deque(map(setattr, found, repeat("value"), values.values()), maxlen=0)

        self.alone(replace)

    def write(self, key: str, value: Any) -> None:
        """Replace the value by a copy of `value`. Raises VariableShapeError when its type differs."""
        held = self._find(key)
        _check_type(key, held.type, value)
        self.replace({key: _placed(key, jnp.array(value, copy=True), self.buffer(key))})

    def update(self, key: str, kind: str, *operands: Any) -> None:
        """Change the value in place; `kind` is a key of `updates.KINDS`. Raises VariableShapeError."""
        if kind == "assign":
            self.write(key, *operands)
            return
        held = self._find(key)
        given = [array_type_of(operand) for operand in operands]
        for wanted, operand in zip(operand_types(kind, held.type, given), operands, strict=True):
            _check_type(key, wanted.strong, operand)
        value = self.buffer(key)
        place = value.sharding if value.committed and is_spread(value.sharding) else None
        if not value.committed:
            for operand in operands:
                refuse_divided(key, operand)
        moved = [_beside(operand, value) for operand in operands]
        if place is not None and kind in ASSIGNS:
            moved = [jax.device_put(operand, place) for operand in operands]
        self.call(_in_place(kind, place), [key], [], moved)

    def call(
        self, program: Program, writes: Sequence[str], reads: Sequence[str], operands: Sequence[Any]
    ) -> Sequence[jax.Array]:
        """Run a program on variables and operands, keep the variables' new values and return its other results."""
        if not writes and not reads:
            return program(*operands)
        step = StepState(self, writes, reads, "part of a function", program.keeps)
        results: Sequence[jax.Array] = program.run(
            lambda call: step.run(call, operands),
            lambda: [*map(self.buffer, (*writes, *reads)), *operands],
        )
        return results

    def create_resource(self, key: str, resource: Held) -> None:
        """Hold a queue or an accumulator under `key`."""
        with self.turns.lock:
            self._resources[key] = resource

    def drop_resource(self, key: str) -> None:
        """Remove a queue or an accumulator, which may still serve its waiters."""
        self._resources.pop(key, None)  # without the lock: finalizers call this

    def resource(self, key: str) -> Held:
        """Return the queue or accumulator under `key`. Raises DflowError when there is none."""
        held = self._resources.get(key)
        if held is None:
            raise DflowError(f"no resource {key!r} is held here; there are {sorted(self._resources) or 'none'}")
        return held

    def alone(self, do: Callable[[], Found]) -> Found:
        """Like `StoreLock.alone`, after dropped values are freed."""
        with self.turns.lock:
            self._sweep()
            found = self.turns.alone(do)
        # Not `return` inside the `with`: an interrupt right after the call would leave the lock acquired.
        return found  # noqa: RET504

    def _claim(self, keys: Collection[str]) -> list[HeldValue]:
        """Return the entries of `keys`, with their values returned to the store. Called in a critical section.

        Raises VariableError for a key that does not exist, DeadlineExceeded when a step holds one of the values for
        longer than `STEP_S`.
        """
        with _Wait(self) as wait:
            while True:
                found = [self._find(key) for key in keys]
                owners = [owner for owner in map(owner_of, found) if owner is not None]
                busy = next((owner for owner in owners if owner.given is not None), None)
                if busy is None:
                    for owner in owners:
                        owner.put_back()
                    return found
                if busy.is_mine():
                    raise within_the_step()
                wait(busy, keys, found)

    def _values(self, keys: Collection[str]) -> list[jax.Array]:
        """Return the values at one moment, from the store or from steps. Called in a critical section.

        Raises like `claim_values`.
        """
        with _Wait(self) as wait:
            while True:
                found = [self._find(key) for key in keys]
                owners = [None if held.place == READ else owner_of(held) for held in found]
                # One call of `readable` for each step: between two, the step might end.
                written = {owner: owner.readable() for owner in dict.fromkeys(owners) if owner is not None}
                busy = next((owner for owner, values in written.items() if values is None), None)
                if busy is None:
                    break
                wait(busy, keys, found)
        values: list[jax.Array] = []
        for key, held, owner in zip(keys, found, owners, strict=True):
            in_step = None if owner is None else written[owner]
            values.append(held.value if in_step is None else in_step[held.place])
            if values[-1].is_deleted():
                raise lost_value(key)
        return values

    def buffer(self, key: str) -> jax.Array:
        """Return the array of the value, which a call being dispatched may delete: use only its sharding.

        Raises VariableError.
        """
        held = self._find(key)
        owner = owner_of(held)
        written = None if owner is None else owner.written
        return held.value if written is None or held.place == READ else written[held.place]

    def claim_values(self, keys: Collection[str]) -> list[HeldValue]:
        """Like `_claim`, and also raise VariableError if a buffer was donated to a step that failed."""
        found = self._claim(keys)
        for key, held in zip(keys, found, strict=True):
            if held.value.is_deleted():
                raise lost_value(key)
        return found

    def is_busy(self, keys: Iterable[str]) -> bool:
        """Whether a thread is dispatching a program that uses one of these variables."""
        for key in keys:
            held = self._held.get(key)
            owner = held.at if held is not None else None
            if owner is not None and owner.given is not None:
                return True
        return False

    def are_wanted(self, keys: Iterable[str], now: float) -> bool:
        """Whether a thread waits for one of these variables; `now` is the monotonic time."""
        return any(held is not None and held.wanted > now for held in map(self._held.get, keys))

    def _find(self, key: str) -> HeldValue:
        held = self._held.get(key)
        if held is None and key in self._gone:
            reason, remedy = self._gone[key]
            raise VariableError(f"{reason}{at(caller())}\n  {remedy}")
        if held is None:
            there = sorted(map(shown, self._held)) or "none"
            raise VariableError(f"no variable {shown(key)!r} is held here; there are {there}")
        return held


class _Wait:
    """A thread's wait, in a critical section, for steps being dispatched. It marks their variables, so they yield."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: set[Owner] = set()
        self._marked: list[Any] = []
        self._until = 0.0

    def __enter__(self) -> _Wait:
        return self

    def __call__(self, busy: Owner, keys: Collection[str], found: Sequence[HeldValue]) -> None:
        """Wait until `busy` or another step notifies. The first call for a step only marks it, as it may have ended."""
        now = time.monotonic()
        self._until = self._until or now + STEP_S
        self._marked = [busy, *found]
        for one in self._marked:
            one.wanted = now + LOOK_S
        if busy not in self._seen:
            self._seen.add(busy)
            return
        left = self._until - now
        if left <= 0:
            name = next(key for key, held in zip(keys, found, strict=True) if held.at is busy)
            raise DeadlineExceeded(
                f"variable {shown(name)!r} is asked for, but a call of {busy.name}, which has it, has not ended within "
                f"{STEP_S:g} s{at(caller())}\n  does a callback of that call wait for this thread?"
            )
        self._store.turns.pause(self._store.turns.changed, min(left, LOOK_S))

    def __exit__(self, *_: object) -> None:
        for one in self._marked:
            one.wanted = 0.0
        if self._marked:
            self._store.turns.changed.notify_all()  # other waiting threads mark their variables again


def _check_again(key: str, held: HeldValue, type: ArrayType) -> None:
    if held.type != type:
        raise VariableError(
            f"variable {key!r} exists and holds {held.type}, but is created again with {type}; "
            "give one of them another name"
        )


def _placed(key: str, value: jax.Array, before: jax.Array) -> jax.Array:
    """Return the value with the sharding of the previous one. Raises like `refuse_divided`."""
    if not before.committed:
        refuse_divided(key, value)
        return value
    placed: jax.Array = jax.device_put(value, before.sharding)
    return placed


def _beside(operand: Any, value: jax.Array) -> Any:
    """Return an operand of an update on the devices of the value: replicated over a mesh, else sharded like it."""
    if not (isinstance(operand, jax.Array) and value.committed and operand.committed):
        return operand
    if operand.sharding.device_set == value.sharding.device_set:
        return operand
    if isinstance(value.sharding, NamedSharding):
        return jax.device_put(operand, NamedSharding(value.sharding.mesh, PartitionSpec()))
    return jax.device_put(operand, value.sharding)


@cache
def _in_place(kind: str, place: Sharding | None) -> Program:
    """Return the program of an update in place; its result has the sharding `place`, if that is given."""

    def update(written: Sequence[Any], read: Sequence[Any], *operands: Any) -> tuple[list[Any], list[Any]]:
        return [updated(kind, *written, *operands)], []

    return Program(jax_jit(update, donate_argnums=0, out_shardings=place))


def _is_of_cpu(value: jax.Array) -> bool:
    return len(value.devices()) == 1 and next(iter(value.devices())).platform == "cpu"


def _check_type(key: str, wanted: ArrayType, value: Any) -> None:
    given = array_type_of(value).strong
    if given != wanted:
        raise VariableShapeError(f"variable {key!r} holds {wanted} but was given {given}")
