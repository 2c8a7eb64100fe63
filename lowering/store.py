"""The values of variables, and the queues and accumulators, on one host.

A step owns the variables of a program while it is dispatched (`StepState`), so several steps may run at once and none
sees a variable half written; between its calls it keeps their values. Whoever writes one of these has them all put back
first; who reads looks where the value is; both wait for a step that is being dispatched. An array that has been handed
out stays valid: it is marked `lent`, and the next program that would overwrite its buffer gets a copy, once.

Invariants. The lock is held for moments, in which nothing of the user's is run, and never while waiting. Where a value
is can be told at every line, for an interrupt or a handler of a signal may come at any: it is in the step that has it
`at`, from when that step has `written` until it has none.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from threading import get_ident
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import jit as jax_jit
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from dflow.lowering.program import Program
from dflow.lowering.resource_use import Held
from dflow.tracing.errors import DeadlineExceeded, DflowError, VariableError, VariableShapeError
from dflow.tracing.source import at, caller
from dflow.tracing.types import ArrayType, array_type_of
from dflow.tracing.updates import looked_up, operand_types, updated

Found = TypeVar("Found")

#: The place of a variable that a step only reads.
_READ = -1


@dataclass(slots=True, eq=False)
class _Held:
    value: jax.Array
    type: ArrayType
    lent: bool = False
    #: The step that may have the value now, and at which place of what it writes.
    at: StepState | None = None
    place: int = _READ
    #: Until when it is known that someone waits for the step, by the monotonic clock.
    wanted: float = 0.0


#: A variable of this size is made before the next one is begun.
_LARGE_BYTES = 1 << 20

#: How long to wait for a value that another thread makes, in s.
MAKING_S = 600.0

#: How long to wait for a variable while a step is dispatched that has it, in s.
STEP_S = 600.0

#: How long a step gives way to others before its next call, in s: bounded, for it may be what they wait for.
PATIENCE_S = 0.05

#: After how long someone who waits looks again, in s: an interrupt may come before a step has told those who wait.
LOOK_S = 1.0

#: How often a value is looked at that others write meanwhile, before it is lent instead.
MOST_LOOKS = 5

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
        #: Whether someone has the lock who is not to be disturbed, by a handler of a signal on the same thread.
        self._is_inside = False
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
        """Let go of what was dropped, other than what a step has that is dispatched now; the caller has the lock."""
        if self._is_inside:
            return
        kept: list[str] = []
        while self._dropped:
            try:
                key = self._dropped.popleft()
            except IndexError:  # a finalizer came first
                break
            held = self._held.get(key)
            owner = None if held is None else _owner(held)
            if owner is not None and owner.given is not None:
                kept.append(key)
                continue
            if owner is not None:
                owner.put_back()
            self._held.pop(key, None)
            self._gone.pop(key, None)
        self._dropped.extend(kept)

    def forget(self, key: str, reason: str, remedy: str) -> None:
        """Let go of a value before its last user is gone: who asks for it gets a VariableError that says these two."""

        def forget() -> None:
            if key in self._held:
                self._claim([key])
                del self._held[key]
                self._gone[key] = reason, remedy

        self._alone(forget)

    def types(self) -> dict[str, ArrayType]:
        """The type of everything held, by key."""
        return {key: held.type for key, held in dict(self._held).items()}

    def place(self, key: str) -> Sharding | None:
        """Where the value is to stay; None where it may go wherever a program puts it."""
        return self.shardings([key])[key]

    def shardings(self, keys: Iterable[str]) -> dict[str, Sharding | None]:
        """Where the values are; None for one that JAX may put anywhere. Raises VariableError."""
        values = {key: self.buffer(key) for key in keys}
        return {key: value.sharding if value.committed else None for key, value in values.items()}

    def read(self, key: str) -> jax.Array:
        """A copy of the value, which is the caller's: it stays valid whatever is written, and may be donated."""
        return self._alone(lambda: jnp.copy(self._values([key])[0]))

    def wait(self, keys: Iterable[str]) -> None:
        """Wait until the values are computed. They are neither copied nor lent. Raises VariableError."""
        names = list(keys)
        jax.block_until_ready(self._alone(lambda: self._values(names)))

    def gather(self, key: str, indices: Any) -> jax.Array:
        """The rows at `indices`."""

        def gather() -> jax.Array:
            (value,) = self._values([key])
            rows: jax.Array = looked_up(value, _beside(indices, value))
            return rows

        return self._alone(gather)

    def snapshot(self, keys: Iterable[str]) -> dict[str, jax.Array]:
        """The values as of one moment, between two programs; they stay valid, and are not the caller's to donate.

        Nothing is copied here, but for a callback of the very step that writes it: the next program that would
        overwrite one of the buffers gets a copy instead. Raises VariableError.
        """
        keys = list(keys)

        def snapshot() -> list[jax.Array]:
            values = self._values(keys)
            for number, held in enumerate(map(self._find, keys)):
                owner = _owner(held)
                if owner is None or owner.given is None:
                    if owner is not None:
                        owner.put_back()
                    held.lent = True
                elif held.place == _READ:
                    held.lent = True
                else:  # asked for by a callback of the step or a handler of a signal
                    values[number] = jnp.copy(values[number])
            return values

        return dict(zip(keys, self._alone(snapshot), strict=True))

    def views(self, keys: Sequence[str]) -> list[jax.Array | npt.NDArray[Any]]:
        """The values as of one moment, to be sent somewhere and let go of.

        Those of the CPU are the very memory: a program that would overwrite it leaves it alone while a view is held, at
        the price of a copy. Those of other devices are as from `snapshot`. Waits until they are computed. Raises
        VariableError.
        """
        for _ in range(MOST_LOOKS):
            values, are_views = self._alone(lambda: self._views_now(keys))
            if are_views:
                return values
            if not all(map(_is_of_cpu, values)):
                break
            with suppress(RuntimeError):  # a program has overwritten one by now
                jax.block_until_ready(values)
        found = self.snapshot(keys)
        return [found[key] for key in keys]

    def _views_now(self, keys: Sequence[str]) -> tuple[list[Any], bool]:
        """The values, as views if they are computed, in `_alone`; and whether they are views."""
        values: list[Any] = self._values(keys)
        if all(_is_of_cpu(value) and value.is_ready() for value in values):
            return [np.asarray(value) for value in values], True
        return values, False

    def replace(self, values: Mapping[str, jax.Array]) -> None:
        """Replace all of these values in one moment, or none; the arrays are the store's from now on.

        Raises VariableError when one is not held, and VariableShapeError when one has another type.
        """

        def replace() -> None:
            found = self._claim(values)
            for held, (key, value) in zip(found, values.items(), strict=True):
                _check_type(key, held.type, value)
            for held in found:
                held.lent = False
            # By C code alone, which no interrupt can end halfway.
            deque(map(setattr, found, repeat("value"), values.values()), maxlen=0)

        self._alone(replace)

    def write(self, key: str, value: Any) -> None:
        """Replace the value. Raises VariableShapeError when the type is another."""
        held = self._find(key)
        _check_type(key, held.type, value)
        self.replace({key: _placed(jnp.array(value, copy=True), self.buffer(key))})

    def update(self, key: str, kind: str, *operands: Any) -> None:
        """Change the value in place; `kind` is a key of `updates.KINDS`. Raises VariableShapeError."""
        if kind == "assign":
            self.write(key, *operands)
            return
        held = self._find(key)
        given = [array_type_of(operand) for operand in operands]
        for wanted, operand in zip(operand_types(kind, held.type, given), operands, strict=True):
            _check_type(key, wanted.strong, operand)
        self.call(_in_place(kind), [key], [], [_beside(operand, self.buffer(key)) for operand in operands])

    def call(
        self, program: Program, writes: Sequence[str], reads: Sequence[str], operands: Sequence[Any]
    ) -> Sequence[jax.Array]:
        """Run a program on variables and operands, keep what it writes, and give its other results."""
        if not writes and not reads:
            return program(*operands)
        return StepState(self, writes, reads, "part of a function", program.keeps).run_program(program, operands)

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

    def _alone(self, do: Callable[[], Found]) -> Found:
        """Do what nobody else is to see half done. Raises VariableError within the same on this thread."""
        with self._lock:
            if self._is_inside:
                raise VariableError(
                    f"a handler of a signal uses variables while the thread it came to is about to use some"
                    f"{at(caller())}\n  have the handler set a flag, and look at the flag between steps"
                )
            self._sweep()
            self._is_inside = True
            try:
                found = do()
            finally:
                self._is_inside = False
            return found

    def pause(self, condition: threading.Condition, seconds: float) -> None:
        """Wait for a condition of this store, in `_alone`, while others have the lock."""
        self._is_inside = False
        try:
            condition.wait(seconds)
        finally:
            self._is_inside = True

    def _claim(self, keys: Collection[str]) -> list[_Held]:
        """What is held under `keys`, with the values here, in `_alone`.

        Raises VariableError for what is not held, DeadlineExceeded when a step has it for longer than `STEP_S`.
        """
        with _Wait(self) as wait:
            while True:
                found = [self._find(key) for key in keys]
                owners = [owner for owner in map(_owner, found) if owner is not None]
                busy = next((owner for owner in owners if owner.given is not None), None)
                if busy is None:
                    for owner in owners:
                        owner.put_back()
                    return found
                if busy.is_mine():
                    raise _within_the_step()
                wait(busy, keys, found)

    def _values(self, keys: Collection[str]) -> list[jax.Array]:
        """The values of one moment, wherever they are, in `_alone`; raises as `_claim`, and for what was lost."""
        with _Wait(self) as wait:
            while True:
                found = [self._find(key) for key in keys]
                owners = [None if held.place == _READ else _owner(held) for held in found]
                # Once for each step, which may end at this moment.
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
                raise _lost(key)
        return values

    def buffer(self, key: str) -> jax.Array:
        """The array that is the value, or was when the step began that is being dispatched: to know where it lies.

        Raises VariableError.
        """
        held = self._find(key)
        owner = _owner(held)
        written = None if owner is None else owner.written
        return held.value if written is None or held.place == _READ else written[held.place]

    def claim_values(self, keys: Collection[str]) -> list[_Held]:
        """As `_claim`, for who needs the values. Raises VariableError too for what a failed step took along."""
        found = self._claim(keys)
        for key, held in zip(keys, found, strict=True):
            if held.value.is_deleted():
                raise _lost(key)
        return found

    def is_busy(self, keys: Iterable[str]) -> bool:
        """Whether a program is being dispatched, on some thread, that has one of these variables."""
        for key in keys:
            held = self._held.get(key)
            owner = held.at if held is not None else None
            if owner is not None and owner.given is not None:
                return True
        return False

    def are_wanted(self, keys: Iterable[str], now: float) -> bool:
        """Whether someone waits for one of these variables."""
        return any(held is not None and held.wanted > now for held in map(self._held.get, keys))

    def _find(self, key: str) -> _Held:
        held = self._held.get(key)
        if held is None and key in self._gone:
            reason, remedy = self._gone[key]
            raise VariableError(f"{reason}{at(caller())}\n  {remedy}")
        if held is None:
            there = sorted(map(shown, self._held)) or "none"
            raise VariableError(f"no variable {shown(key)!r} is held here; there are {there}")
        return held


