"""`dflow.ConditionalAccumulator`: gradients from many, taken together; stale ones are left out.

The shell around `distributed.accumulator_state`: it holds the sum, and lets takes wait. Every method may be called from
any thread.
"""

from __future__ import annotations

import itertools
import threading
import warnings
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import jit as jax_jit

from dflow.distributed.accumulator_state import (
    AccumulatorState,
    Add,
    Command,
    Event,
    Give,
    GradientApplied,
    StepSet,
    TakeAsked,
    TakeGivenUp,
    WarnOfStepBack,
)
from dflow.tracing.container import contained, join
from dflow.tracing.errors import AccumulatorError, DeadlineExceeded, GraphTypeError
from dflow.tracing.jax_frontend import is_tracing
from dflow.tracing.resources import Variable, is_variable, path_name, read
from dflow.tracing.source import at, caller
from dflow.tracing.types import ArrayType, array_type_of

T = TypeVar("T")

_serials = itertools.count()
_add = jax_jit(lambda left, right: jax.tree_util.tree_map(jnp.add, left, right))


class ConditionalAccumulator:
    """Sums gradients until enough are there; one for each step of synchronous training, shared by its threads.

    spec       the pytree of a gradient, of arrays, `jax.ShapeDtypeStruct`s or the variables it is for
    name       what errors call it
    reduction  what `take` gives: the "mean" of the gradients, or their "sum"
    raises     AccumulatorError for another reduction, and for the mean of integers

    As TensorFlow 1's: it counts steps, beginning at 0. A gradient of an earlier step is stale and dropped. A take
    waits for `n` gradients, gives the reduction of all that are there, and the step goes on by one.
    """

    def __init__(self, spec: Any, *, name: str | None = None, reduction: str = "mean") -> None:
        self.name = contained(name or f"accumulator_{next(_serials)}")
        self.device: str | None = None
        leaves, tree = jax.tree_util.tree_flatten(spec, is_leaf=is_variable)
        self._tree: Any = tree
        self._types = [_type_of(leaf) for leaf in leaves]
        self._reduction = reduction
        self._check_reduction()
        self._state = AccumulatorState()
        self._lock = threading.Lock()
        self._tickets = itertools.count()
        self._takes: dict[int, Future[Any]] = {}
        self._sum: list[jax.Array] | None = None
        self._gone: str | None = None
        join(self)

    def apply(self, gradient: Any, step: int = 0) -> bool:
        """Add a gradient that was computed in `step`; whether it was fresh, and so is not dropped.

        Raises GraphTypeError for another structure, shape or dtype than `spec`'s.
        """
        self._refuse_traced("apply")
        leaves = self._leaves(gradient)
        with self._lock:
            commands = self._handle(GradientApplied(int(step)), leaves)
        return Add() in commands

    def take(self, n: int, *, timeout_s: float = 600.0) -> Any:
        """Wait until `n` fresh gradients are there; the mean or sum of all that are, structured as `spec`.

        Takes by several threads are served in turn. Raises DeadlineExceeded, which says how many were there.
        """
        self._refuse_traced("take")
        if n < 1:
            raise AccumulatorError(f"accumulator {self.name!r}: take needs at least 1 gradient, not {n}{at(caller())}")
        future: Future[Any] = Future()
        with self._lock:
            ticket = next(self._tickets)
            self._takes[ticket] = future
            self._handle(TakeAsked(ticket, n))
        try:
            total, count = future.result(timeout_s)
        except FutureTimeoutError:
            total, count = self._give_up(ticket, future, n, timeout_s)
        values = [leaf / count for leaf in total] if self._reduction == "mean" else total
        return self._tree.unflatten(values)

    def set_step(self, step: int) -> None:
        """Set the step; gradients of earlier ones are dropped from now on. Setting it back warns, as in TensorFlow."""
        with self._lock:
            self._handle(StepSet(int(step)))

    @property
    def step(self) -> int:
        """The step: how many takes there were, unless it was set."""
        return self._state.step

    def count(self) -> int:
        """How many gradients are there now."""
        return self._state.count

    def dropped(self) -> int:
        """How many gradients were stale, since the beginning."""
        return self._state.dropped

    def forget(self, reason: str) -> None:
        """Let go of the sum: who uses the accumulator from now on, or waits for it, gets AccumulatorError."""
        with self._lock:
            self._gone, self._sum = reason, None
            for future in self._takes.values():
                future.set_exception(self._gone_error())
            self._takes.clear()

    def _handle(self, event: Event, gradient: list[jax.Array] | None = None) -> list[Command]:
        """Tell the state machine and do what it says; the lock is held."""
        if self._gone is not None:
            raise self._gone_error()
        commands = self._state.handle(event)
        for command in commands:
            match command:
                case Add():
                    self._sum = gradient if self._sum is None else _add(self._sum, gradient)
                case Give(ticket, count):
                    total, self._sum = self._sum, None
                    self._takes.pop(ticket).set_result((total, count))
                case WarnOfStepBack(before, now):
                    warnings.warn(
                        f"accumulator {self.name!r} goes back from step {before} to {now}: gradients that were stale "
                        f"are taken again{at(caller())}",
                        stacklevel=3,
                    )
        return commands

    def _give_up(self, ticket: int, future: Future[T], n: int, timeout_s: float) -> T:
        """What came at the last moment. Raises DeadlineExceeded when nothing did."""
        with self._lock:
            if future.done():
                return future.result()
            del self._takes[ticket]
            there = self._state.count
            self._handle(TakeGivenUp(ticket))
        raise DeadlineExceeded(
            f"accumulator {self.name!r}: {there} of {n} gradients were there after {timeout_s:g} s, at step "
            f"{self._state.step}; {self._state.dropped} stale ones were dropped{at(caller())}\n"
            "  are all workers alive, and do they pass the accumulator's step?"
        )

    def _leaves(self, gradient: Any) -> list[jax.Array]:
        flat, tree = jax.tree_util.tree_flatten_with_path(read(gradient))
        if tree != self._tree:
            raise GraphTypeError(
                f"accumulator {self.name!r} takes gradients structured as {self._tree}, but was given {tree}"
                f"{at(caller())}"
            )
        return [self._leaf(path, leaf, type) for (path, leaf), type in zip(flat, self._types, strict=True)]

    def _leaf(self, path: tuple[Any, ...], leaf: Any, type: ArrayType) -> jax.Array:
        # A copy of what is not JAX's, whose memory its owner may write to.
        array = leaf if isinstance(leaf, jax.Array) else jnp.array(leaf)
        given = array_type_of(array)
        if given.strong != type:
            where = f" at {path_name(path)!r}" if path else ""
            raise GraphTypeError(
                f"accumulator {self.name!r} takes {type}{where}, but was given {given.strong}{at(caller())}"
            )
        return jax.lax.convert_element_type(array, type.dtype)

    def _check_reduction(self) -> None:
        if self._reduction not in ("mean", "sum"):
            raise AccumulatorError(
                f"accumulator {self.name!r}: the reduction is {self._reduction!r}; the legal ones are 'mean' and 'sum'"
                f"{at(caller())}"
            )
        whole = [type for type in self._types if not jnp.issubdtype(type.dtype, jnp.inexact)]
        if self._reduction == "mean" and whole:
            raise AccumulatorError(
                f"accumulator {self.name!r}: the mean of {whole[0]} has fractions{at(caller())}\n"
                "  use reduction='sum', or a floating dtype"
            )

    def _refuse_traced(self, method: str) -> None:
        if is_tracing():
            raise AccumulatorError(
                f"accumulator {self.name!r}: {method} is called in traced code, which runs once, not once a step"
                f"{at(caller())}\n  return the gradient from the compiled function and {method} outside of it"
            )

    def _gone_error(self) -> AccumulatorError:
        return AccumulatorError(f"accumulator {self.name!r} {self._gone}{at(caller())}\n  make it again")

    def __repr__(self) -> str:
        return f"<ConditionalAccumulator {self.name!r}: {self.count()} gradients, step {self.step}>"


def _type_of(leaf: Any) -> ArrayType:
    if isinstance(leaf, Variable):
        return leaf.type
    return array_type_of(leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)).strong
