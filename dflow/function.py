"""`@dflow.jit`: the whole path of a call.

JAX does the tracing, by the very rules of `jax.jit`. What a trace finds decides how calls of those argument types run:

- no state and nothing large closed over: `jax.jit` runs them, and dflow adds nothing but a check per call;
- else the trace becomes a graph, goes through the passes, and its plan is kept under the types. Most plans are one XLA
  call (`whole_step`); while one such is all there is, calls go to it without a look at their types.

Inside another trace a function is part of that trace. Invariant: `_jitted` never compiles a function before its trace
was looked at, because the first run of the Python function for new types ends by `NotEntered` unless it was entered.
"""

from __future__ import annotations

import functools
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MethodType
from typing import Any, Generic, ParamSpec, TypeVar, cast, overload

import jax
import numpy as np
from jax import jit as jax_jit  # JAX's own for good, also where a program has put `dflow.jit` in its place

from dflow.advice import advise_on_arguments, advise_on_mapping, advised_options, advised_trace
from dflow.config import CONFIG
from dflow.eager_mode import call_eagerly, eager
from dflow.graph_dump import dumper
from dflow.hoisting import hoisted
from dflow.homes import LOCAL, home_of
from dflow.jax_alone import refuse_state, refuse_types_alone, takes_constants
from dflow.lowering.local import LoweredStep
from dflow.methods import BoundMethod, bound, weakly, without_self
from dflow.number_checks import run_checked
from dflow.plans import UNKNOWN, Plan, Plans, plan_of_runner, plan_of_whole
from dflow.shardings import constrained
from dflow.stages import Traced as TracedStage
from dflow.static_arguments import StaticArguments, static_arguments
from dflow.step_on_device import StepOnDevice
from dflow.trace_log import TraceLog, captured_types, described
from dflow.tracing.captured import closed_over
from dflow.tracing.errors import PlainJitError
from dflow.tracing.from_jaxpr import holds_device
from dflow.tracing.jax_frontend import (
    HandleNeeded,
    checks_numbers,
    closed_parts,
    forget_failed_dispatch,
    hide_frames,
    hides_frames,
    is_resource,
    is_tracing,
    jit_disabled,
    passes_handles,
    runs_plainly,
    touches_state,
    trace_context,
)
from dflow.tracing.leaks import note_trace, watched_for_leaks
from dflow.tracing.source import at, caller
from dflow.tracing.trace import Traced, argument_names, traced_from
from dflow.tracing.variable_trees import handles
from dflow.whole_step import NotEntered, WholeStep

P = ParamSpec("P")
R = TypeVar("R")

#: Whether someone wants to see the passes, so that each function takes that way.
_LOOK_AT_GRAPHS = CONFIG.check or CONFIG.dump is not None


class _Entries(threading.local):
    count = 0


