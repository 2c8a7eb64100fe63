"""State shared by all compiled functions of one Python function with the same options.

`jax.jit` shares traces and programs in the same way. Here the key is the identity of the Python function, and the
state is dropped with it. Invariant: nothing here refers to the Python function.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import BuiltinFunctionType, MethodType
from typing import Any

from dflow.calls.plans import Plans
from dflow.calls.static_arguments import StaticArguments
from dflow.calls.trace_log import TraceLog
from dflow.tracing.argument_ids import KnownIds
from dflow.tracing.jax_frontend import Handle, jit_options
from dflow.tracing.jaxprs.reachable import reachable
from dflow.tracing.weak_by_identity import WeakDict

#: Longest wait for another thread's trace, in s. Then this thread traces too, since user code may wait for it.
TRACE_S = 60.0


@dataclass(eq=False)
class SharedTraces:
    """The traces of one function, and its plans by argument types.

    `jaxprs`  jaxprs of the traces in `log`
    `programs`  the closed jaxpr of each trace in `log`, in its order, while JAX keeps it
    `id`      number of the function in this process
    `returns_variables`  whether a result contained a variable, so that each function is traced through a wrapper
    `state`   variables reachable from the function when a trace first touched state; None before, or if too many
    """

    static: StaticArguments
    log: TraceLog
    plans: Plans = field(default_factory=Plans)
    jaxprs: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    programs: list[weakref.ref[Any]] = field(default_factory=list)
    id: int = field(default_factory=itertools.count(1).__next__)
    returns_variables: bool = False
    state: list[Handle] | None = None
    has_state: bool = False
    #: The arguments that were integers beyond 32 bits in a call, and are ids in later ones.
    known_ids: KnownIds = field(default_factory=set)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def traced(self, closed: Any) -> None:
        """Keep the closed jaxpr of the newest trace in `log` findable, and the function with it."""
        self.programs.append(weakref.ref(closed))
        TRACED.pop(self.id, None)  # set again, so that the newest is last
        TRACED[self.id] = self

    def touches_state(self, fn: Callable[..., Any]) -> None:
        """Record, when a trace of `fn` touches state, the variables reachable from it."""
        if not self.has_state:
            self.state, self.has_state = reachable(fn), True

    def is_of(self, fn: Callable[..., Any]) -> bool:
        """Whether `fn` still refers to the variables that it was traced with."""
        return not self.has_state or (self.state is not None and self.state == reachable(fn))

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """Let only one thread trace, so that the others find the result; after `TRACE_S` seconds do not wait longer."""
        is_acquired = self._lock.acquire(timeout=TRACE_S)
        try:
            yield
        finally:
            if is_acquired:
                self._lock.release()


#: The functions that this process has traced and still has, by number, the most recently traced last.
TRACED: weakref.WeakValueDictionary[int, SharedTraces] = weakref.WeakValueDictionary()

#: By Python function, its shared state by options.
_shared: WeakDict[Callable[..., Any], dict[Hashable, SharedTraces]] = WeakDict()


def shared_traces(fn: Callable[..., Any], jitted: Any, new: Callable[[], SharedTraces]) -> SharedTraces:
    """Return the state that `fn` shares under the options of the `jax.jit` function `jitted`; else `new()`.

    Nothing is shared if `may_share` is False or the options cannot be hashed. If `fn` now refers to other variables,
    its traces are dropped; functions made earlier keep their plans.
    """
    options = tuple(jit_options(jitted).items())
    try:
        hash(options)
    except TypeError:
        return new()
    if not may_share(fn):
        return new()
    by_options = _shared.setdefault(fn, {})
    found = by_options.get(options)
    if found is not None and not found.is_of(fn):
        by_options.clear()
        jitted.clear_cache()
        found = None
    return by_options.setdefault(options, new()) if found is None else found


def may_share(fn: Any) -> bool:
    """Whether the identity of a function can be the key of its traces: it allows weak references and equals no other.

    JAX finds traces by equality, so equal functions would share traces although their state may differ.
    """
    equals: object = type(fn).__eq__
    is_alone = equals is object.__eq__ or isinstance(fn, MethodType | BuiltinFunctionType)
    return is_alone and type(fn).__weakrefoffset__ != 0
