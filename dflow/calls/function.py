"""`@dflow.jit`: the whole path of a call.

JAX does the tracing, by the same rules as for `jax.jit`. The content of a trace decides how calls with those argument
types run:

- no state and no large closed-over arrays: `jax.jit` runs them, and dflow adds only a check per call;
- otherwise the trace becomes a graph, passes transform it, and its plan is stored by the types. Most plans are one XLA
  call (`single_executable`); while a function has only one such step, calls go to it without a look-up of their types.

Inside another trace, a function becomes part of that trace. Invariant: JAX never compiles a function before dflow has
inspected its trace, because JAX calls the planner for arguments without a compiled program.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from types import MethodType
from typing import Any, Generic, ParamSpec, TypeVar, cast, overload

import jax
from jax import jit as jax_jit  # bound here once, since a program may replace `jax.jit` by `dflow.jit`

from dflow.calls.advice import advise, advised_options, refused_argument
from dflow.calls.eager_mode import call_eagerly, call_on_arrays, eager
from dflow.calls.methods import OwnFunction, bound, weakly, without_self
from dflow.calls.number_checks import run_checked
from dflow.calls.planner import Planner, resources_in
from dflow.calls.plans import CallPlan
from dflow.calls.shared_traces import SharedTraces, may_share, shared_traces
from dflow.calls.stages import TracedFunction
from dflow.calls.static_arguments import static_arguments
from dflow.calls.trace_log import TraceLog
from dflow.distributed.training.applying import inlines_calls
from dflow.tracing.argument_ids import (
    GivenIds,
    is_list_of_strings,
    is_taken,
    naming_ids,
    refuse_ids,
    remember,
    with_ids,
)
from dflow.tracing.derivatives.border import Border
from dflow.tracing.derivatives.discharge import State, evaluate
from dflow.tracing.derivatives.one_device import on_one_device
from dflow.tracing.errors import DflowError, PlainJitError, VariableError
from dflow.tracing.jax_frontend import (
    MISSED,
    NARROW_ARGUMENTS,
    call_staged,
    checked_numbers,
    closed_parts,
    closed_tracers,
    dispatcher,
    hide_frames,
    hides_frames,
    is_staged,
    is_tracing,
    jit_disabled,
    runs_plainly,
    touches_state,
)
from dflow.tracing.jaxprs.attributes import repr_of
from dflow.tracing.jaxprs.leaks import watched_for_leaks
from dflow.tracing.jaxprs.trace import argument_names
from dflow.tracing.number_range import refusal_of_integers
from dflow.tracing.primitives.id_checks import failed_check
from dflow.tracing.source import caller
from dflow.tracing.state.resources import Variable, is_variable
from dflow.tracing.state.variable_trees import handles

P = ParamSpec("P")
R = TypeVar("R")

#: The pure function of each program that `_hoisted` ran, so that JAX finds what it compiled. It must not keep the
#: program alive.
_PURE: MutableMapping[Any, Any] = weakref.WeakKeyDictionary()


class Function(Generic[P, R]):
    """A function compiled for each structure and type of its arguments. Made by `jit`.

    It has the methods of a `jax.jit` function (`lower`, `trace`, `eval_shape`, `clear_cache`), and `trace_log`.
    """

    def __init__(self, fn: Callable[P, R], options: Mapping[str, Any]) -> None:
        with advised_options(jax_jit, fn, options):
            jitted: Any = jax_jit(_shareable(fn), **options)  # raises JAX's own errors for wrong options
        functools.update_wrapper(self, jitted, updated=())
        self.__dict__.update(getattr(fn, "__dict__", {}), __wrapped__=fn)
        with suppress(ValueError, TypeError):  # a builtin without an inspectable signature
            self.__signature__ = jitted.__signature__
        self.fn = fn
        self._options = dict(options)
        self._jitted = jitted
        self._planner = self._new_planner()
        self._static = self._planner.shared.static
        self._dispatch = self._new_dispatch()
        self._plans = self._planner.shared.plans
        #: For methods, by the `id` of the instance: a weak reference to it, and its own function.
        self._methods: dict[int, tuple[weakref.ref[Any], OwnFunction]] = {}

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function. Inside another trace, add it to that trace instead."""
        try:
            given: Any = args
            named: Any = kwargs
            for value in (*args, *kwargs.values()) if kwargs else args:
                if type(value) not in NARROW_ARGUMENTS:
                    given, named, ids = self._checked(args, kwargs)
                    if ids is not None:
                        return self._called_with_ids(given, named, ids)
                    break
            if not runs_plainly():
                return self._called_otherwise(args, kwargs)
            plans = self._plans
            single = plans.single
            result: Any = MISSED
            try:
                if single is not None:
                    result = single.call(given, named)
                elif plans.is_empty:
                    result = self._dispatch(*given, **named)
            except (TypeError, ValueError) as error:
                advise(error)
                raise
            return self._planned(given, named) if result is MISSED else result
        except Exception as error:
            if (failed := failed_check(error)) is not None:
                raise failed from None
            if (refused := self._refused(error, args, kwargs)) is not None:
                raise refused from None
            hide_frames(error)
            raise

    def trace_log(self) -> TraceLog:
        """Return the log of all traces: what changed, the line of the call, and the cost in ms."""
        return self._planner.shared.log

    @hides_frames
    def lower(self, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Like `jax.jit`'s `lower`. Raises PlainJitError for a function whose variables are on a cluster."""
        return self.trace(*args, **kwargs).lower()

    @hides_frames
    def trace(self, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Like `jax.jit`'s `trace`."""
        given, named, ids = self._with_ids(args, kwargs)
        given, named = self._with_handles(given, named)
        try:
            with watched_for_leaks(), naming_ids(ids or ()):
                stage = self._planner.trace(given, named)
        except (OverflowError, TypeError) as error:
            if (refused := self._refused(error, args, kwargs)) is not None:
                raise refused from None
            raise
        if not touches_state(closed_parts(stage.jaxpr)[0].effects):
            return stage
        return TracedFunction(stage, functools.partial(self._planner.lowered, stage, given, named))

    @hides_frames
    def eval_shape(self, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Like `jax.jit`'s `eval_shape`: return the types of the result without running anything."""
        return self.trace(*args, **kwargs).out_info

    def clear_cache(self) -> None:
        """Drop every trace and every compiled program."""
        self._jitted.clear_cache()
        self._plans.clear()
        self._methods.clear()

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        if 0 in self._static.positions or not jax.tree_util.all_leaves([instance]):
            return MethodType(self, instance)
        # JAX cannot trace this instance as an argument, so each instance has its own traces, dropped with it.
        number = id(instance)
        if number not in self._methods:
            alive = weakly(instance, functools.partial(_forget_method, weakref.ref(self), number))
            own = Function(bound(self.fn, alive), without_self(self._options))
            self._methods[number] = alive, OwnFunction(self.fn, own)
        return MethodType(self._methods[number][1], instance)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_jitted":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._jitted, name)

    def __reduce__(self) -> Any:
        return type(self), (self.fn, self._options)

    def __repr__(self) -> str:
        return f"<dflow.jit of {repr_of(self.fn)}>"

    def _new_planner(self) -> Planner:
        return Planner(self.fn, self._options, self._jitted, shared_traces(self.fn, self._jitted, self._new_traces))

    def _new_dispatch(self) -> Any:
        return dispatcher(self._jitted, functools.partial(self._planner.missed, self._jitted))

    def _new_traces(self) -> SharedTraces:
        fn = self.fn
        # Not for a wrapper: many functions share its code.
        code = None if hasattr(fn, "__wrapped__") else getattr(fn, "__code__", None)
        log = TraceLog(getattr(self, "__name__", type(fn).__name__), code, caller())
        return SharedTraces(static_arguments(self._jitted), log)

    def _checked(self, args: Any, kwargs: Any) -> tuple[Any, Any, Sequence[GivenIds] | None]:
        """Return the arguments for JAX, with handles in place of variables; or with ids, and these ids.

        See `with_ids`. Raises VariableError for a static variable: JAX compares static arguments by `==`, which is by
        value.
        """
        static, given = self._static, []
        if static.positions or static.names:
            given = [*(args[position] for position in static.among(args)), *(kwargs.get(name) for name in static.names)]
            for variable in filter(is_variable, given):
                raise VariableError(
                    f"variable {variable.name!r} is passed as a static argument of {self._planner.shared.log.name}",
                    "leave it out of static_argnums and static_argnames: a variable that is passed stays a variable",
                )
        leaves = jax.tree_util.tree_leaves((args, kwargs) if kwargs else args)
        types = [*map(type, leaves)]
        kinds = set(types)
        # A string that is not static is in a list of them: JAX takes no other.
        if kinds <= NARROW_ARGUMENTS and (str not in kinds or types.count(str) == [*map(type, given)].count(str)):
            return args, kwargs, None
        if given:
            leaves = static.leaves(args, kwargs)
        if self._planner.shared.known_ids or not all(map(is_taken, leaves)):
            given, named, ids = self._with_ids(args, kwargs)
            if ids is not None:
                return given, named, ids
        return *(self._with_handles(args, kwargs) if Variable in kinds else (args, kwargs)), None

    def _with_ids(self, args: Any, kwargs: Any) -> tuple[Any, Any, Sequence[GivenIds] | None]:
        """Return the arguments with ids, see `with_ids`, and the ids; None for these if no argument has changed."""
        *traced, static = self._static.split(args, kwargs)
        names = functools.partial(self._argument_names, args, kwargs, is_list_of_strings)
        (given, named), ids = with_ids(tuple(traced), names, self._planner.shared.known_ids)
        if ids is None:
            return args, kwargs, None
        return *(self._static.joined(args, kwargs)(given, named) if static else (given, named)), ids

    def _called_with_ids(self, given: Any, named: Any, ids: Sequence[GivenIds]) -> R:
        """Call the function for arguments that have ids."""
        with naming_ids(ids):
            result = self(*given, **named)
            if is_tracing() or jit_disabled():
                refuse_ids(result)
        remember(ids, self._planner.shared.known_ids)
        return result

    def _refused(self, error: Exception, args: Any, kwargs: Any) -> Exception | None:
        """Return the error about the argument that made JAX raise an OverflowError or a TypeError, if one did."""
        if not isinstance(error, OverflowError | TypeError) or isinstance(error, DflowError):
            return None
        leaves, names = self._static.leaves(args, kwargs), functools.partial(self._argument_names, args, kwargs)
        if isinstance(error, OverflowError):
            return refusal_of_integers(leaves, names)
        return refused_argument(error, leaves, names)

    def _argument_names(self, args: Any, kwargs: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
        """Return the names, for messages, of the leaves of the arguments that are not static."""
        found = argument_names(self.fn, args, kwargs, self._static.test_of(args), is_leaf)
        return [f"argument {name!r}" for name in found]

    def _called_otherwise(self, args: Any, kwargs: Any) -> R:
        if jit_disabled():
            return cast(R, call_eagerly(self.fn, self._static, args, kwargs))
        if inlines_calls() and is_tracing():
            # The function's ops become part of the running trace, instead of a call with a separate trace.
            with jax.named_scope(self._planner.shared.log.name):
                return cast(R, call_on_arrays(self.fn, self._static, args, kwargs))
        args, kwargs = self._with_handles(args, kwargs)
        if not is_tracing():
            return self._planned(args, kwargs)
        stage = self._planner.trace(args, kwargs)
        leaves = self._static.leaves(args, kwargs)
        try:
            return cast(R, call_staged(stage, leaves) if is_staged() else self._planner.jitted(*args, **kwargs))
        except NotImplementedError as error:
            advise(error)
            raise
        except PlainJitError:
            return cast(R, _hoisted(stage, leaves))

    def _with_handles(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments for JAX, with handles in place of variables except in static arguments."""
        if not self._static.positions and not self._static.names:
            return handles(args), handles(kwargs) if kwargs else kwargs
        return self._static.mapped(handles, args, kwargs)

    def _planned(self, args: Any, kwargs: Any) -> R:
        plan, leaves = self._planner.plan(args, kwargs)
        if plan is None:
            if self._jitted is not self._planner.jitted:
                self._jitted = self._planner.jitted
                self._dispatch = self._new_dispatch()
            found = self._dispatch(*args, **kwargs)
            # MISSED if another thread has just seen the function return a variable.
            return self._planned(args, kwargs) if found is MISSED else cast(R, found)
        result: R = self._run(plan, args, kwargs, leaves)
        self._planner.shared.log.finish()
        return result

    def _run(self, plan: CallPlan, args: Any, kwargs: Any, leaves: list[Any]) -> Any:
        if not checked_numbers():
            return plan.run(args, kwargs, leaves)

        def again() -> None:
            if not any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
                with eager():
                    self(*args, **kwargs)

        resources, name = [*plan.variables, *resources_in((args, kwargs))], self._planner.shared.log.name
        return run_checked(name, lambda: plan.run(args, kwargs, leaves), resources, plan.writes, again)


@overload
def jit(fn: Callable[P, R], **options: Any) -> Function[P, R]: ...
@overload
def jit(fn: None = None, **options: Any) -> Callable[[Callable[P, R]], Function[P, R]]: ...
def jit(fn: Callable[P, R] | None = None, **options: Any) -> Any:
    """Compile `fn`, with its reads and writes of variables, into as few XLA calls as its devices allow.

    fn       takes and returns pytrees of arrays; variables may be closed over, passed and returned
    options  those of `jax.jit`, with the same meaning: `static_argnums`, `static_argnames`, `donate_argnums`,
             `donate_argnames`, `keep_unused`, `device`, `backend`, `inline`, `compiler_options`, `in_shardings`,
             `out_shardings`
    raises   TypeError for an option that `jax.jit` does not have; calls of a function with state raise DflowError
             for `device`, or for a `backend` other than the default
    Returns a `Function`, or a decorator if `fn` is omitted. `fn` is traced once for each structure and type of its
    arguments. The effects on one variable happen in program order. Arguments may have ids as they are, for tables with
    a vocabulary: strings, and integers of 64 bits. Other uses of these raise InputError.
    """
    if fn is None:
        return lambda function: jit(function, **options)
    return Function(fn, options)


def _forget_method(function: weakref.ref[Function[..., Any]], number: int, _: Any) -> None:
    found = function()
    if found is not None:
        found._methods.pop(number, None)


def _shareable(fn: Any) -> Any:
    """Return the function, or a private wrapper where JAX's caches, keyed by function, cannot hold it."""
    if not callable(fn) or isinstance(fn, staticmethod) or may_share(fn):
        return fn  # or an object that JAX rejects

    @functools.wraps(fn)
    def own(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return own


def _hoisted(stage: Any, leaves: Sequence[Any]) -> Any:
    """Return the result of a trace in a JAX transform that runs eagerly, such as an outermost `jax.grad`.

    There is no enclosing trace that could hold the state. So the variables are read, a pure function of their values is
    called, and its new values are written back.
    """
    closed = stage.jaxpr
    border = Border(closed_parts(closed)[0].effects, lambda variable: True)
    pure = _PURE.get(closed)
    if pure is None:
        pure = _PURE.setdefault(closed, _pure_of(weakref.ref(closed)))
    results, after = pure(on_one_device([*map(border.value, border.touched)]), [*closed_tracers(stage), *leaves])
    border.write_back(after)
    return jax.tree_util.tree_unflatten(stage.out_tree, results)


def _pure_of(program: weakref.ref[Any]) -> Any:
    @jax_jit
    def pure(values: list[Any], leaves: list[Any]) -> tuple[list[Any], list[Any]]:
        jaxpr, consts = closed_parts(program())  # alive: the caller holds it
        border = Border(jaxpr.effects, lambda variable: True)
        state = State(zip(border.touched, values, strict=True))
        return evaluate(jaxpr, consts, leaves, state), state.of(border.writes)

    return pure