class Function(Generic[P, R]):
    """A function compiled for each structure and type of arguments it is called with. Made by `jit`.

    It has what a function made by `jax.jit` has (`lower`, `trace`, `eval_shape`, `clear_cache`), and `trace_log`.
    """

    def __init__(self, fn: Callable[P, R], options: Mapping[str, Any]) -> None:
        with advised_options(jax_jit, fn, options):
            named: Any = jax_jit(fn, **options)  # refuses what JAX refuses, in JAX's words
        functools.update_wrapper(self, named, updated=())
        self.__dict__.update(getattr(fn, "__dict__", {}), __wrapped__=fn)
        with suppress(ValueError, TypeError):  # a builtin that tells nobody
            self.__signature__ = named.__signature__
        self.fn = fn
        self._options = dict(options)
        self._static: StaticArguments = static_arguments(named)
        # The code of a wrapper is that of many functions.
        code = None if hasattr(fn, "__wrapped__") else getattr(fn, "__code__", None)
        self._log = TraceLog(getattr(self, "__name__", type(fn).__name__), code, caller())
        self._entries = _Entries()
        with _warned_of_already(options):
            self._jitted: Any = jax_jit(self._recorded(guarded=True), **options)
            # What is traced within another trace, or by hand, shares no cache with calls, whose types are known first.
            self._inner: Any = jax_jit(self._recorded(guarded=False), **options)
        self._plans = Plans()
        #: Whether a call was given variables among its arguments.
        self._takes_variables = False
        #: By the identity of an object: the function as its method.
        self._methods: dict[int, tuple[weakref.ref[Any], Function[..., Any]]] = {}

    @passes_handles
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function on the values of its variables; inside another trace, become part of it."""
        try:
            if not runs_plainly():
                return self._called_otherwise(args, kwargs)
            given, named = self._with_handles(args, kwargs) if self._takes_variables else (args, kwargs)
            whole = self._plans.whole
            try:
                if whole is not None:
                    return cast(R, whole(given, named))
                if not self._plans:
                    return cast(R, self._jitted(*given, **named))
            except HandleNeeded:
                self._takes_variables = True
                given, named = self._with_handles(args, kwargs)
            except (NotEntered, PlainJitError):  # types not seen yet, or seen by another thread this moment
                forget_failed_dispatch(self._jitted if whole is None else whole.jitted)
            except (TypeError, ValueError) as error:
                advise_on_arguments(error)
                raise
            return self._planned(given, named)
        except Exception as error:
            hide_frames(error)
            raise

    def trace_log(self) -> TraceLog:
        """Every trace so far: what changed, from which line, and what it cost."""
        return self._log

    @hides_frames
    def lower(self, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        """As `jax.jit`'s `lower`. Raises PlainJitError for a function whose variables are on a cluster."""
        return self.trace(*args, **kwargs).lower()

    @hides_frames
    def trace(self, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        """As `jax.jit`'s `trace`."""
        given, named = self._with_handles(args, kwargs)
        with watched_for_leaks():
            stage = self._inner.trace(*given, **named)
        if not touches_state(closed_parts(stage.jaxpr)[0].effects):
            return stage
        return TracedStage(stage, functools.partial(self._lowered, stage, given, named))

    @hides_frames
    def eval_shape(self, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        """As `jax.jit`'s `eval_shape`: the types of the result, computed without running anything."""
        given, named = self._with_handles(args, kwargs)
        with watched_for_leaks():
            return self._inner.eval_shape(*given, **named)

    def clear_cache(self) -> None:
        """Forget every trace and every compiled program."""
        self._jitted.clear_cache()
        self._inner.clear_cache()
        self._plans.clear()
        self._methods.clear()

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        if 0 in self._static.positions or not jax.tree_util.all_leaves([instance]):
            return MethodType(self, instance)
        # An object that JAX knows nothing of: each has traces of its own, which are gone with it.
        number = id(instance)
        if number not in self._methods:
            alive = weakly(instance, lambda _: self._methods.pop(number, None))
            self._methods[number] = alive, Function(bound(self.fn, alive), without_self(self._options))
        return BoundMethod(instance, self._methods[number][1])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_jitted":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._jitted, name)

    def __reduce__(self) -> Any:
        return type(self), (self.fn, self._options)

    def __repr__(self) -> str:
        return f"<dflow.jit of {self.fn!r}>"

    def _recorded(self, *, guarded: bool) -> Callable[P, R]:
        """The function as JAX sees it: it runs only to be traced, and each time is noted."""

        @functools.wraps(self.fn)
        def recorded(*args: P.args, **kwargs: P.kwargs) -> R:
            if guarded and not self._entries.count:
                raise NotEntered
            started = time.perf_counter()
            with advised_trace():
                result = self.fn(*args, **kwargs)
            note_trace(self._log.name)
            self._log.add(described(self.fn, args, kwargs), caller(), (time.perf_counter() - started) * 1e3)
            return cast(R, handles(result))

        recorded.__name__ = self._log.name  # which names the program; a partial has none to be copied
        return recorded

    def _entered(self, do: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._entries.count += 1
        try:
            return do(*args, **kwargs)
        finally:
            self._entries.count -= 1

    def _called_otherwise(self, args: Any, kwargs: Any) -> R:
        if jit_disabled():
            return cast(R, call_eagerly(self.fn, self._static, args, kwargs))
        args, kwargs = self._with_handles(args, kwargs)
        if not is_tracing():
            return self._planned(args, kwargs)
        try:
            return cast(R, self._inner(*args, **kwargs))
        except NotImplementedError as error:
            advise_on_mapping(error)
            raise
        except PlainJitError:
            stage = self._inner.trace(*args, **kwargs)
            return cast(R, hoisted(stage, jax.tree_util.tree_leaves(self._static.split(args, kwargs)[:2])))

    def _with_handles(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments as JAX is given them: with handles for variables, but in static ones."""
        if not self._static.positions and not self._static.names:
            return handles(args), handles(kwargs) if kwargs else kwargs
        is_static = self._static.test_of(args)
        given = tuple(arg if is_static(place) else handles(arg) for place, arg in enumerate(args))
        return given, {name: arg if is_static(name) else handles(arg) for name, arg in kwargs.items()}

    def _planned(self, args: Any, kwargs: Any) -> R:
        traced_args, traced_kwargs, static = self._static.split(args, kwargs)
        leaves, in_tree = jax.tree_util.tree_flatten((traced_args, traced_kwargs))
        key = (in_tree, tuple([_type_key(leaf) for leaf in leaves]), static, trace_context())
        plan = self._plans.get(key)
        if plan is UNKNOWN:
            return self._first_call(key, args, kwargs, leaves)
        if plan is None:
            return cast(R, self._entered(self._jitted, args, kwargs))
        return cast(R, self._run(plan, args, kwargs, leaves))

    def _run(self, plan: Plan, args: Any, kwargs: Any, leaves: list[Any]) -> Any:
        if not checks_numbers():
            return plan.run(args, kwargs, leaves)

        def anew() -> None:
            if not any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
                with eager():
                    self(*args, **kwargs)

        resources = [*plan.variables, *_resources((args, kwargs))]
        return run_checked(self._log.name, lambda: plan.run(args, kwargs, leaves), resources, plan.writes, anew)

    def _first_call(self, key: Any, args: Any, kwargs: Any, leaves: list[Any]) -> R:
        started, traces = time.perf_counter(), len(self._log)
        try:
            with watched_for_leaks():
                stage = self._entered(self._jitted.trace, args, kwargs)
        except (TypeError, ValueError) as error:
            advise_on_arguments(error)
            raise
        jaxpr, consts = closed_parts(stage.jaxpr)
        needed = touches_state(jaxpr.effects) or holds_device(jaxpr)
        if needed:
            refuse_state(self._log.name, self._options, jaxpr)
        constants = list(closed_over(jaxpr, consts))
        possible = takes_constants(self._options, jaxpr, constants)
        captured = captured_types(constants) if possible else ()
        if needed or captured or (_LOOK_AT_GRAPHS and possible):
            plan = self._make_plan(stage, args, kwargs, leaves)
            self._plans.put(key, plan, _resources((args, kwargs)))
            result = self._run(plan, args, kwargs, leaves)
        else:
            if self._plans:
                self._plans.put(key, None)
            result = self._entered(self._jitted, args, kwargs)
        self._log.finish(traces, (time.perf_counter() - started) * 1e3, captured)
        return cast(R, result)

    def _make_plan(self, stage: Any, args: Any, kwargs: Any, leaves: list[Any]) -> Plan:
        refuse_types_alone(self.fn, self._options, args, kwargs, leaves)
        traced = self._traced(stage, args, kwargs)
        passed = {id(resource) for resource in _resources((args, kwargs))}
        kept = tuple(resource for resource in traced.variables if id(resource) not in passed)
        home, observe = home_of(traced), dumper(self._log.name)
        if home is not LOCAL:
            return plan_of_runner(home.runner(traced, check=CONFIG.check, observe=observe), traced, kept)
        planned = LOCAL.plan(traced, check=CONFIG.check, observe=observe)
        if planned.pure is None:
            return plan_of_runner(planned.lower().compile().run, traced, kept)
        whole = self._plans.whole_like(planned.pure)
        if whole is None:
            kind = StepOnDevice if planned.pure.device else WholeStep
            whole = kind(LOCAL.store, planned.pure, self._jitted, self._options.get("compiler_options"))
        return plan_of_whole(whole, planned.pure, traced, kept)

    def _lowered(self, stage: Any, args: Any, kwargs: Any, platforms: tuple[str, ...] | None) -> LoweredStep:
        traced = self._traced(stage, args, kwargs)
        if home_of(traced) is not LOCAL:
            raise PlainJitError(
                f"{self._log.name} has variables on a cluster, so it has programs for several places{at(caller())}\n"
                f"  print(dflow.graph({self._log.name}, ...)) shows what it does"
            )
        return LOCAL.plan(traced, check=CONFIG.check, observe=None).lower(platforms)

    def _traced(self, stage: Any, args: Any, kwargs: Any) -> Traced:
        if any(self._options.get(name) is not None for name in ("in_shardings", "out_shardings")):
            stage = constrained(self.fn, self._options).trace(*args, **kwargs)
        names = argument_names(self.fn, args, kwargs, self._static.test_of(args))
        leaves = jax.tree_util.tree_leaves((args, kwargs))
        return traced_from(stage, names, self._options.get("compiler_options"), leaves)


@overload
def jit(fn: Callable[P, R], **options: Any) -> Function[P, R]: ...
@overload
def jit(fn: None = None, **options: Any) -> Callable[[Callable[P, R]], Function[P, R]]: ...
def jit(fn: Callable[P, R] | None = None, **options: Any) -> Any:
    """Compile `fn`, with its reads and writes of variables, into as few XLA calls as its devices allow.

    fn       takes and returns pytrees of arrays; variables may be closed over, passed and returned
    options  those of `jax.jit`, with the same meaning: `static_argnums`, `static_argnames`, `donate_argnums`,
             `donate_argnames`, `keep_unused`, `device`, `backend`, `inline`, `compiler_options`, `in_shardings`,
             `out_shardings`; a function with state refuses `device` and another `backend`
    raises   TypeError for an option that `jax.jit` does not have

    It is traced once for each structure and type of arguments. The effects on one variable happen in the order of
    the program. Without `fn` it gives a decorator.
    """
    if fn is None:
        return lambda function: jit(function, **options)
    return Function(fn, options)


@contextmanager
def _warned_of_already(options: Mapping[str, Any]) -> Iterator[None]:
    """JAX warns of these options each time that they are given."""
    if not {"backend", "device"} & options.keys():
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _resources(tree: Any) -> list[Any]:
    """The variables, by their handles, and queues in a pytree."""
    leaves = jax.tree_util.tree_leaves(tree, is_leaf=is_resource)
    return [leaf.handle.variable for leaf in leaves if is_resource(leaf)]


def _type_key(leaf: Any) -> Any:
    aval = getattr(leaf, "aval", None)
    if aval is not None:
        return aval
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype, leaf.shape
    return type(leaf)
