"""Plans of one function's calls, by the types of the arguments."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from dflow.calls.single_executable import SingleExecutable
from dflow.lowering.state_backend import LoweredStep
from dflow.lowering.steps.program_watch import RunCall
from dflow.tracing.primitives.namesakes import StepResources

UNKNOWN: Any = object()
_NO_KEY: Any = object()


@dataclass(frozen=True, eq=False)
class CallPlan:
    """How to run the calls for one set of argument types.

    `jaxpr`      the jaxpr of the trace
    `variables`  variables and queues used that are not arguments; the plan keeps them alive
    `resources`  all variables and queues used, arguments included; the plan does not keep them alive
    `writes`     keys of the variables it writes
    `run`        runs a call: takes args, kwargs, and the leaves of the traced arguments
    `lower`      returns the lowered programs for arguments of these types; None where another process runs them
    `single`     the single-executable step that runs it, if it is one XLA call of this process
    """

    jaxpr: weakref.ref[Any]
    variables: tuple[Any, ...]
    resources: StepResources
    writes: frozenset[str]
    run: RunCall
    lower: Callable[[Any, Any], LoweredStep] | None = None
    single: SingleExecutable | None = None


class Plans:
    """Plans of one function, by argument types; None means that JAX runs the call. Thread-safe.

    A plan is dropped when a variable or queue passed to its call is collected. Two rules prevent deadlock: a finalizer
    never waits for the lock, and a dropped plan, with all it keeps alive, is freed outside the critical section.
    """

    def __init__(self) -> None:
        self._by_key: dict[Hashable, CallPlan | None] = {}
        self._finalizers: dict[Hashable, list[weakref.finalize[..., Any]]] = {}
        #: Keys to drop as soon as the lock is free; _NO_KEY to update `single` alone.
        self._dropped: deque[Hashable] = deque()
        #: Re-entrant, because garbage collection may run a finalizer on the thread that holds it.
        self._lock = threading.RLock()
        #: The one step that runs all calls of all types seen, if there is one and no plan has to warn of namesakes.
        self.single: SingleExecutable | None = None
        #: Whether JAX runs the calls of all types seen.
        self.is_empty = True

    def get(self, key: Hashable) -> Any:
        """Return the plan, None if JAX runs the call, or UNKNOWN."""
        try:
            return self._by_key.get(key, UNKNOWN)
        except TypeError:  # an unhashable static argument; JAX's own error for it is better
            return UNKNOWN

    def of_trace(self, jaxpr: Any) -> CallPlan | None:
        """Return the plan made from this trace, if any."""
        return next((plan for plan in self._made() if plan.jaxpr() is jaxpr), None)

    def put(self, key: Hashable, plan: CallPlan | None, passed: Iterable[Any] = ()) -> None:
        """Store a plan until one of the variables and queues `passed` is collected."""
        with self._lock:
            before = self._by_key.get(key)
            self._by_key[key] = plan
            if plan is not None:
                plan.resources.on_namesake = functools.partial(_drop, weakref.ref(self), _NO_KEY)
            for resource in passed:
                # A weak reference to the plans, since a variable may outlive the function.
                finalizer = weakref.finalize(resource, _drop, weakref.ref(self), key)
                finalizer.atexit = False
                self._finalizers.setdefault(key, []).append(finalizer)
            gone = before, self._settle()
        del before, gone
        self._sweep()

    def clear(self) -> None:
        """Drop all plans."""
        for key in list(self._by_key):
            self.drop(key)

    def warn_of_namesakes(self, plan: CallPlan) -> None:
        """Warn before a call of a plan if one of its resources got a namesake since the last call."""
        if plan.resources.has_namesakes:
            try:
                plan.resources.warn()
            finally:
                self.drop(_NO_KEY)

    def single_of(self, identity: tuple[Any, ...]) -> SingleExecutable | None:
        """Return the existing single-executable step of this identity, if any."""
        found = (plan.single for plan in self._made() if plan.single is not None)
        return next((single for single in found if single.identity == identity), None)

    def _made(self) -> list[CallPlan]:
        return [plan for plan in list(self._by_key.values()) if plan is not None]

    def drop(self, key: Hashable) -> None:
        """Drop a plan: now, or when the thread that holds the lock has released it."""
        self._dropped.append(key)
        self._sweep()

    def _sweep(self) -> None:
        """Remove the dropped plans. If another thread holds the lock, that thread does it after release."""
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

    def _settle(self) -> SingleExecutable | None:
        """Update `single` and `is_empty`; return the previous `single`, for the caller to free outside the lock."""
        before = self.single
        plans = list(self._by_key.values())
        singles = [None if plan is None or plan.resources.has_namesakes else plan.single for plan in plans]
        self.single = singles[0] if singles and all(single is singles[0] for single in singles) else None
        self.is_empty = not any(plans)
        return before


def _drop(plans: weakref.ref[Plans], key: Hashable) -> None:
    found = plans()
    if found is not None:
        found.drop(key)
