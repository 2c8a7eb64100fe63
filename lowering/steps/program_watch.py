"""The watch over programs whose variables are spread over the devices of several processes.

All processes must run the same such programs in the same order. Else a process computes something else than the others,
or waits for them without end. So the distributed layer, which can exchange messages with them, sets a watch that is
called before each program runs. A process has one watch, since JAX's runtime is in one group of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import ref

import jax

from dflow.tracing.jaxprs.trace import Traced
from dflow.tracing.state.resources import Variable, is_variable

#: Runs a call: takes args, kwargs and the leaves of the traced arguments.
RunCall = Callable[[Any, Any, list[Any]], Any]

#: Ops of an XLA program that make processes wait for each other.
_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
)


class WatchedProgram:
    """A program of this process with state. It keeps no variable or queue alive.

    writes    keys of the variables that it writes
    compiled  returns the text of the compiled program for a call's args and kwargs; None if it is not one program
    """

    def __init__(self, traced: Traced, writes: frozenset[str], compiled: Callable[[Any, Any], str | None]) -> None:
        self.name, self.writes, self._compiled = traced.name, writes, compiled
        self._traced, self._resources = replace(traced, variables=()), tuple(map(ref, traced.variables))
        self._collective: dict[Any, bool] = {}

    @property
    def traced(self) -> Traced:
        """The trace, during a call."""
        return replace(self._traced, variables=tuple(resource() for resource in self._resources))

    @property
    def variables(self) -> list[Variable]:
        """The variables that it reads or writes, during a call."""
        return [*filter(is_variable, self.traced.variables)]

    def is_collective(self, args: Any, kwargs: Any, leaves: Sequence[Any]) -> bool:
        """Whether processes wait for each other in a call."""
        key = tuple(is_shared(getattr(leaf, "sharding", None)) for leaf in leaves)
        if key not in self._collective:
            text = self._compiled(args, kwargs)
            self._collective[key] = text is None or any(name in text for name in _COLLECTIVES)
        return self._collective[key]


class ProgramWatch(NamedTuple):
    """Functions that may wait for other processes, and raise.

    called   called before each call of a program of this process with state: with it, args, kwargs and leaves
    written  called before each write outside of programs: with the variable, the kind of update and its operands
    """

    called: Callable[[WatchedProgram, Any, Any, Sequence[Any]], None]
    written: Callable[[Variable, str, Sequence[Any]], None]


_watches: list[ProgramWatch] = []


def set_program_watch(watch: ProgramWatch | None) -> None:
    """Set the watch of this process, or remove it."""
    _watches[:] = [] if watch is None else [watch]


def program_watch() -> ProgramWatch | None:
    """Return the watch of this process, if there is one."""
    return _watches[0] if _watches else None


def watched(program: WatchedProgram, run: RunCall) -> RunCall:
    """Return `run`, which the watch sees before each call."""

    def watched_run(args: Any, kwargs: Any, leaves: list[Any]) -> Any:
        if (watch := program_watch()) is not None:
            watch.called(program, args, kwargs, leaves)
        return run(args, kwargs, leaves)

    return watched_run


def is_shared(sharding: Any) -> bool:
    """Whether a sharding covers devices of other processes."""
    return isinstance(sharding, jax.sharding.Sharding) and not sharding.is_fully_addressable
