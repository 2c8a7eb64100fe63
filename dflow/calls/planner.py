"""Plans: trace a function, and decide how its calls run.

JAX traces the Python function itself, so that JAX's own ways to trace it (`jax.eval_shape`, `jax.make_jaxpr`, another
`jax.jit`) and dflow share one trace. The content of a trace decides whether a plan of dflow's or `jax.jit` runs the
calls. A function that returns variables is traced through a wrapper that returns their handles instead, because JAX
would read the variables. The wrapper's first trace replays the trace that JAX already made.
"""

from __future__ import annotations

import functools
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import jax
from jax import jit as jax_jit

from dflow.calls.advice import advise_on_arguments, advise_on_trace
from dflow.calls.graph_dump import dumper
from dflow.calls.jax_alone import refuse_state, refuse_types_alone, takes_constants
from dflow.calls.plans import UNKNOWN, CallPlan
from dflow.calls.shardings import constrained
from dflow.calls.shared_traces import SharedTraces
from dflow.calls.single_executable import NotEntered, SingleExecutable
from dflow.calls.static_arguments import StaticArguments
from dflow.calls.trace_log import captured_types, described
from dflow.config import CONFIG
from dflow.lowering.state_backend import LoweredStep, Runner
from dflow.state_backends import LOCAL, home_of
from dflow.tracing.errors import InternalError
from dflow.tracing.jax_frontend import (
    Handle,
    ShardingTypeError,
    closed_parts,
    compiled_by_jax,
    is_resource,
    names_the_dead,
    replayed,
    resources_returned,
    returned_variables,
    source_of,
    touches_state,
)
from dflow.tracing.jaxprs.captured import closed_over
from dflow.tracing.jaxprs.from_jaxpr import holds_device
from dflow.tracing.jaxprs.leaks import note_trace, watched_for_leaks
from dflow.tracing.jaxprs.trace import Traced, argument_names, traced_from
from dflow.tracing.rare_collections import rare_collections
from dflow.tracing.source import caller
from dflow.tracing.state.variable_trees import handles

#: Whether checks or dumps of graphs are on, so that every function goes through the passes.
_LOOK_AT_GRAPHS = CONFIG.check or CONFIG.dump is not None


