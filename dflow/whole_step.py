"""Steps that are one XLA call, called as `jax.jit` calls its functions.

JAX's own dispatch, which is in C++, tells the types of the arguments apart, flattens them and shapes the result. Beside
them it takes the values of the variables as lists, which the store keeps from one call to the next.

Invariant: a program is compiled only by `enter`, for a step that is known to be that of the argument types. Any other
call for types that JAX has not seen ends by `NotEntered`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import jax
from jax import jit as jax_jit

from dflow.lowering.local import PureStep
from dflow.lowering.program import awaited
from dflow.lowering.step_state import StepState
from dflow.lowering.store import Store
from dflow.static_arguments import static_arguments
from dflow.tracing.jax_frontend import donation_options, forget_failed_dispatch, passes_handles, static_options
from dflow.tracing.variable_trees import handles

#: The arguments of the compiled function that come before the user's: values written, values read, constants.
_OURS = 3


class NotEntered(BaseException):
    """Ends a trace for argument types whose step is not known yet."""


class _Pending(threading.local):
    step: PureStep | None = None
    out_tree: Any = None


class WholeStep:
    """Calls the steps over one set of variables and constants, one for each set of argument types."""

    def __init__(self, store: Store, step: PureStep, function: Any, compiler_options: dict[str, Any] | None) -> None:
        """For the steps that the `jax.jit` function `function` stands for."""
        self._state = StepState(store, step.writes, step.reads, function.__name__, step.keeps)
        self._has_state = bool(step.writes or step.reads)
        self._given = step.constants
        self._constants = step.constants
        self._place = step.device
        self._keeps = step.keeps
        self._static = static_arguments(function)
        self._entering = _Pending()

        def traced(written: Any, read: Any, constants: Any, /, *args: Any, **kwargs: Any) -> Any:
            return self._traced(written, read, constants, args, kwargs)

        traced.__name__ = traced.__qualname__ = function.__name__
        with suppress(ValueError, TypeError):  # a builtin that tells nobody
            traced.__signature__ = _signature(function)  # type: ignore[attr-defined]
        options = _options(function, keeps=step.keeps)
        #: JAX's function of the state and the arguments.
        self.jitted: Any = jax_jit(traced, keep_unused=True, compiler_options=compiler_options, **options)
        self._call = awaited(self.jitted) if step.keeps else self.jitted

    def takes(self, step: PureStep) -> bool:
        """Whether a step is over these variables and constants."""
        own = self._state
        return (own.writes, own.reads, self._place, self._keeps, [*map(id, self._given)]) == (
            step.writes,
            step.reads,
            step.device,
            step.keeps,
            [*map(id, step.constants)],
        )

    @passes_handles
    def __call__(self, args: Any, kwargs: Any) -> Any:
        """Run the step of these arguments. Raises NotEntered when it is none that was entered."""
        call = partial(self._call, **kwargs) if kwargs else self._call
        if self._has_state:
            return self._state.run(call, self._constants, args)
        return call([], [], self._constants, *args)[1]

    def enter(self, step: PureStep, out_tree: Any, args: Any, kwargs: Any) -> Any:
        """Compile the step of the types of these arguments, and run it."""
        forget_failed_dispatch(self.jitted)  # that of the call which found it was to be entered
        self._entering.step, self._entering.out_tree = step, out_tree
        try:
            # Compiled first and without the lock of the store, for which other steps would wait.
            self.jitted.lower(*self._state.values(), self._constants, *args, **kwargs).compile()
            return self(args, kwargs)
        finally:
            self._entering.step = self._entering.out_tree = None

    def _traced(self, written: Any, read: Any, constants: Any, args: Any, kwargs: Any) -> Any:
        step = self._entering.step
        if step is None:
            raise NotEntered
        leaves = jax.tree_util.tree_leaves(handles(self._static.split(args, kwargs)[:2]))
        after, results = step.fn(written, read, constants, leaves)
        return after, handles(jax.tree_util.tree_unflatten(self._entering.out_tree, results))


def _signature(function: Any) -> inspect.Signature:
    """The user's parameters, by which JAX names arguments in errors, after ours."""
    ours = [inspect.Parameter(f"_dflow_{number}", inspect.Parameter.POSITIONAL_ONLY) for number in range(_OURS)]
    return inspect.Signature([*ours, *inspect.signature(function).parameters.values()])


def _options(function: Any, *, keeps: bool) -> dict[str, Any]:
    """Which arguments of the user's function are static or donated, for one that takes them after ours.

    One that `keeps` what it writes donates only what is the user's to lose.
    """

    def shifted(positions: Iterable[int]) -> tuple[int, ...]:
        return tuple(position if position < 0 else position + _OURS for position in positions)

    static, static_names = static_options(function)
    donated, donated_names = donation_options(function)
    return {
        "static_argnums": shifted(static),
        "static_argnames": static_names,
        "donate_argnums": (*(() if keeps else (0,)), *shifted(donated)),
        "donate_argnames": donated_names,
    }
