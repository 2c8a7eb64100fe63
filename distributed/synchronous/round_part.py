"""A worker's part in a run of synchronous training: it traces the step, and talks to the host (the step aggregator).

The step is traced under an applier that takes its gradients: first to find their types, and then to give them to the
accumulators, tagged by the round.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp

from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.cluster.cluster_steps import written_on_tasks
from dflow.distributed.collectives.collectives import Collectives
from dflow.distributed.collectives.dense_gradients import DenseGradients, DenseStep
from dflow.distributed.steps.step_identity import LoopSteps
from dflow.distributed.synchronous.round_gradients import Gradients, GradientTypes, each_of, leaves_of, together
from dflow.distributed.synchronous.round_messages import (
    LeaveRounds,
    NextRound,
    OpenRounds,
    ProposeRounds,
    RoundOpen,
    RoundsAgreed,
    rounds_of,
)
from dflow.distributed.training.applying import GivenOptimizer, applying, refuse_own_variables, shared_step
from dflow.distributed.training.compared_steps import ComparedSteps, settings_of
from dflow.distributed.training.long_wait import waited_for
from dflow.distributed.training.strategy import arguments_of
from dflow.distributed.training.work_messages import ROUNDS
from dflow.distributed.wire.codec import encode_arrays
from dflow.distributed.wire.messages.placement import PlaceVariable
from dflow.tracing.argument_ids import types_of
from dflow.tracing.devices.task_name import short_task_name, split_task_name, task_name
from dflow.tracing.errors import DflowError, StepCancelled, StrategyError
from dflow.tracing.jax_frontend import closed_parts, current_trace
from dflow.tracing.jaxprs.from_jaxpr import graph_of
from dflow.tracing.jaxprs.trace import Traced, trace
from dflow.tracing.rows.keep_rows import noted_rows
from dflow.tracing.rows.row_gradient import RowGradient, is_row_gradient
from dflow.tracing.rows.rows_to_dense import note_gradients, times_noted
from dflow.tracing.state.resources import is_variable
from dflow.tracing.syntax.listing import listing

#: Makes the names of appliers unique, so that a trace under one is never reused for another, even of an equal run name.
_serials = itertools.count()


_REMEDY = "call apply of each dflow.Optimizer once, outside of loops: add up gradients of microbatches before"
#: The remedy for a step that updates variables without an optimizer of this program, such as a loaded one.
_UPDATES = "train by Async, whose steps may update variables themselves, as a loaded step does"


class RoundPart:
    """A worker's part in the synchronous steps of a run: opens the run, and gives gradients in each round.

    job    job of the step aggregator, called the host here; the coordinator chooses one of its tasks
    dense  receives the gradients of the step for variables of this process; None if there must be none
    is_elastic  whether rounds go on without workers that have died
    """

    def __init__(
        self, cluster: Cluster, run: str, job: str, dense: DenseGradients | None = None, *, is_elastic: bool = True
    ) -> None:
        self._cluster, self._run, self._job, self._dense = cluster, run, job, dense
        self._is_elastic = is_elastic
        #: Compares the programs of workers that compute together; None if they only share the variables of tasks.
        self._programs = cluster.part(Collectives).programs if dense is not None else None
        self._compared = cluster.part(ComparedSteps)
        request = PlaceVariable(f"{run}{ROUNDS}", "synchronous training", (), 0, job, kind="run", is_saved=False)
        self._host = cluster.steps.retried(lambda: cluster.coordinator.ask(request)).task
        #: What `dense` keeps of each step of the run, when it was opened.
        self.kept: DenseStep = (), ()
        #: The name of the host's accumulator, when the run was opened.
        self._accumulator = ""
        #: Number of returns to a snapshot before the newest round was opened.
        self._epoch = 0
        #: The identities of this task's steps in the rounds, when the run was opened.
        self._steps: LoopSteps | None = None

    def open(self, step: Callable[..., Any], batch: Any, steps: int, wanted: int) -> Gradients | None:
        """Trace the step, and open or join the run; return what `run_step` needs, or None if the run is complete.

        batch    determines the types of the trace; it is not used up
        raises   StrategyError for a step that is no function of `dflow.jit`, that does not give gradients once to each
                 optimizer, or that differs from the other workers'
        """
        look = _looked_at(step, arguments_of(batch), self._dense)
        optimizer, beside = look.optimizer, look.beside
        self._compare_step([*each_of(optimizer), *(one for one, _ in beside)], look.traced())
        if self._dense is not None:
            self.kept = self._dense.use(beside, look.traced())
        with shared_step():
            refuse_own_variables(optimizer)
        types = GradientTypes.of(optimizer, look.spec, self._host)
        # Later runs can use the accumulators again, since their names determine their types and tasks.
        # After a return to a snapshot the host names others, since those of a task that was started again are lost.
        name = types.name(optimizer, wanted)
        message = ProposeRounds(self._run, self._cluster.task, steps, wanted, name, types.others)
        agreed, _ = self._cluster.requests.ask(self._host, message)
        if agreed.is_over:
            return None
        self._accumulator = agreed.accumulator
        self._identify(f"{rounds_of(self._run, agreed.process)}\nsteps of {self._cluster.task}")
        gradients = self._gradients_for(optimizer, types, agreed, inlines=look.inlines)
        self._be_hosted(optimizer, gradients, steps, agreed.wanted)
        return gradients

    def _identify(self, steps: str) -> None:
        """Set the identities of this task's steps, which its next process has too: that completes the same steps."""
        if self._steps is None or self._steps.run != steps:
            self._end_steps()
            self._steps = self._cluster.steps.loop_steps(steps, is_synchronous=True)

    def _end_steps(self) -> None:
        steps, self._steps = self._steps, None
        if steps is not None:
            self._cluster.steps.loop_ended(steps)

    def _gradients_for(
        self, optimizer: GivenOptimizer, types: GradientTypes, agreed: RoundsAgreed, *, inlines: bool
    ) -> Gradients:
        """Create the run's accumulators, and return their applier; an earlier run's is reused, with its trace."""
        kept = _kept.setdefault(optimizer, {})
        known = kept.get(agreed.accumulator)
        if known is not None:
            known.create()
            return known
        accumulators = types.accumulators(agreed.accumulator, agreed.wanted, self._cluster.parameter_servers)
        made = Gradients(types, accumulators, optimizer, self._dense, inlines=inlines)
        return kept.setdefault(agreed.accumulator, made)

    def _be_hosted(self, optimizer: GivenOptimizer, gradients: Gradients, steps: int, wanted: int) -> None:
        """Register the update of the averages, and have the host open the run with it, unless the run is open."""
        accumulator = gradients.accumulator
        taken_types = tuple(array.struct for array in accumulator.type.arrays)
        traced = trace(lambda *taken: gradients.update(optimizer, taken), taken_types, {})
        if self._programs is not None:
            self._programs.compare(f"the update of run {self._run!r}", listing(traced))
        epoch = self._cluster.steps.epoch  # before the plans are sent: those of before a return are refused
        handles, before, after = self._cluster.steps.register_hosted(traced, self._host)
        infos, payload = encode_arrays([jnp.asarray(array) for array in (*before, *after)])
        (workers, every), count = self._cluster.colleagues(), len(before)
        if not self._is_elastic:
            workers = tuple(task_name(split_task_name(self._cluster.task)[0], index) for index in range(every))
        named, feeds = (self._accumulator, accumulator.key), (infos[:count], infos[count:])
        message = OpenRounds(self._run, steps, wanted, workers, *named, dict(handles), *feeds, epoch, self._is_elastic)
        self._cluster.requests.ask(self._host, message, payload)

    def _compare_step(self, optimizers: Sequence[GivenOptimizer], traced: Traced) -> None:
        """Raise StrategyError if the step or its optimizers differ from the other workers' where they must be equal."""
        if self._programs is not None:
            items = listing(traced, settings_of(optimizers))
            self._programs.compare(f"the first step of run {self._run!r}", items)
            return
        trained = jax.tree_util.tree_leaves([one.variables for one in optimizers], is_leaf=is_variable)
        self._compared.compare(self._run, "", [*written_on_tasks(traced), *trained], optimizers)

    def run_step(
        self, gradients: Gradients, step: Callable[..., Any], batch: Any, opening: RoundOpen
    ) -> tuple[Any, bool]:
        """Like `Gradients.call`, but waits while the steps are paused, for a snapshot or a return to one.

        A step that is done again for the same round changes no other state again, and gets the same queue elements.

        Raises StepCancelled if all tasks have returned to a snapshot since the round was opened; StrategyError if the
        workers' steps differ.
        """
        assert self._steps is not None  # the run is open
        self._compared.refuse_unequal(self._run)
        steps = self._cluster.steps
        with steps.server.gate.step(steps.timeout_s):
            if self._cluster.steps.epoch != self._epoch:
                # It would be a step of later rounds than those that are done again now.
                raise StepCancelled(
                    f"round {opening.done} of {self._run!r} was opened before all tasks returned to a snapshot"
                )
            with self._steps.step(opening.done):
                outcome = gradients.call(step, batch, opening.number)
        # The round may be opened again, until a later one is open.
        self._steps.may_come_again(opening.done)
        return outcome

    def next(self, done: int) -> RoundOpen:
        """Wait for an opening later than `done`; log warnings while workers are missing. Raises DeadlineExceeded."""

        def asked(wait_s: float) -> RoundOpen:
            self._compared.refuse_unequal(self._run)
            message = NextRound(self._run, self._cluster.task, done, self._accumulator, wait_s)
            return self._cluster.requests.ask_waiting(self._host, message, wait_s).message

        self._epoch = self._cluster.steps.epoch
        opening = waited_for(self._cluster.task, self._cluster.steps.timeout_s, asked, self._yet_to_come)
        if self._steps is not None:
            self._steps.are_over_before(opening.done)
        return opening

    def _yet_to_come(self) -> str:
        """Return the end of a message that names the expected workers that have not joined."""
        expected = self._cluster.coordinator.session.roster.expected
        absent = [short_task_name(task) for task in self._cluster.colleagues()[0] if task in expected]
        if not absent:
            return ""
        return f"; not joined yet: {', '.join(absent)}\n  start what is missing, or a cluster that expects fewer"

    def leave(self, done: int) -> None:
        """Leave the run, and free the results kept for its steps. Errors are ignored: the host may be gone."""
        message = LeaveRounds(self._run, self._cluster.task, done, self._accumulator)
        with contextlib.suppress(DflowError):
            self._cluster.requests.ask(self._host, message)
        self._end_steps()