class _Wait:
    """One who waits, in `_alone`, for steps to be dispatched: they know it, and give way."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: set[StepState] = set()
        self._marked: list[Any] = []
        self._until = 0.0

    def __enter__(self) -> _Wait:
        return self

    def __call__(self, busy: StepState, keys: Collection[str], found: Sequence[_Held]) -> None:
        """Wait for a change: that of `busy`, or another. The first time only says so, for it may have ended by now."""
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
        self._store.pause(self._store._changed, min(left, LOOK_S))

    def __exit__(self, *_: object) -> None:
        for one in self._marked:
            one.wanted = 0.0
        if self._marked:
            self._store._changed.notify_all()  # of whom others that wait mark theirs again


class StepState:
    """The variables of one compiled step, whose values stay with it from call to call.

    They stay as the very lists that its program takes and gives, so that a call costs nothing for each variable. It
    does not keep the program, which may be gone before another step asks for the values.

    `given` is there while a call is dispatched, on the thread `thread`: C code puts the results into it, so that they
    are found whenever an interrupt comes. Until then `written` has the values from before, which are gone once the
    program has overwritten them, unless it `keeps` them.
    """

    __slots__ = (
        "_callers",
        "_ended",
        "_gives_tree",
        "_store",
        "given",
        "held",
        "keeps",
        "name",
        "read",
        "reads",
        "thread",
        "wanted",
        "writes",
        "written",
    )

    def __init__(self, store: Store, writes: Sequence[str], reads: Sequence[str], name: str, keeps: bool) -> None:
        self._store, self.name, self.keeps = store, name, keeps
        self.writes, self.reads = tuple(writes), tuple(reads)
        self.held: tuple[list[_Held], list[_Held]] = [], []
        #: The values, while they are here.
        self.written: Sequence[Any] | None = None
        self.read: list[Any] = []
        self.given: list[Any] | None = None
        self.thread = 0
        #: Until when it is known that someone waits for the values, and how many wait to call the step.
        self.wanted, self._callers = 0.0, 0
        self._ended: threading.Condition | None = None
        self._gives_tree = False

    def run(self, call: Callable[..., Any], constants: Any, args: Sequence[Any]) -> Any:
        """The result of `call(written, read, constants, *args)`, which gives the new values and the result."""
        given: list[Any] = []
        store, me = self._store, get_ident()
        try:
            with store._lock:
                while self.given is not None or self.written is None or self.wanted or store._is_inside:
                    store._alone(self._prepare)
                self._gives_tree, self.thread, self.given = True, me, given
            given.extend(map(call, (self.written,), (self.read,), (constants,), *zip(args)))
        finally:
            # Without a call up to where `given` is gone, for an interrupt comes at calls.
            if self.given is given:
                if given:
                    self.written = given[0][0]
                self.given = None
                if self.wanted or self._callers or not given:
                    self._after(given)
        return given[0][1]

    def run_program(self, program: Program, operands: Sequence[Any]) -> Sequence[jax.Array]:
        """The results of a program, other than the new values."""
        given: list[Any] = []
        store, me, count = self._store, get_ident(), len(self.writes)
        try:
            with store._lock:
                while self.given is not None or self.written is None or self.wanted or store._is_inside:
                    store._alone(self._prepare)
                self._gives_tree, self.thread, self.given = False, me, given
            program.run_into(given, [*(self.written or ()), *self.read, *operands])
        finally:
            if self.given is given:
                if given:
                    self.written = given[0][:count]
                self.given = None
                if self.wanted or self._callers or not given:
                    self._after(given)
        results: Sequence[jax.Array] = given[0][count:]
        return results

    def values(self) -> tuple[list[Any], list[Any]]:
        """The values written and the values read, to know their types and places by."""

        def values() -> tuple[list[Any], list[Any]]:
            self._prepare()
            return list(self.written or ()), list(self.read)

        return self._store._alone(values)

    def is_mine(self) -> bool:
        """Whether the call that is dispatched is on this thread: who asks is a callback of it, or comes by a signal."""
        return self.thread == get_ident()

    def readable(self) -> Sequence[Any] | None:
        """The written variables' values, in the store's `_alone`; None when only the end of a call will tell.

        Raises VariableError when that is a call on this very thread.
        """
        given, written = self.given, self.written
        if given is None or written is None:
            return written
        is_mine = self.is_mine()
        if not (is_mine or self.keeps):
            return None
        if given:
            renewed: Sequence[Any] = given[0][0] if self._gives_tree else given[0]
            return renewed
        if any(value.is_deleted() for value in written):
            if is_mine:
                raise _within_the_step()
            return None
        return written

    def put_back(self) -> None:
        """Give the store its values again, in its `_alone`."""
        written, read = self.held
        for held, value in zip(written, self.written or (), strict=True):
            held.value, held.lent = value, False
        self.written = None  # from here on the values are the store's
        for held in (*written, *read):
            if held.at is self:
                held.at = None
        self.held, self.read = ([], []), []

    def _prepare(self) -> None:
        """Before a call, in the store's `_alone`: give way, wait for calls on other threads, and have the values."""
        store, until, now = self._store, 0.0, time.monotonic()
        if self.wanted > now or (self.written is None and store.are_wanted((*self.writes, *self.reads), now)):
            store.pause(store._changed, PATIENCE_S)
        self.wanted = 0.0  # until they say so again
        while self.given is not None or self.written is None:
            if self.given is None:
                self._take()
                continue
            if self.is_mine():
                raise VariableError(
                    f"{self.name} is called within a call of it, by a callback or a handler of a signal{at(caller())}\n"
                    "  call another function, or have the handler set a flag and look at it between steps"
                )
            until = until or time.monotonic() + STEP_S
            left = until - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(
                    f"{self.name} has been in a call on another thread for {STEP_S:g} s{at(caller())}\n"
                    "  does a callback of that call wait for this thread?"
                )
            self._ended = self._ended or threading.Condition(store._lock)
            self._callers += 1
            try:
                store.pause(self._ended, min(left, LOOK_S))
            finally:
                self._callers -= 1

    def _take(self) -> None:
        """Take the values from the store, those written as its own."""
        found = self._store.claim_values((*self.writes, *self.reads))
        written, read = found[: len(self.writes)], found[len(self.writes) :]
        values, self.read = [_own(held) for held in written], [held.value for held in read]
        for place, held in enumerate(written):
            held.place, held.at = place, self
        for held in read:
            held.place, held.at = _READ, self
        self.held = written, read
        self.written = values  # from here on the values are its own

    def _after(self, given: list[Any]) -> None:
        """Tell those who wait, and let the store say of values that a failed call took along that they are lost."""
        store = self._store
        with store._lock:
            is_lost = not given and self.given is None and any(value.is_deleted() for value in self.written or ())
            if is_lost and not store._is_inside:
                self.put_back()
            if self._ended is not None:
                self._ended.notify()
            store._changed.notify_all()


