"""The receiver of the gradients that a step gives its optimizer: the optimizer itself, or the strategy of the step.

Where several workers do the steps, an optimizer of variables of the worker's own process is refused: each worker would
train a copy. JAX's trace context names the strategy: a function that is called under another strategy, or under none,
is traced again, with nothing changed in it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol
from weakref import WeakSet

import jax
from jax.experimental.xla_metadata import set_xla_metadata

from dflow.tracing.context_values import within
from dflow.tracing.errors import VariableError
from dflow.tracing.jax_frontend import is_tracing
from dflow.tracing.state.resources import is_variable

#: The key under which an applier travels in JAX's trace context.
_KEY = "dflow_applier"
#: The value of that key in a shared step whose optimizers apply their gradients themselves.
_SHARED = "shared"


class GivenOptimizer(ABC):
    """The part of an optimizer that strategies need; see `dflow.Optimizer`."""

    name: str

    @property
    @abstractmethod
    def variables(self) -> Any:
        """The pytree of variables that it updates."""

    @property
    @abstractmethod
    def settings(self) -> Sequence[str]:
        """Its numbers and other settings, one text for each; equal settings have equal texts in every process."""

    @abstractmethod
    def apply_mean(self, gradients: Any) -> None:
        """Update the variables by the mean of several workers' gradients."""


class Applier(Protocol):
    """Receives the gradients of steps traced under it, in place of the optimizer. Its `name` is unique."""

    name: str
    #: Whether functions of `dflow.jit` that the step calls become part of the step's own trace.
    inlines: bool
    #: Whether it only looks at the gradients: nothing is compiled of a trace under it.
    is_look: bool

    def apply(self, optimizer: GivenOptimizer, gradients: Any) -> None:
        """Receive the gradients of the optimizer's variables while the step is traced, instead of an update."""
        ...


_current: ContextVar[Applier | None] = ContextVar("dflow_applier", default=None)


def current_applier() -> Applier | None:
    """Return the applier of the current context; None if the optimizer itself applies the gradients."""
    return _current.get()


def inlines_calls() -> bool:
    """Whether, by the current applier, `dflow.jit` functions called within a trace become part of that trace.

    Then gradients of several functions can be used together.
    """
    applier = _current.get()
    return applier is not None and applier.inlines


def taker_of_gradients() -> tuple[str, bool]:
    """Return the name of the current applier, and whether it only looks at the gradients; for the log of traces.

    Without an applier, the name is `shared` in a shared step whose functions JAX traces again, and else empty.
    """
    applier = _current.get()
    if applier is not None:
        return applier.name, applier.is_look
    return _SHARED if _shared.get() is not None and _traced_outside else "", False


@contextmanager
def applying(applier: Applier) -> Iterator[None]:
    """Return a context in which `applier` receives the gradients of the functions traced."""
    with within(_current, applier), set_xla_metadata(**{_KEY: applier.name}):
        yield


#: The optimizers of this process that have applied gradients, or are in a trace.
_applied: WeakSet[GivenOptimizer] = WeakSet()


def applied_to(variables: Iterable[Any]) -> list[GivenOptimizer]:
    """Return the applied optimizers of this process whose variables are all among these, sorted by name."""
    known = {*map(id, variables)}
    found = [one for one in list(_applied) if all(id(variable) in known for variable in _variables_of(one))]
    return sorted(found, key=lambda one: one.name)


def _variables_of(optimizer: GivenOptimizer) -> list[Any]:
    return jax.tree_util.tree_leaves(optimizer.variables, is_leaf=is_variable)


#: Optimizers of variables that each process has for itself, whose updates were traced outside of shared steps; and
#: loaded functions that update such variables.
_traced_outside: WeakSet[Any] = WeakSet()


def is_own(variable: Any) -> bool:
    """Whether a variable lives in this process only."""
    return not variable.home.shares_names


#: In a step that several workers run, whether its optimizers may not have a variable, and the block to make it in.
_shared: ContextVar[tuple[Callable[[Any], bool], str] | None] = ContextVar("dflow_shared_steps", default=None)


@contextmanager
def shared_step(is_own: Callable[[Any], bool] = is_own, where: str = "cluster.parameter_servers()") -> Iterator[None]:
    """Return a context for a step of a run that several workers share: `refuse_own_variables` checks its updates.

    is_own  says whether the step's optimizers may not update a variable
    where   the block to make variables in that they may update, for errors

    Outside of the context, updates of a process's own variables are allowed. If one was traced there, JAX traces
    functions again in the context, so that the check also sees functions with a cached trace.
    """
    with within(_shared, (is_own, where)), set_xla_metadata(**{_KEY: _SHARED}) if _traced_outside else nullcontext():
        yield


def refuse_own_variables(optimizer: GivenOptimizer) -> None:
    """Record that the optimizer is applied; in a `shared_step`, raise VariableError if it may not update a variable.

    Outside of shared steps, record a trace that updates variables of this process: see `shared_step`.
    """
    _applied.add(optimizer)
    leaves = _variables_of(optimizer) if _shared.get() or is_tracing() else []
    _refuse_own(optimizer, leaves, f" of {optimizer.name!r}", "make")


def refuse_own_training(function: Any, name: str, trained: Iterable[Any]) -> None:
    """Like `refuse_own_variables`, for a loaded function that trains variables.

    Its optimizer is a part of its program, which does not call `refuse_own_variables`.
    """
    _refuse_own(function, trained, f", which the loaded function {name!r} trains,", "load")


def _refuse_own(holder: Any, variables: Iterable[Any], use: str, remedy: str) -> None:
    """In a `shared_step`, raise VariableError if its `is_own` is true of one of the variables.

    Outside of shared steps, record the holder if one of them lives in this process only.
    """
    shared = _shared.get()
    is_refused, where = shared or (is_own, "")
    variable = next(filter(is_refused, variables), None)
    if variable is not None and shared is None:
        _traced_outside.add(holder)
    elif variable is not None:
        raise VariableError(
            f"variable {variable.name!r}{use} lives in this process, so that the other workers would train variables "
            f"of their own",
            f"{remedy} it within {where}",
            at=variable.loc,
        )