@dataclass(frozen=True)
class _Look:
    """Optimizers and types of gradients that a trace of a step found.

    optimizer  the optimizers as one
    spec       the types of their gradients
    beside     the optimizers whose gradients `DenseGradients` takes, with the types of these
    traced     returns the trace
    inlines    whether gradients come from several functions, which have to become one trace
    """

    optimizer: GivenOptimizer
    spec: Any
    beside: Sequence[tuple[GivenOptimizer, Any]]
    traced: Callable[[], Traced]
    inlines: bool


class _Found:
    """An applier that records a step's optimizers and types of gradients, and applies no gradient."""

    is_look = True

    def __init__(self, dense: DenseGradients | None, *, inlines: bool) -> None:
        self.name, self._dense, self.inlines = f"looked at {next(_serials)}", dense, inlines
        self._seen: list[tuple[GivenOptimizer, Any]] = []
        #: By optimizer whose gradients are averaged on tasks: the trace that gave them.
        self._traces: dict[str, Any] = {}

    @property
    def is_apart(self) -> bool:
        """Whether several traces gave gradients that are used together."""
        return len({*map(id, self._traces.values())}) > 1

    @property
    def names(self) -> list[str]:
        """The names of the optimizers, quoted."""
        return [repr(optimizer.name) for optimizer, _ in self._seen]

    def apply(self, optimizer: GivenOptimizer, gradients: Any) -> None:
        """Record the optimizer, and the types of the gradients."""
        note_gradients([leaf.rows if is_row_gradient(leaf) else leaf for leaf in leaves_of(gradients)])
        if self._dense is None or not self._dense.takes(optimizer):
            self._traces[optimizer.name] = current_trace()
        self._seen.append((optimizer, jax.tree_util.tree_map(_typed, gradients, is_leaf=is_row_gradient)))

    def found(self, step: Callable[..., Any], stage: Any) -> _Look:
        """Return the optimizers and the types of gradients that `stage`, JAX's trace of the step, recorded here.

        Raises StrategyError if the step gives gradients to no optimizer, or to one several times; with `dense`, also if
        it gives none to tables on parameter tasks.
        """
        jaxpr, consts = closed_parts(stage.jaxpr)
        optimizers = [optimizer for optimizer, _ in self._seen]
        to_dense = [self._dense is not None and self._dense.takes(optimizer) for optimizer in optimizers]
        # A function that is called several times, or a loop, is traced once.
        times = times_noted(jaxpr)
        if optimizers and all(to_dense):
            raise StrategyError(
                f"{getattr(step, '__name__', 'the step')}: expected gradients for a table on parameter tasks, got none "
                f"beside those of {', '.join(optimizer.name for optimizer in optimizers)}",
                "train variables of the workers alone by dflow.distributed.AllReduce",
            )
        if all(to_dense) or not times == len(optimizers) == len({*optimizers}):
            count = 0 if all(to_dense) else max(times, len(optimizers))
            names = ", ".join(optimizer.name for optimizer in optimizers) or "none"
            raise StrategyError(
                f"{getattr(step, '__name__', 'the step')} gives gradients {count} times (to {names}), and a "
                f"synchronous step gives them once to each optimizer",
                _REMEDY if count or not _writes(stage) else _UPDATES,
            )
        noted = noted_rows(jaxpr, consts)
        if len(noted) != len(optimizers):  # those in a loop are noted only in the loop's body, and taken as dense
            noted = [[None] * len(leaves_of(spec)) for _, spec in self._seen]
        specs = [
            _with_rows(spec, rows)
            for (_, spec), rows, is_dense in zip(self._seen, noted, to_dense, strict=True)
            if not is_dense
        ]
        own = together([one for one, is_dense in zip(optimizers, to_dense, strict=True) if not is_dense])
        beside = [one for one, is_dense in zip(self._seen, to_dense, strict=True) if is_dense]
        spec = specs[0] if len(specs) == 1 else tuple(specs)
        return _Look(own, spec, beside, functools.cache(lambda: _traced(stage)), self.inlines)


