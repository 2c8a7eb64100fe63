"""Single-executable steps: steps that are one XLA call, dispatched by `jax.jit`.

JAX's own dispatch, which is in C++, selects the program by argument types, flattens the arguments and builds the
result. The values of the variables are passed as extra list arguments, which the store reuses between calls.

Invariant: only `run` and `lower` compile a program, for a step known to have these argument types. A call with types
whose step is not known returns MISSED, and leaves the variables as they are.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import jax
from jax import jit as jax_jit

from dflow.calls.static_arguments import static_arguments
from dflow.lowering.programs.program import awaited, lie_apart
from dflow.lowering.state.held_value import StepState
from dflow.lowering.state_backend import LoweredStep, Runner
from dflow.lowering.steps.local_step import LocalStep
from dflow.lowering.steps.plan import Call
from dflow.lowering.values.devices import device_named
from dflow.lowering.values.variable_key import shown
from dflow.tracing.errors import InternalError
from dflow.tracing.jax_frontend import (
    MISSED,
    compiled_by_jax,
    compiled_for,
    dispatcher,
    is_resource,
    jit_options,
    missed,
    uninterrupted,
)
from dflow.tracing.state.variable_trees import handles

#: Number of dflow's arguments, before the user's: values written, values read, constants.
_OURS = 3
#: One of them in the text of a JAX error.
_OUR_ARGUMENT = re.compile(r"argument _dflow_(\d)\[(\d+)\] of \S+")


class SingleExecutable:
    """Runs the steps over one set of variables and constants: one program for each set of argument types.

    The variables of a step on a device make JAX run it there, but JAX refuses arguments that are committed to another
    device. So these are copied to the step's device.
    """

    def __init__(self, step: LocalStep, call: Call, function: Any, compiler_options: dict[str, Any] | None) -> None:
        """`function` is the `jax.jit` function of the steps; `step`, which is the call `call`, is the first of them."""
        self._has_state = bool(call.writes or call.reads)
        self._given, self.identity = step.traced.constants, identity_of(step, call)
        self._device = device_named(call.device) if call.device else None
        self._constants = tuple(map(self._here, self._given))
        name = function.__name__
        self._table, self._dispatch = step.store.table, step.store.table.runner(call.writes)
        self._state = StepState(call.writes, call.reads, name, call.keeps)
        self._keeps = call.keeps
        #: Whether an argument was once on another device, so that calls now check each argument.
        self._looks = False
        self._static = static = static_arguments(function)
        #: Per thread, as `step`: the step that the thread has JAX trace and compile, if any.
        self._entered = entered = threading.local()
        #: The steps that were compiled, by what their traces depend on.
        self._known = known = WeakValueDictionary[Hashable, LocalStep]()
        #: Serializes compilation: two threads would otherwise compile the same program twice.
        self._one_compiles = threading.RLock()

        def traced(written: Any, read: Any, constants: Any, /, *args: Any, **kwargs: Any) -> Any:
            step: LocalStep | None = getattr(entered, "step", None)
            if step is None:
                raise InternalError(f"JAX traces {name} where no step of it is compiled")
            leaves = static.leaves(*handles((args, kwargs)))
            after, results = step.values(written, read, constants, leaves)
            return after, handles(jax.tree_util.tree_unflatten(step.traced.out_tree, results))

        traced.__name__ = traced.__qualname__ = name
        with suppress(ValueError, TypeError):  # a builtin without an inspectable signature
            traced.__signature__ = _signature(function)  # type: ignore[attr-defined]
        options = _options(function, keeps=call.keeps)
        #: JAX's function of dflow's arguments and the user's.
        self.jitted: Any = jax_jit(traced, keep_unused=True, compiler_options=compiler_options, **options)
        jitted = self.jitted

        def on_miss(written: Any, read: Any, constants: Any, /, *args: Any, **kwargs: Any) -> Any:
            before = getattr(entered, "step", None)
            if (step := before) is None and (step := known.get(static.key_of(args, kwargs)[0])) is None:
                return missed((written, MISSED))
            entered.step = step
            try:
                return compiled_by_jax(jitted, (written, read, constants, *args), kwargs)
            finally:
                entered.step = before

        dispatch = dispatcher(jitted, on_miss)
        self._call = awaited(dispatch) if call.keeps else dispatch

    def call(self, args: Any, kwargs: Any) -> Any:
        """Run the step for these arguments. Returns MISSED if none was compiled for their types."""
        if self._looks:
            args, kwargs = self._brought(args, kwargs)
        call = partial(self._call, **kwargs) if kwargs else self._call
        try:
            if self._has_state:
                return self._dispatch(self._state, call, (self._constants, *args))
            return call([], [], self._constants, *args)[1]
        except ValueError as error:
            if self._looks or not self._is_elsewhere((args, kwargs)):
                self._name_state(error)
                raise
        self._looks = True
        return self.call(args, kwargs)

    def _name_state(self, error: ValueError) -> None:
        """Replace argument positions by variable names in the message of an error that JAX raised."""
        held = self._state.writes, self._state.reads

        def named(found: re.Match[str]) -> str:
            kind, position = int(found[1]), int(found[2])
            return f"variable {shown(held[kind][position])!r}" if kind < len(held) else "a closed-over array"

        if error.args and isinstance(error.args[0], str):
            error.args = (_OUR_ARGUMENT.sub(named, error.args[0]), *error.args[1:])

    def run(self, step: LocalStep, args: Any, kwargs: Any, _: Sequence[Any] = ()) -> Any:
        """Run the step for these arguments, and compile it first if JAX has no program for them.

        JAX distinguishes more than a plan's key does, such as the devices of the arguments.
        """
        if (result := self.call(args, kwargs)) is not MISSED:
            return result
        args, kwargs = self._brought(args, kwargs)
        with self._compiling(step):
            # Compile before the call takes the store's lock, which would block other steps for as long.
            values = self._table.values_of(self._state)
            with self._one_compiles:
                stage = self.jitted.trace(*values, self._constants, *args, **kwargs)
                if _can_be_lowered(stage):
                    stage.lower().compile()
            self._known[self._static.key_of(args, kwargs)[0]] = step
            return self.call(args, kwargs)

    def lower(self, step: LocalStep, args: Any, kwargs: Any) -> LoweredStep:
        """Return the program that calls with arguments of these types run, lowered."""
        args, kwargs = self._brought(args, kwargs)
        with self._compiling(step):
            stage = self.jitted.lower(*self._table.values_of(self._state), self._constants, *args, **kwargs)
        in_tree = jax.tree_util.tree_structure(self._static.split(args, kwargs)[:2])
        join = self._static.joined(args, kwargs)

        def compiled(compiler_options: dict[str, Any] | None) -> tuple[Runner, list[Any]]:
            program = compiled_for(stage, handles(stage.args_info), compiler_options)

            def run(leaves: Sequence[Any]) -> Sequence[Any]:
                args, kwargs = handles(jax.tree_util.tree_unflatten(in_tree, leaves))
                try:
                    return jax.tree_util.tree_leaves(handles(self._run_compiled(program, args, kwargs)))
                except ValueError:
                    if not lie_apart(leaves, program):
                        raise
                return jax.tree_util.tree_leaves(handles(self.run(step, *join(args, kwargs))))

            return run, [program]

        return LoweredStep([stage], compiled)

    def _run_compiled(self, program: Any, args: Any, kwargs: Any) -> Any:
        """Run a compiled program of this step; the arguments are without the static ones."""
        args, kwargs = self._brought(args, kwargs)
        call = partial(awaited(program) if self._keeps else uninterrupted(program), **kwargs)
        if self._has_state:
            return self._dispatch(self._state, call, (self._constants, *args))
        return call([], [], self._constants, *args)[1]

    @contextmanager
    def _compiling(self, step: LocalStep) -> Iterator[None]:
        before, self._entered.step = getattr(self._entered, "step", None), step
        try:
            yield
        except ValueError as error:
            self._name_state(error)
            raise
        finally:
            self._entered.step = before

    def _brought(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments on the step's device, if it has one."""
        if self._device is None:
            return args, kwargs
        return tuple(map(self._argument, args)), {name: self._argument(value) for name, value in kwargs.items()}

    def _argument(self, argument: Any) -> Any:
        """Return an argument with its arrays on the device; the same object if they are, as it may be static."""
        return jax.tree_util.tree_map(self._here, argument) if self._is_elsewhere(argument) else argument

    def _is_elsewhere(self, tree: Any) -> bool:
        return any(self._here(leaf) is not leaf for leaf in jax.tree_util.tree_leaves(tree))

    def _here(self, leaf: Any) -> Any:
        if self._device is None or not isinstance(leaf, jax.Array) or is_resource(leaf):
            return leaf
        is_elsewhere = leaf.committed and leaf.sharding.device_set != {self._device}
        return jax.device_put(leaf, self._device) if is_elsewhere else leaf


def identity_of(step: LocalStep, call: Call) -> tuple[Any, ...]:
    """Return what the steps of one `SingleExecutable` share: variables, device, `keeps` and constants."""
    return call.writes, call.reads, call.device, call.keeps, [*map(id, step.traced.constants)]


def _can_be_lowered(stage: jax.stages.Traced) -> bool:
    """Whether JAX can describe the arguments. It rebuilds the user's pytree classes for this, and some raise."""
    try:
        return bool(stage.args_info)
    except Exception:
        return False


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

    options = jit_options(function)
    return {
        "static_argnums": shifted(options["static_argnums"]),
        "static_argnames": options["static_argnames"],
        "donate_argnums": (*(() if keeps else (0,)), *shifted(options["donate_argnums"])),
        "donate_argnames": options["donate_argnames"],
    }
