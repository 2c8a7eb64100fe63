"""Single-executable steps: steps that are one XLA call, dispatched by `jax.jit`.

JAX's own dispatch, which is in C++, selects the program by argument types, flattens the arguments and builds the
result. The values of the variables are passed as extra list arguments, which the store reuses between calls.

Invariant: only `enter` compiles a program, for a step known to have these argument types. Any other call with types
that JAX has not compiled raises NotEntered.
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

from dflow.calls.static_arguments import StaticArguments, static_arguments
from dflow.lowering.local import CompiledStep, PureStep
from dflow.lowering.programs.program import Program, awaited, lie_apart
from dflow.lowering.state.step_state import StepState
from dflow.lowering.state.store import Store
from dflow.tracing.jax_frontend import (
    compiled_for,
    donation_options,
    forget_failed_dispatch,
    passes_handles,
    static_options,
    uninterrupted,
)
from dflow.tracing.state.variable_trees import handles

#: Number of dflow's arguments, before the user's: values written, values read, constants.
_OURS = 3
#: One of them in the text of a JAX error.
_OUR_ARGUMENT = re.compile(r"argument _dflow_(\d)\[(\d+)\] of \S+")


class NotEntered(BaseException):
    """Raised in a trace for argument types whose step is not known yet."""


class _Entering(threading.local):
    """The step that this thread is compiling, if any."""

    def __init__(self, static: StaticArguments) -> None:
        self._static = static
        self.step: PureStep | None = None
        self.out_tree: Any = None

    def traced(self, written: Any, read: Any, constants: Any, args: Any, kwargs: Any) -> Any:
        """Return the new values of the variables, and the result. Raises NotEntered if this thread compiles no step."""
        if self.step is None:
            raise NotEntered
        leaves = jax.tree_util.tree_leaves(handles(self._static.split(args, kwargs)[:2]))
        after, results = self.step.fn(written, read, constants, leaves)
        return after, handles(jax.tree_util.tree_unflatten(self.out_tree, results))


class WholeStep:
    """Runs the steps over one set of variables and constants: one program for each set of argument types."""

    def __init__(self, store: Store, step: PureStep, function: Any, compiler_options: dict[str, Any] | None) -> None:
        """`function` is the `jax.jit` function of the steps; `step` is the first of them."""
        self._state = StepState(store, step.writes, step.reads, function.__name__, step.keeps)
        self._has_state = bool(step.writes or step.reads)
        self._given = step.constants
        self._constants = step.constants
        self._place = step.device
        self.keeps = step.keeps
        self._static = static_arguments(function)
        self._entering = entering = _Entering(self._static)
        #: Serializes compilation: two threads would otherwise compile the same program twice.
        self._one_compiles = threading.RLock()

        def traced(written: Any, read: Any, constants: Any, /, *args: Any, **kwargs: Any) -> Any:
            return entering.traced(written, read, constants, args, kwargs)

        traced.__name__ = traced.__qualname__ = function.__name__
        with suppress(ValueError, TypeError):  # a builtin without an inspectable signature
            traced.__signature__ = _signature(function)  # type: ignore[attr-defined]
        options = _options(function, keeps=step.keeps)
        #: JAX's function of dflow's arguments and the user's.
        self.jitted: Any = jax_jit(traced, keep_unused=True, compiler_options=compiler_options, **options)
        self._call = awaited(self.jitted) if step.keeps else self.jitted

    def takes(self, step: PureStep) -> bool:
        """Whether a step has these variables, constants, device and `keeps`."""
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
        """Run the step for these arguments. Raises NotEntered if none was entered for their types."""
        call = partial(self._call, **kwargs) if kwargs else self._call
        try:
            if self._has_state:
                return self._state.run(call, self._constants, args)
            return call([], [], self._constants, *args)[1]
        except ValueError as error:
            self._name_state(error)
            raise

    def _name_state(self, error: ValueError) -> None:
        """Replace argument positions by variable names in the message of an error that JAX raised."""
        held = self._state.writes, self._state.reads

        def named(found: re.Match[str]) -> str:
            kind, place = int(found[1]), int(found[2])
            return f"variable {held[kind][place].rpartition('#')[0]!r}" if kind < len(held) else "a closed-over array"

        if error.args and isinstance(error.args[0], str):
            error.args = (_OUR_ARGUMENT.sub(named, error.args[0]), *error.args[1:])

    def enter(self, step: PureStep, out_tree: Any, args: Any, kwargs: Any) -> Any:
        """Compile the step for the types of these arguments, and run it."""
        forget_failed_dispatch(self.jitted)  # the dispatch that ended in NotEntered
        with self._entered(step, out_tree):
            # Compile before the call takes the store's lock, which would block other steps for as long.
            values = self._state.values()
            with self._one_compiles:
                stage = self.jitted.trace(*values, self._constants, *args, **kwargs)
                if _can_be_lowered(stage):
                    stage.lower().compile()
            return self(args, kwargs)

    def lower(self, step: PureStep, out_tree: Any, args: Any, kwargs: Any) -> LoweredWhole:
        """Return the program that calls with arguments of these types run, lowered."""
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
        """Run `call`, a compiled program of this step. `args` and `kwargs` must not contain the static arguments."""
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
    """Whether JAX can describe the arguments. It rebuilds the user's pytree classes for this, and some raise."""
    try:
        return bool(stage.args_info)
    except Exception:
        return False


@dataclass(frozen=True)
class LoweredWhole:
    """A single-executable step, lowered for arguments of the structure `in_tree`.

    `anywhere` runs it on arguments that are on other devices than its program expects.
    """

    whole: WholeStep
    stage: jax.stages.Lowered
    in_tree: Any
    anywhere: Callable[[Any, Any], Any]

    @property
    def programs(self) -> list[LoweredWhole]:
        """The one program, which is this object: it has JAX's `stage`."""
        return [self]

    def compile(self, compiler_options: dict[str, Any] | None = None) -> CompiledStep:
        """Compile the program."""
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
    """Return the user's signature after dflow's arguments; JAX names arguments in errors by it."""
    ours = [inspect.Parameter(f"_dflow_{number}", inspect.Parameter.POSITIONAL_ONLY) for number in range(_OURS)]
    return inspect.Signature([*ours, *inspect.signature(function).parameters.values()])


def _options(function: Any, *, keeps: bool) -> dict[str, Any]:
    """Return `jax.jit` options for the user's static and donated arguments, with positions after dflow's.

    A step that `keeps` its variables' old values donates only the buffers that the user donated.
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