#: By step and types of its arguments: its optimizers and the types of its gradients, cached as they need a trace.
_looks: WeakKeyDictionary[Any, dict[Any, _Look]] = WeakKeyDictionary()
#: By optimizer and name of the accumulator: the applier that gives the gradients to the accumulator.
_kept: WeakKeyDictionary[GivenOptimizer, dict[str, Gradients]] = WeakKeyDictionary()


def _writes(stage: Any) -> bool:
    return bool(written_on_tasks(_traced(stage)))


def _looked_at(step: Callable[..., Any], arguments: Sequence[Any], dense: DenseGradients | None) -> _Look:
    """Return the optimizers of a step, and the types of the gradients given to them; traces at the first call.

    Raises StrategyError for a step that is no function of `dflow.jit`, or that `_Found.found` refuses.
    """
    key = dense, types_of(arguments)
    looks = _looks.setdefault(step, {})
    if key not in looks:
        if not hasattr(step, "trace"):
            name = getattr(step, "__name__", f"a {type(step).__name__}")
            raise StrategyError(f"the step: expected a function of dflow.jit, got {name}", _UPDATES)
        looks[key] = _look(step, arguments, dense)
    return looks[key]


def _look(step: Any, arguments: Sequence[Any], dense: DenseGradients | None) -> _Look:
    found, stage = _trace_under(_Found(dense, inlines=False), step, arguments)
    if found.is_apart:
        found, stage = _trace_under(_Found(dense, inlines=True), step, arguments)
    if not found.is_apart:
        return found.found(step, stage)
    raise StrategyError(
        f"{getattr(step, '__name__', 'the step')} gives gradients to {', '.join(found.names)} in several functions "
        f"that jax.jit or another transformation traces, and a synchronous step gives them in one",
        "compile the functions by dflow.jit in place of jax.jit, or return the gradients and apply all in the step",
    )


