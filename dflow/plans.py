"""How the calls of one function run, by the types of their arguments."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import jax

from dflow.lowering.local import LoweredStep, PureStep
from dflow.lowering.state_backend import Runner
from dflow.stages import LoweredRun
from dflow.tracing.trace import Traced, written_keys
from dflow.whole_step import NotEntered, WholeStep

UNKNOWN: Any = object()


@dataclass(frozen=True)
class Plan:
    """How calls of one set of argument types run.

    `run`        on the arguments, and on the leaves of the traced ones among them
    `variables`  what it names that is no argument, kept alive with it
    `writes`     the keys of the variables it writes
    `jaxpr`      that of the trace
    `whole`      calls it, when it is one XLA call of this process
    `lower`      gives what calls run, lowered, for arguments of these types; None where another process runs it
    """

    run: Callable[[Any, Any, list[Any]], Any]
    variables: tuple[Any, ...]
    writes: frozenset[str]
    jaxpr: weakref.ref[Any]
    whole: WholeStep | None = None
    lower: Callable[[Any, Any], LoweredRun] | None = None


def plan_of_whole(
    whole: WholeStep, step: PureStep, traced: Traced, variables: tuple[Any, ...], jaxpr: weakref.ref[Any]
) -> Plan:
    """The plan of a traced step that is one XLA call."""
    out_tree = traced.out_tree

    def run(args: Any, kwargs: Any, leaves: list[Any]) -> Any:
        # JAX tells apart more than we do, such as where the arguments lie.
        with suppress(NotEntered):
            return whole(args, kwargs)
        return whole.enter(step, out_tree, args, kwargs)

    def lower(args: Any, kwargs: Any) -> LoweredRun:
        return whole.lower(step, out_tree, args, kwargs)

    return Plan(run, variables, written_keys(traced), jaxpr, whole, lower)


def plan_of_programs(lowered: LoweredStep, traced: Traced, variables: tuple[Any, ...], jaxpr: weakref.ref[Any]) -> Plan:
    """The plan of a traced step of several programs of this process, which its first call compiles."""
    compiled = functools.cache(lowered.compile)
    runner = plan_of_runner(lambda leaves: compiled().run(leaves), traced, variables, jaxpr)
    return replace(runner, lower=lambda args, kwargs: lowered)


def plan_of_runner(runner: Runner, traced: Traced, variables: tuple[Any, ...], jaxpr: weakref.ref[Any]) -> Plan:
    """The plan of a traced step of several parts, which cannot be lowered here."""
    out_tree = traced.out_tree

    def run(args: Any, kwargs: Any, leaves: list[Any]) -> Any:
        return jax.tree_util.tree_unflatten(out_tree, runner(leaves))

    return Plan(run, variables, written_keys(traced), jaxpr)


class Plans:
    """The plans of one function; None stands for a call that JAX runs. A plan is gone with what was passed to it.

    Invariant, by which no two functions wait for each other: a finalizer never waits for the lock, and a plan, with
    what it keeps alive, is freed by who has let go of it.
    """

    def __init__(self) -> None:
        self._by_key: dict[Hashable, Plan | None] = {}
        self._finalizers: dict[Hashable, list[weakref.finalize[..., Any]]] = {}
        #: What is to be forgotten when the lock may be had.
        self._dropped: deque[Hashable] = deque()
        #: Finalizers run wherever garbage is collected, on a thread that holds the lock too.
        self._lock = threading.RLock()
        #: What calls every call so far, if one thing does.
        self.whole: WholeStep | None = None
        #: Whether `jax.jit` runs the calls of all types seen.
        self.is_empty = True

    def get(self, key: Hashable) -> Any:
        """The plan, None, or UNKNOWN."""
        try:
            return self._by_key.get(key, UNKNOWN)
        except TypeError:  # a static argument that cannot be hashed, about which JAX says more
            return UNKNOWN

    def of_trace(self, jaxpr: Any) -> Plan | None:
        """The plan that was made of a trace."""
        return next((plan for plan in self._made() if plan.jaxpr() is jaxpr), None)

    def put(self, key: Hashable, plan: Plan | None, passed: Iterable[Any] = ()) -> None:
        """Keep a plan as long as the variables and queues `passed` live."""
        with self._lock:
            before = self._by_key.get(key)
            self._by_key[key] = plan
            for resource in passed:
                # Weakly, for a variable may outlive the function.
                finalizer = weakref.finalize(resource, _drop, weakref.ref(self), key)
                finalizer.atexit = False
                self._finalizers.setdefault(key, []).append(finalizer)
            gone = before, self._settle()
        del before, gone
        self._sweep()

    def clear(self) -> None:
        """Forget all."""
        for key in list(self._by_key):
            self.drop(key)

    def whole_like(self, step: PureStep) -> WholeStep | None:
        """What calls a step over the same variables and constants already."""
        wholes = (plan.whole for plan in self._made() if plan.whole is not None)
        return next((whole for whole in wholes if whole.takes(step)), None)

    def _made(self) -> list[Plan]:
        return [plan for plan in list(self._by_key.values()) if plan is not None]

    def drop(self, key: Hashable) -> None:
        """Forget a plan, now or when a call on another thread that is about to keep or forget one has done so."""
        self._dropped.append(key)
        self._sweep()

    def _sweep(self) -> None:
        """Forget what was dropped. Who has the lock does it after letting go."""
        while self._dropped and self._lock.acquire(blocking=False):
            gone: list[Any] = []
            try:
                while self._dropped:
                    key = self._dropped.popleft()
                    gone += key, self._by_key.pop(key, None), self._settle()
                    for finalizer in self._finalizers.pop(key, ()):
                        finalizer.detach()
            finally:
                self._lock.release()
            del gone

    def _settle(self) -> WholeStep | None:
        """Say what calls every call now; what it was, for the caller to free."""
        before = self.whole
        plans = list(self._by_key.values())
        wholes = [None if plan is None else plan.whole for plan in plans]
        self.whole = wholes[0] if wholes and all(whole is wholes[0] for whole in wholes) else None
        self.is_empty = not any(plans)
        return before


def _drop(plans: weakref.ref[Plans], key: Hashable) -> None:
    found = plans()
    if found is not None:
        found.drop(key)
