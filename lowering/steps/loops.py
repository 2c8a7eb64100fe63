"""Loops whose bodies have items that wait, such as queue ops, with several iterations running concurrently.

An iteration starts while earlier ones still wait. Those of its items run that need neither results of earlier
iterations nor their effects on the same variable or queue. An item that touches state also touched by an item of the
previous iteration runs after that item, so each variable and each queue sees the order of the program. At most
`parallel_iterations` iterations run at the same time. An iteration of a `while` starts when its test is true, and the
test runs when the carried values that it needs are ready. A test whose effects conflict with those of the body runs
when the previous iteration has ended.

An iteration is an execution of the body's plan whose carried values arrive one by one from the previous iteration.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import jit as jax_jit

from dflow.lowering.steps.executable import may_conflict
from dflow.lowering.steps.execute import PENDING, CompiledPlan, Execution
from dflow.lowering.steps.plan import Scan, While
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.ir.types import key_implementation, parse_type


@dataclass
class _Turn:
    """An iteration, with the values carried from the previous one and the items that are done."""

    carried: list[Any]
    run: Execution | None = None
    test: Execution | None = None
    done: set[int] = field(default_factory=set)
    has_ended: bool = False


class Loop:
    """One loop of a step. `on_end` is called once, with the results or the first error."""

    def __init__(
        self,
        item: While | Scan,
        values: Sequence[Any],
        body: CompiledPlan,
        test: CompiledPlan | None,
        within: Execution,
        on_end: Callable[[Outcome[Sequence[Any]]], None],
    ) -> None:
        self._item, self._test, self._body, self._within, self._on_end = item, test, body, within, on_end
        rows = item.rows if isinstance(item, Scan) else 0
        kept, after = len(values) - rows - item.carry, len(values) - rows
        self._kept, self._rows = values[:kept], values[after:]
        self._window = 1 if test is not None and may_conflict(test.executable, body.executable) else item.parallel
        self._stacks = [_Stack(type, item.length) for type in item.stacked] if isinstance(item, Scan) else []
        #: The indices of each register of the body among its results.
        self._positions: dict[int, list[int]] = {}
        for position, register in enumerate(body.executable.plan.fetches):
            self._positions.setdefault(register, []).append(position)
        self._lock = threading.Lock()
        self._ended = False
        #: The iterations that have not ended, and the next one, by number.
        self._turns = {0: _Turn(list(values[kept:after]))}
        self._oldest = self._next = 0
        #: Whether there is a next iteration; None for a `while` before its test.
        self._is_wanted: bool | None = None

    def start(self) -> None:
        """Start the iterations and tests that may start now, on this thread."""
        try:
            while (work := self._next_work()) is not None:
                work()
        except BaseException as error:
            self._end(error)

    def cancel(self, error: BaseException) -> None:
        """End all iterations with `error`, without a call of `on_end`."""
        with self._lock:
            self._ended = True
            runs = [run for turn in self._turns.values() for run in (turn.run, turn.test) if run is not None]
        for run in runs:
            run.cancel(error)

    def _end(self, outcome: Outcome[Sequence[Any]]) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
        if isinstance(outcome, BaseException):
            self.cancel(outcome)
        self._on_end(outcome)

    def _next_work(self) -> Callable[[], None] | None:
        """Return the function that starts the next iteration or its test, or ends the loop; None while it must wait."""
        with self._lock:
            number, item = self._next, self._item
            if self._ended:
                return None
            if isinstance(item, Scan):
                self._is_wanted = number < item.length
            turn = self._turns[number]
            if self._is_wanted is False:
                return self._finish if number == self._oldest else None
            if number - self._oldest >= self._window or (self._is_wanted is None and turn.test is not None):
                return None
            if self._is_wanted is None:
                assert self._test is not None
                turn.test = self._within.body(self._test, [*self._kept, *turn.carried], self._tested, number, {})
                return turn.test.start
            return self._turned(number, turn).start

    def _finish(self) -> None:
        self._end([*self._turns[self._next].carried, *(stack.whole() for stack in self._stacks)])

    def _turned(self, number: int, turn: _Turn) -> Execution:
        """Create the run of the next iteration. The lock is held."""
        body, before = self._body.executable, self._turns.get(number - 1)
        held = {} if before is None else {i: len(follows - before.done) for i, follows in body.follows.items()}
        feeds = [*self._kept, *turn.carried, *(_row(x, self._row_of(number)) for x in self._rows)]
        turn.test = None
        turn.run = self._within.body(
            self._body,
            feeds,
            partial(self._turn_ended, number),
            number,
            held=held,
            on_item=partial(self._item_done, number),
        )
        self._turns[number + 1] = _Turn([PENDING] * len(turn.carried))
        self._next, self._is_wanted = number + 1, None
        known = [*zip(body.plan.feeds, feeds, strict=True), *body.scalars]
        self._hand_on(number, [(register, value) for register, value in known if value is not PENDING])
        return turn.run

    def _row_of(self, number: int) -> int:
        assert isinstance(self._item, Scan)
        return self._item.length - 1 - number if self._item.reverse else number

    def _hand_on(self, number: int, values: Iterable[tuple[int, Any]]) -> list[Callable[[], None]]:
        """Record values of an iteration's registers; return the calls to make after releasing the held lock."""
        told: list[Callable[[], None]] = []
        left = deque((number, register, value) for register, value in values)
        while left:
            number, register, value = left.popleft()
            for position in self._positions.get(register, ()):
                if position >= self._item.carry:
                    self._stacks[position - self._item.carry].put(self._row_of(number), value)
                    continue
                later, feed = self._turns[number + 1], len(self._kept) + position
                later.carried[position] = value
                told += [partial(run.feed, feed, value) for run in (later.run, later.test) if run is not None]
                if later.run is not None:
                    left.append((number + 1, self._body.executable.plan.feeds[feed], value))
        return told

    def _item_done(self, number: int, item: int, values: Sequence[tuple[int, Any]]) -> None:
        with self._lock:
            if self._ended:
                return
            self._turns[number].done.add(item)
            told = self._hand_on(number, values)
            later = self._turns[number + 1].run
            if later is not None:
                followed = self._body.executable.followed.get(item, ())
                told += [partial(later.release_item, each) for each in followed]
        for tell in told:
            tell()

    def _tested(self, outcome: Outcome[Sequence[Any]]) -> None:
        if isinstance(outcome, BaseException):
            self._end(outcome)
            return
        (wanted,) = outcome

        def go_on() -> None:
            # This waits for the device, so it must not run on the thread that delivers the outcome.
            is_wanted = bool(np.asarray(wanted))
            with self._lock:
                self._is_wanted = is_wanted
            self.start()

        self._soon(go_on)

    def _turn_ended(self, number: int, outcome: Outcome[Sequence[Any]]) -> None:
        if isinstance(outcome, BaseException):
            self._end(outcome)
            return
        with self._lock:
            self._turns[number].has_ended = True
            while self._turns[self._oldest].has_ended:
                del self._turns[self._oldest]
                self._oldest += 1
        # A direct call would nest each iteration in the one before, and the stack would overflow.
        self._soon(self.start)

    def _soon(self, work: Callable[[], None]) -> None:
        """Submit work to a worker thread, unless the loop has ended: then there may be none."""

        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                self._end(error)

        if not self._ended:
            self._within.submit(guarded)


