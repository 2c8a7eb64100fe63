"""Plans: trace a function, and decide how its calls run.

JAX traces the Python function itself, so that JAX's own ways to trace it (`jax.eval_shape`, `jax.make_jaxpr`, another
`jax.jit`) and dflow share one trace. The content of a trace decides whether a plan of dflow's or `jax.jit` runs the
calls. A function that returns variables is traced through a wrapper that returns their handles instead, because JAX
would read the variables. The wrapper's first trace replays the trace that JAX already made.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
from jax import jit as jax_jit

from dflow.calls.advice import advise
from dflow.calls.jit_options import constrained, refuse_state, refuse_types_alone, takes_constants
from dflow.calls.plans import UNKNOWN, CallPlan
from dflow.calls.shared_traces import SharedTraces
from dflow.calls.single_executable import SingleExecutable, identity_of
from dflow.calls.trace_log import described
from dflow.config import CONFIG
from dflow.distributed.steps.step_gate import preparing
from dflow.distributed.training.applying import taker_of_gradients
from dflow.lowering.passes.base import Observer
from dflow.lowering.state_backend import LoweredStep, Runner
from dflow.lowering.steps.program_watch import RunCall, WatchedProgram, program_watch, watched
from dflow.state_backends import LOCAL, home_of
from dflow.tracing.argument_ids import refuse_ids_of
from dflow.tracing.errors import InternalError
from dflow.tracing.ir.graph import Graph
from dflow.tracing.ir.types import array_type_of
from dflow.tracing.jax_frontend import (
    ShardingTypeError,
    closed_parts,
    compiled_by_jax,
    is_resource,
    is_tracing,
    missed,
    names_the_dead,
    replayed,
    returned_resources,
    source_of,
    touches_state,
)
from dflow.tracing.jaxprs.attributes import normal
from dflow.tracing.jaxprs.captured import closed_over, is_large
from dflow.tracing.jaxprs.from_jaxpr import holds_device
from dflow.tracing.jaxprs.leaks import note_trace, watched_for_leaks
from dflow.tracing.jaxprs.trace import Traced, argument_names, traced_from, written_keys
from dflow.tracing.moments import reach
from dflow.tracing.primitives.namesakes import StepResources
from dflow.tracing.rare_collections import rare_collections
from dflow.tracing.source import caller
from dflow.tracing.state.variable_trees import handles
from dflow.tracing.syntax.text import text

#: Whether checks or dumps of graphs are on, so that every function goes through the passes.
_LOOK_AT_GRAPHS = CONFIG.check or CONFIG.dump is not None
_dumps = itertools.count()


class Planner:
    """Traces one function, and decides how its calls run.

    fn       the Python function
    options  those of `jax.jit`
    raw      `jax.jit(fn, **options)`
    shared   state that all compiled functions of `fn` share
    """

    def __init__(self, fn: Callable[..., Any], options: Mapping[str, Any], raw: Any, shared: SharedTraces) -> None:
        self.fn, self.options, self.shared = fn, options, shared
        self._raw = self._jitted = raw
        #: Per thread, as `stage`: the trace that the wrapper's next trace replays, if any.
        self._first = threading.local()

    @property
    def jitted(self) -> Any:
        """The `jax.jit` function that JAX traces and runs: of `fn`, or of its wrapper once `fn` returned a variable."""
        if self.shared.returns_variables and self._jitted is self._raw:
            self._jitted = self._returning_handles()
        return self._jitted

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
        except (TypeError, ValueError, IndexError, OverflowError, ShardingTypeError) as error:
            advise(error)
            raise
        if jaxpr not in shared.jaxprs:
            if not is_tracing():
                refuse_ids_of(stage.out_tree)
            shared.jaxprs.add(jaxpr)
            if touches_state(jaxpr.effects):
                shared.touches_state(self.fn)
            trace_ms = (time.perf_counter() - started) * 1e3
            note_trace(source_of(jaxpr), shared.log.name)
            arguments = described(self.fn, args, kwargs, shared.static.test_of(args))
            taker, is_look = taker_of_gradients()
            shared.log.add(
                arguments, caller(), trace_ms, is_within=is_tracing(), is_look=is_look, taker="" if is_look else taker
            )
            shared.traced(stage.jaxpr)
        return stage

    def _traced_by_jax(self, args: Any, kwargs: Any) -> Any:
        jitted = self.jitted
        stage = jitted.trace(*args, **kwargs)
        if jitted is not self._raw or not returned_resources(closed_parts(stage.jaxpr)[0]):
            return stage
        self.shared.returns_variables = True
        self._first.stage = stage
        try:
            return self.jitted.trace(*args, **kwargs)
        finally:
            self._first.stage = None

    def _returning_handles(self) -> Any:
        """Return `jax.jit` of a wrapper of the function that returns handles in place of variables."""
        fn, static, first = self.fn, self.shared.static, self._first

        @functools.wraps(fn)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            stage, first.stage = getattr(first, "stage", None), None
            if stage is None:
                return handles(fn(*args, **kwargs))
            leaves = static.leaves(*handles((args, kwargs)))
            results = replayed(*closed_parts(stage.jaxpr), leaves)
            return jax.tree_util.tree_unflatten(stage.out_tree, results)

        wrapper.__name__ = self.shared.log.name  # JAX names the program by it; a `functools.partial` has no name
        with warnings.catch_warnings():
            if {"backend", "device"} & self.options.keys():  # JAX already warned about these for `fn`
                warnings.simplefilter("ignore", DeprecationWarning)
            return jax_jit(wrapper, **self.options)

    def missed(self, jitted: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Have JAX compile and run arguments new to `jitted`, and return what JAX's dispatch expects.

        The call returns MISSED if a plan of dflow's, or the wrapper that returns handles, runs these arguments.
        """
        plan, _ = self.plan(args, kwargs)
        if plan is not None or jitted is not self.jitted:
            return missed()
        result = compiled_by_jax(jitted, args, kwargs)
        self.shared.log.finish()
        return result

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[CallPlan | None, list[Any]]:
        """Return the plan of a call, or None if JAX runs it; and the leaves of its traced arguments."""
        key, leaves = self.shared.static.key_of(args, kwargs)
        plan = self.shared.plans.get(key)
        if plan is UNKNOWN:
            # The preparation ends without the lock: it may wait for a pause, and that for a step of another thread.
            with preparing(self.shared.log.name), self.shared.one_thread():
                plan = self.shared.plans.get(key)
                if plan is UNKNOWN:
                    with rare_collections():
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
        key, _ = self.shared.static.key_of(args, kwargs)
        with self.shared.one_thread():
            plan = self._plan_of(stage, traced, args, kwargs)
            # Not under the key of calls: their first call must still check its arguments.
            self.shared.plans.put(("lowered", key), plan, resources_in((args, kwargs)))
        if plan.lower is None:
            raise InternalError(f"the plan of {self.shared.log.name} is one of this process, and cannot be lowered")
        return plan.lower(args, kwargs)

    def traced(self, stage: Any, args: Any, kwargs: Any) -> Traced:
        """Return the graph of a trace by `jax.jit`, with the names of the user's arguments."""
        if any(self.options.get(name) is not None for name in ("in_shardings", "out_shardings")):
            stage = constrained(self.fn, self.options).trace(*args, **kwargs)
        names = argument_names(self.fn, args, kwargs, self.shared.static.test_of(args))
        leaves = jax.tree_util.tree_leaves((args, kwargs))
        traced = traced_from(stage, names, self.options.get("compiler_options"), leaves)
        _, _, static = self.shared.static.split(args, kwargs)
        # This text is the same in every process.
        return replace(traced, static="".join(f" {key}={normal(value)}" for key, value, _ in static))

    def _first_call(self, args: Any, kwargs: Any, leaves: list[Any]) -> CallPlan | None:
        """Trace for arguments of new types, and decide how their calls run: the plan, or None if JAX runs them."""
        started, traces = time.perf_counter(), len(self.shared.log)
        reach("first call" if self.shared.plans.is_empty else "new trace")
        with watched_for_leaks():
            stage = self.trace(args, kwargs)
        jaxpr, consts = closed_parts(stage.jaxpr)
        needed = touches_state(jaxpr.effects) or holds_device(jaxpr)
        if needed:
            refuse_state(self.shared.log.name, self.options, jaxpr)
        constants = list(closed_over(jaxpr, consts))
        possible = takes_constants(self.options, jaxpr, constants)
        captured = tuple(str(array_type_of(const)) for const in constants if is_large(const)) if possible else ()
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
        home, observe = home_of(traced), _dumper(self.shared.log.name)
        resources, writes = StepResources(traced.variables), written_keys(traced)
        plan = functools.partial(CallPlan, weakref.ref(jaxpr), kept, resources, writes)
        if not home.is_local:
            runner = home.runner(traced, check=CONFIG.check, observe=observe)
            return plan(_on_leaves(lambda: runner, traced.out_tree))
        step = LOCAL.lower(traced, check=CONFIG.check, observe=observe)
        run: RunCall
        lower: Callable[[Any, Any], LoweredStep]
        single = None
        if step.call is None:
            lowered = step.lower()
            compiled = functools.cache(lambda: lowered.compile(None)[0])  # by the first call
            run, lower = _on_leaves(compiled, traced.out_tree), lambda args, kwargs: lowered
        else:
            single = self.shared.plans.single_of(identity_of(step, step.call))
            if single is None:
                single = SingleExecutable(step, step.call, self.jitted, self.options.get("compiler_options"))
            run, lower = functools.partial(single.run, step), functools.partial(single.lower, step)
        if program_watch() is None:
            return plan(run, lower, single)
        return plan(watched(_watched_program(traced, writes, lower if single is not None else None), run), lower)