def _trace_under(found: _Found, step: Any, arguments: Sequence[Any]) -> tuple[_Found, Any]:
    with applying(found):
        return found, step.trace(*arguments)


def _traced(stage: Any) -> Traced:
    jaxpr, consts = closed_parts(stage.jaxpr)
    graph, variables, constants = graph_of(jaxpr, consts, [f"argument_{n}" for n in range(len(jaxpr.invars))])
    return Traced(graph, variables, constants, None)


def _typed(part: Any) -> Any:
    if is_row_gradient(part):
        return RowGradient(_typed(part.indices), _typed(part.rows), part.shape)
    return jax.ShapeDtypeStruct(jnp.shape(part), jnp.result_type(part))


def _with_rows(spec: Any, rows: Sequence[Any]) -> Any:
    """Return the types of an optimizer's gradients, with the types `rows` of gradients that have rows."""
    tree: Any = jax.tree_util.tree_structure(spec, is_leaf=is_row_gradient)
    return tree.unflatten(map(_by_rows, leaves_of(spec), rows))


def _by_rows(part: Any, rows: jax.ShapeDtypeStruct | None) -> Any:
    """Return the type `part` of a gradient with rows of the type `rows`; unchanged if it has rows or `rows` is None."""
    if rows is None or is_row_gradient(part):
        return part
    return RowGradient(jax.ShapeDtypeStruct(rows.shape[:1], jnp.int32), rows, part.shape)