def _owner(held: _Held) -> StepState | None:
    """The step that has the value."""
    owner = held.at
    return None if owner is None or owner.written is None else owner


def _within_the_step() -> VariableError:
    return VariableError(
        f"a variable is asked for within the very step that uses it, by a callback or a handler of a signal"
        f"{at(caller())}\n  pass the callback what it is to see; "
        "have the handler set a flag, and look at the flag between steps"
    )


def _lost(key: str) -> VariableError:
    return VariableError(
        f"the value of variable {shown(key)!r} was lost, since a step that writes it failed as it ran{at(caller())}\n"
        "  assign it a new value, such as from what was saved last"
    )


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


def _placed(value: jax.Array, before: jax.Array) -> jax.Array:
    """The value where the one before it is to stay."""
    return jax.device_put(value, before.sharding) if before.committed else value


def _beside(operand: Any, value: jax.Array) -> Any:
    """An operand of an update, on the devices that hold the value; spread over them as the value is, or whole."""
    if not (isinstance(operand, jax.Array) and value.committed and operand.committed):
        return operand
    if operand.sharding.device_set == value.sharding.device_set:
        return operand
    if isinstance(value.sharding, NamedSharding):
        return jax.device_put(operand, NamedSharding(value.sharding.mesh, PartitionSpec()))
    return jax.device_put(operand, value.sharding)


@cache
def _in_place(kind: str) -> Program:
    return Program(jax_jit(lambda value, *operands: [updated(kind, value, *operands)], donate_argnums=0))


def _is_of_cpu(value: jax.Array) -> bool:
    return len(value.devices()) == 1 and next(iter(value.devices())).platform == "cpu"


def _own(held: _Held) -> jax.Array:
    if held.lent:
        held.value, held.lent = jnp.copy(held.value), False
    return held.value


def _check_type(key: str, wanted: ArrayType, value: Any) -> None:
    given = array_type_of(value).strong
    if given != wanted:
        raise VariableShapeError(f"variable {key!r} holds {wanted} but was given {given}")