class Planner:
    """Traces one function, and decides how its calls run.

    fn       the Python function
    options  those of `jax.jit`
    raw      `jax.jit(fn, **options)`
    shared   state that all compiled functions of `fn` share
    """

    def __init__(self, fn: Callable[..., Any], options: Mapping[str, Any], raw: Any, shared: SharedTraces) -> None:
        self.fn, self.options, self.shared = fn, options, shared
        self._raw = raw
        self._giving_handles: Any = None
        self._first = _First()

    @property
    def jitted(self) -> Any:
        """The `jax.jit` function that JAX traces and runs: of `fn`, or of its wrapper once `fn` returned a variable."""
        if not self.shared.returns_variables:
            return self._raw
        if self._giving_handles is None:
            self._giving_handles = _giving_handles(
                self.fn, self.options, self.shared.log.name, self.shared.static, self._first
            )
        return self._giving_handles

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of `jax.jit`'s `trace`; log the trace if it is new."""
        started, shared = time.perf_counter(), self.shared
        try:
            stage = self._traced_by_jax(args, kwargs)
            jaxpr, _ = closed_parts(stage.jaxpr)
            if jaxpr.effects and names_the_dead(jaxpr.effects):
                self.jitted.clear_cache()  # the trace is of collected variables, which others may have replaced
                stage = self._traced_by_jax(args, kwargs)
                jaxpr, _ = closed_parts(stage.jaxpr)
        except (TypeError, ValueError, IndexError, ShardingTypeError) as error:
            advise_on_trace(error)
            raise
        if jaxpr not in shared.jaxprs:
            shared.jaxprs.add(jaxpr)
            if touches_state(jaxpr.effects):
                shared.touches_state(self.fn)
            trace_ms = (time.perf_counter() - started) * 1e3
            note_trace(source_of(jaxpr), shared.log.name)
            shared.log.add(described(self.fn, args, kwargs, shared.static.test_of(args)), caller(), trace_ms)
        return stage

    def _traced_by_jax(self, args: Any, kwargs: Any) -> Any:
        if self.shared.returns_variables:
            return self.jitted.trace(*args, **kwargs)
        with resources_returned() as found:
            stage = self._raw.trace(*args, **kwargs)
        if not found and not returned_variables(closed_parts(stage.jaxpr)[0]):
            return stage
        self.shared.returns_variables = True
        with self._first.being(stage, found):
            return self.jitted.trace(*args, **kwargs)

    def missed(self, jitted: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Have JAX compile and run arguments new to `jitted`, and return what JAX's dispatch expects.

        Raises NotEntered if a plan of dflow's, or the wrapper that returns handles, runs these arguments.
        """
        plan, _ = self.plan(args, kwargs)
        if plan is not None or jitted is not self.jitted:
            raise NotEntered
        result = compiled_by_jax(jitted, args, kwargs)
        self.shared.log.finish()
        return result

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[CallPlan | None, list[Any]]:
        """Return the plan of a call, or None if JAX runs it; and the leaves of its traced arguments."""
        key, leaves = self.shared.key_of(args, kwargs)
        plan = self.shared.plans.get(key)
        if plan is UNKNOWN:
            with self.shared.one_thread():
                plan = self.shared.plans.get(key)
                if plan is UNKNOWN:
                    with rare_collections:
                        plan = self._first_call(args, kwargs, leaves)
                    self.shared.plans.put(key, plan, resources_in((args, kwargs)))
        if plan is not None:
            self.shared.plans.warn_of_namesakes(plan)
        return plan, leaves

    def lowered(self, stage: Any, args: Any, kwargs: Any, platforms: tuple[str, ...] | None) -> LoweredStep:
        """Return the lowered programs of a call, for `platforms` if not None, else for this process's devices."""
        traced = self.traced(stage, args, kwargs)
        home = home_of(traced)
        if platforms is not None or not home.is_local:
            return home.lower(traced, check=CONFIG.check, observe=None).lower(platforms)
        key, _ = self.shared.key_of(args, kwargs)
        with self.shared.one_thread():
            plan = self._plan_of(stage, traced, args, kwargs)
            # Not under the key of calls: their first call must still check its arguments.
            self.shared.plans.put(("lowered", key), plan, resources_in((args, kwargs)))
        if plan.lower is None:
            raise InternalError(f"the plan of {self.shared.log.name} is one of this process, and cannot be lowered")
        return plan.lower(args, kwargs)

    def traced(self, stage: Any, args: Any, kwargs: Any) -> Traced:
        """Return the graph of a trace."""
        if any(self.options.get(name) is not None for name in ("in_shardings", "out_shardings")):
            stage = constrained(self.fn, self.options).trace(*args, **kwargs)
        names = argument_names(self.fn, args, kwargs, self.shared.static.test_of(args))
        leaves = jax.tree_util.tree_leaves((args, kwargs))
        return traced_from(stage, names, self.options.get("compiler_options"), leaves)

    def _first_call(self, args: Any, kwargs: Any, leaves: list[Any]) -> CallPlan | None:
        """Trace for arguments of new types, and decide how their calls run: the plan, or None if JAX runs them."""
        started, traces = time.perf_counter(), len(self.shared.log)
        try:
            with watched_for_leaks():
                stage = self.trace(args, kwargs)
        except (TypeError, ValueError) as error:
            advise_on_arguments(error)
            raise
        jaxpr, consts = closed_parts(stage.jaxpr)
        needed = touches_state(jaxpr.effects) or holds_device(jaxpr)
        if needed:
            refuse_state(self.shared.log.name, self.options, jaxpr)
        constants = list(closed_over(jaxpr, consts))
        possible = takes_constants(self.options, jaxpr, constants)
        captured = captured_types(constants) if possible else ()
        self.shared.log.begin(traces, started, captured)
        if not (needed or captured or (_LOOK_AT_GRAPHS and possible)):
            return None
        refuse_types_alone(self.fn, self.options, args, kwargs, leaves)
        return self._plan_of(stage, self.traced(stage, args, kwargs), args, kwargs)

    def _plan_of(self, stage: Any, traced: Traced, args: Any, kwargs: Any) -> CallPlan:
        """Return the plan of a trace, which is made if it does not exist yet."""
        jaxpr, _ = closed_parts(stage.jaxpr)
        found = self.shared.plans.of_trace(jaxpr)
        if found is not None:
            return found
        passed = {id(resource) for resource in resources_in((args, kwargs))}
        kept = tuple(resource for resource in traced.variables if id(resource) not in passed)
        home, observe = home_of(traced), dumper(self.shared.log.name)
        plan = functools.partial(CallPlan, traced, kept, weakref.ref(jaxpr))
        if not home.is_local:
            runner = home.runner(traced, check=CONFIG.check, observe=observe)
            return plan(_on_leaves(lambda: runner, traced.out_tree))
        step = LOCAL.lower(traced, check=CONFIG.check, observe=observe)
        if step.call is None:
            lowered = step.lower()
            compiled = functools.cache(lambda: lowered.compile(None)[0])  # by the first call
            return plan(_on_leaves(compiled, traced.out_tree), lambda args, kwargs: lowered)
        single = self.shared.plans.single_like(step, step.call)
        if single is None:
            single = SingleExecutable(step, step.call, self.jitted, self.options.get("compiler_options"))
        run, lower = functools.partial(single.run, step), functools.partial(single.lower, step)
        return plan(lambda args, kwargs, _: run(args, kwargs), lower, single)


def _on_leaves(runner: Callable[[], Runner], out_tree: Any) -> Callable[[Any, Any, list[Any]], Any]:
    """Return a function that runs a call: it takes args, kwargs and the leaves of the traced arguments."""
    return lambda args, kwargs, leaves: jax.tree_util.tree_unflatten(out_tree, runner()(leaves))


def resources_in(tree: Any) -> list[Any]:
    """Return the variables and queues in a pytree. Variables may be there as handles."""
    leaves = jax.tree_util.tree_leaves(tree, is_leaf=is_resource)
    return [leaf.handle.variable for leaf in leaves if is_resource(leaf)]


class _First(threading.local):
    """Per thread: the trace to replay in the next trace of the wrapper, with the variables it was found to return."""

    stage: Any = None
    found: Mapping[int, Handle] = MappingProxyType({})

    @contextmanager
    def being(self, stage: Any, found: Mapping[int, Handle]) -> Iterator[None]:
        """Replay `stage` in the next trace inside this context, if `found` has variables among its results."""
        self.stage, self.found = (stage if found else None), found
        try:
            yield
        finally:
            self.stage, self.found = None, {}

    def replayed(self, leaves: Sequence[Any]) -> Any:
        """Return the results of the stage, and clear it so that it is replayed only once."""
        stage, self.stage = self.stage, None
        results = replayed(*closed_parts(stage.jaxpr), leaves, self.found)
        return jax.tree_util.tree_unflatten(stage.out_tree, results)


def _giving_handles(
    fn: Callable[..., Any], options: Mapping[str, Any], name: str, static: StaticArguments, first: _First
) -> Any:
    """Return `jax.jit` of a wrapper of `fn` that returns handles in place of variables."""

    @functools.wraps(fn)
    def giving_handles(*args: Any, **kwargs: Any) -> Any:
        if first.stage is None:
            return handles(fn(*args, **kwargs))
        return first.replayed(jax.tree_util.tree_leaves(handles(static.split(args, kwargs)[:2])))

    giving_handles.__name__ = name  # JAX names the program by it; `functools.partial` has none for `wraps` to copy
    with warnings.catch_warnings():
        if {"backend", "device"} & options.keys():  # JAX already warned about these for `fn`
            warnings.simplefilter("ignore", DeprecationWarning)
        return jax_jit(giving_handles, **options)
