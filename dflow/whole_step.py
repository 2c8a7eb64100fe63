"""Steps that are one XLA call, called as `jax.jit` calls its functions.

JAX's own dispatch, which is in C++, tells the types of the arguments apart, flattens them and shapes the result. Beside
them it takes the values of the variables as lists, which the store keeps from one call to the next.

Invariant: a program is compiled only by `enter`, for a step that is known to be that of the argument types. Any other
call for types that JAX has not seen ends by `NotEntered`.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import jit as jax_jit

from dflow.lowering.local import CompiledStep, PureStep
from dflow.lowering.program import Program, awaited, lie_apart
from dflow.lowering.step_state import StepState
from dflow.lowering.store import Store
from dflow.static_arguments import StaticArguments, static_arguments
from dflow.tracing.jax_frontend import (
    compiled_for,
    donation_options,
    forget_failed_dispatch,
    passes_handles,
    static_options,
    uninterrupted,
)
from dflow.tracing.variable_trees import handles

#: The arguments of the compiled function that come before the user's: values written, values read, constants.
_OURS = 3
#: One of them, as JAX names it in an error.
_OUR_ARGUMENT = re.compile(r"argument _dflow_(\d)\[(\d+)\] of \S+")


class NotEntered(BaseException):
    """Ends a trace for argument types whose step is not known yet."""


class _Entering(threading.local):
    """The step whose program this thread compiles."""

    def __init__(self, static: StaticArguments) -> None:
        self._static = static
        self.step: PureStep | None = None
        self.out_tree: Any = None

    def traced(self, written: Any, read: Any, constants: Any, args: Any, kwargs: Any) -> Any:
        """The new values, and the result. Raises NotEntered for a step that is not to be compiled."""
        if self.step is None:
            raise NotEntered
        leaves = jax.tree_util.tree_leaves(handles(self._static.split(args, kwargs)[:2]))
        after, results = self.step.fn(written, read, constants, leaves)
        return after, handles(jax.tree_util.tree_unflatten(self.out_tree, results))


class WholeStep:
    """Calls the steps over one set of variables and constants, one for each set of argument types."""

    def __init__(self, store: Store, step: PureStep, function: Any, compiler_options: dict[str, Any] | None) -> None:
        """For the steps that the `jax.jit` function `function` stands for."""
        self._state = StepState(store, step.writes, step.reads, function.__name__, step.keeps)
        self._has_state = bool(step.writes or step.reads)
        self._given = step.constants
        self._constants = step.constants
        self._place = step.device
        self.keeps = step.keeps
        self._static = static_arguments(function)
        self._entering = entering = _Entering(self._static)
        #: Two threads that enter steps would compile one program twice.
        self._one_compiles = threading.RLock()

        def traced(written: Any, read: Any, constants: Any, /, *args: Any, **kwargs: Any) -> Any:
            return entering.traced(written, read, constants, args, kwargs)

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
        return (own.writes, own.reads, self._place, self.keeps, [*map(id, self._given)]) == (
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
        try:
            if self._has_state:
                return self._state.run(call, self._constants, args)
            return call([], [], self._constants, *args)[1]
        except ValueError as error:
            self._name_state(error)
            raise

    def _name_state(self, error: ValueError) -> None:
        """Have an error of JAX's name variables, where it names the arguments that they are for JAX."""
        held = self._state.writes, self._state.reads

        def named(found: re.Match[str]) -> str:
            kind, place = int(found[1]), int(found[2])
            return f"variable {held[kind][place].rpartition('#')[0]!r}" if kind < len(held) else "a closed-over array"

        if error.args and isinstance(error.args[0], str):
            error.args = (_OUR_ARGUMENT.sub(named, error.args[0]), *error.args[1:])

    def enter(self, step: PureStep, out_tree: Any, args: Any, kwargs: Any) -> Any:
        """Compile the step of the types of these arguments, and run it."""
        forget_failed_dispatch(self.jitted)  # that of the call which found it was to be entered
        with self._entered(step, out_tree):
            # Compiled first and without the lock of the store, for which other steps would wait.
            values = self._state.values()
            with self._one_compiles:
                stage = self.jitted.trace(*values, self._constants, *args, **kwargs)
                if _can_be_lowered(stage):
                    stage.lower().compile()
            return self(args, kwargs)

    def lower(self, step: PureStep, out_tree: Any, args: Any, kwargs: Any) -> LoweredWhole:
        """The program of the step of the types of these arguments, which calls have too."""
        with self._entered(step, out_tree):
            stage = self.jitted.lower(*self._state.values(), self._constants, *args, **kwargs)
        traced_args, traced_kwargs, _ = self._static.split(args, kwargs)
        join = self._static.joined(args, kwargs)

        def run(args: Any, kwargs: Any) -> Any:
            args, kwargs = join(args, kwargs)
            with suppress(NotEntered):
                return self(args, kwargs)
            return self.enter(step, out_tree, args, kwargs)

        return LoweredWhole(self, stage, jax.tree_util.tree_structure((traced_args, traced_kwargs)), run)

    def run_compiled(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of a program of this step, without the static ones of its arguments."""
        call = partial(awaited(call) if self.keeps else uninterrupted(call), **kwargs)
        if self._has_state:
            return self._state.run(call, self._constants, args)
        return call([], [], self._constants, *args)[1]

    @contextmanager
    def _entered(self, step: PureStep, out_tree: Any) -> Iterator[None]:
        self._entering.step, self._entering.out_tree = step, out_tree
        try:
            yield
        except ValueError as error:
            self._name_state(error)
            raise
        finally:
            self._entering.step = self._entering.out_tree = None


def _can_be_lowered(stage: jax.stages.Traced) -> bool:
    """Whether JAX can describe the arguments; it builds the user's classes anew for that, and some refuse."""
    try:
        return bool(stage.args_info)
    except Exception:
        return False


@dataclass(frozen=True)
class LoweredWhole:
    """A step that is one XLA call, lowered for arguments of the structure `in_tree`.

    `anywhere` runs it on arguments that lie elsewhere than where its program takes them.
    """

    whole: WholeStep
    stage: jax.stages.Lowered
    in_tree: Any
    anywhere: Callable[[Any, Any], Any]

    @property
    def programs(self) -> list[LoweredWhole]:
        """Itself, with JAX's `stage`."""
        return [self]

    def compile(self, compiler_options: dict[str, Any] | None = None) -> CompiledStep:
        """Compile it."""
        compiled = compiled_for(self.stage, handles(self.stage.args_info), compiler_options)

        def run(leaves: Sequence[Any]) -> Sequence[Any]:
            args, kwargs = handles(jax.tree_util.tree_unflatten(self.in_tree, leaves))
            try:
                return jax.tree_util.tree_leaves(handles(self.whole.run_compiled(compiled, args, kwargs)))
            except ValueError:
                if not lie_apart(leaves, compiled):
                    raise
            return jax.tree_util.tree_leaves(handles(self.anywhere(args, kwargs)))

        return CompiledStep(run, [Program(compiled, keeps=self.whole.keeps)])


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