def _watched_program(
    traced: Traced, writes: frozenset[str], lower: Callable[[Any, Any], LoweredStep] | None
) -> WatchedProgram:
    def compiled(args: Any, kwargs: Any) -> str | None:
        _, programs = lower(args, kwargs).compile(None) if lower is not None else (None, None)
        return None if programs is None else "\n".join(str(one.as_text()) for one in programs)

    return WatchedProgram(traced, writes, compiled)


def _dumper(name: str) -> Observer | None:
    """Return a function that writes the graph after each pass to a file in DFLOW_DUMP, or None if dumps are off."""
    if CONFIG.dump is None:
        return None
    folder = CONFIG.dump / f"{next(_dumps):03d}-{name.strip('<>')}"
    folder.mkdir(parents=True, exist_ok=True)
    files = itertools.count()

    def write(stage: str, graph: Graph) -> None:
        (folder / f"{next(files):02d}-{stage}.graph").write_text(text(graph) + "\n")

    return write


def _on_leaves(runner: Callable[[], Runner], out_tree: Any) -> RunCall:
    return lambda args, kwargs, leaves: jax.tree_util.tree_unflatten(out_tree, runner()(leaves))


def resources_in(tree: Any) -> list[Any]:
    """Return the variables and queues in a pytree. Variables may be there as handles."""
    leaves = jax.tree_util.tree_leaves(tree, is_leaf=is_resource)
    return [leaf.handle.variable for leaf in leaves if is_resource(leaf)]