class _Stack:
    """An array of `length` rows, written one by one. Rows that are random keys are stored as their key data."""

    def __init__(self, type: str, length: int) -> None:
        row: Any = parse_type(type)
        self._is_key = jnp.issubdtype(row.dtype, jax.dtypes.extended)
        self._dtype, like = row.dtype, jax.ShapeDtypeStruct(row.shape, row.dtype)
        like = jax.eval_shape(jax.random.key_data, like) if self._is_key else like
        self._array = jnp.zeros((length, *like.shape), like.dtype)

    def put(self, number: int, row: Any) -> None:
        data = jax.random.key_data(row) if self._is_key else row
        self._array = _put(self._array, _beside(data, self._array), number)

    def whole(self) -> Any:
        if self._is_key:
            return jax.random.wrap_key_data(self._array, impl=key_implementation(self._dtype))
        return self._array


def _beside(row: Any, held: jax.Array) -> Any:
    """Return a row with the sharding of the array; it may come from another device."""
    is_apart = isinstance(row, jax.Array) and row.committed and held.committed and row.sharding != held.sharding
    return jax.device_put(row, held.sharding) if is_apart else row


@jax_jit
def _row(array: Any, number: Any) -> Any:
    return jax.lax.dynamic_index_in_dim(array, number, keepdims=False)


@partial(jax_jit, donate_argnums=0)
def _put(array: Any, row: Any, number: Any) -> Any:
    return jax.lax.dynamic_update_index_in_dim(array, row, number, 0)
