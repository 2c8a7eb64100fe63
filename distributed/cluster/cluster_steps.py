"""Steps of this task's program that run on several tasks: placed, partitioned, lowered, registered and run.

A step starts with one small message to each task that has a part in it. Values then travel directly from task to
task; this task waits for its own part and for each task's answer that its part has ended. An error anywhere cancels
the step everywhere.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import jax

from dflow.distributed.client.coordinator_client import ANSWER_S
from dflow.distributed.cluster.outgoing_requests import OutgoingRequests
from dflow.distributed.snapshots.pause_messages import PauseSteps, ResumeSteps
from dflow.distributed.snapshots.snapshot_messages import SaveChanges
from dflow.distributed.steps.ahead_rules import AheadRules
from dflow.distributed.steps.plan_registration import start_registration
from dflow.distributed.steps.rendezvous import describe
from dflow.distributed.steps.retries import RecoveringState
from dflow.distributed.steps.step_gate import begins_parts, is_in_step
from dflow.distributed.steps.step_identity import CURRENT_STEPS, LoopSteps
from dflow.distributed.steps.steps_ahead import CURRENT, BegunStep, RegisteredStep, StepsAhead
from dflow.distributed.task.task_server import TaskServer
from dflow.distributed.wire.messages.plans import ForgetResults, ReleasePlan
from dflow.lowering.passes.base import Observer, run_passes
from dflow.lowering.pipeline import pipeline
from dflow.lowering.programs.program import LoweredProgram, lower_program
from dflow.lowering.programs.shared_exports import shared_exports
from dflow.lowering.queues.channel import StepId
from dflow.lowering.state_backend import LoweredStep, Runner
from dflow.lowering.steps.begin_ahead import released_at_call, why_not_own
from dflow.lowering.steps.execute import Fetches
from dflow.lowering.steps.local_step import fetched, lower_programs
from dflow.lowering.steps.lowered import Lowered, literals, make_plans
from dflow.lowering.steps.plan import Plan
from dflow.lowering.steps.recorder import described_end
from dflow.lowering.steps.spread_variables import refuse_spread
from dflow.lowering.steps.step_events import STEP_BEGAN, STEP_ENDED
from dflow.lowering.values.devices import devices_in_order
from dflow.lowering.values.host_values import as_argument
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.devices.device_name import is_on_task, task_of
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import (
    DeadlineExceeded,
    DflowError,
    StrategyError,
    TaskLost,
    TransportClosed,
    VariableError,
)
from dflow.tracing.jaxprs.trace import Traced, written_keys
from dflow.tracing.moments import reach
from dflow.tracing.source import at, caller
from dflow.tracing.state.resources import Variable, is_variable

LOGGER = logging.getLogger("dflow")
Result = TypeVar("Result")

#: Time for the report of a step's end or error to travel from task to task, in s.
WORD_S = 5.0
#: Most attempts to do something in a pause that is not broken.
PAUSE_ATTEMPTS = 5


class ClusterSteps(RecoveringState):
    """The steps that the program of this task starts; thread-safe.

    `timeout_s`  longest duration of a step, in s
    """

    def __init__(self, server: TaskServer, requests: OutgoingRequests, timeout_s: float) -> None:
        self._task, self.server, self._requests, self.timeout_s = server.name, server, requests, timeout_s
        #: The plans of functions that were garbage-collected. A finalizer runs on any thread, between any two
        #: instructions, so it must take no lock and send nothing. The next registration releases them.
        self._unused: deque[Mapping[str, int]] = deque()
        #: A task has one request for a pause at a time.
        self._pausing = threading.Lock()
        #: The training loops whose steps begin ahead.
        self._loops: list[StepsAhead] = []
        #: By run, the numbers of the steps that this process began and that have not ended.
        self._unfinished: dict[str, set[int]] = {}
        #: Number of open loops by run; the lock is of both.
        self._open, self._open_lock = Counter[str](), threading.Lock()

    @contextlib.contextmanager
    def ahead(
        self,
        run: str,
        rules: AheadRules,
        warn: Callable[[str], None],
        on_new: Callable[[RegisteredStep], None] = lambda called: None,
    ) -> Iterator[StepsAhead]:
        """Return the context of a training loop whose steps begin ahead; see `StepsAhead`."""
        steps = self.loop_steps(run)
        loop = StepsAhead(self.server.starter, steps, rules, warn=warn, on_new=on_new)
        self._loops.append(loop)
        try:
            yield loop
        finally:
            self._loops.remove(loop)
            loop.cancel("the loop ended")
            self.loop_ended(steps)

    def loop_steps(self, run: str, *, is_synchronous: bool = False) -> LoopSteps:
        """Return the identities of the steps of a loop over `run`; call `loop_ended` with them at its end."""
        with self._open_lock:
            self._open[run] += 1
            unfinished = self._unfinished.setdefault(run, set())
            return LoopSteps(run, unfinished, lambda: self.epoch, is_synchronous=is_synchronous)

    def loop_ended(self, steps: LoopSteps) -> None:
        """Free the results that tasks keep for new attempts at a loop's steps, except for steps that have not ended."""
        with self._open_lock:
            self._open[steps.run] -= 1
            if self._open[steps.run] <= 0:
                del self._open[steps.run]
                if not steps.unfinished():
                    self._unfinished.pop(steps.run, None)
        self.server.store.applied.forget(steps.own_run)
        message = ForgetResults(self._task, self.server.starter.first, steps.run, steps.unfinished())
        for peer in steps.peers.values():
            with contextlib.suppress(DflowError):  # the task is gone, and its record with it
                peer.notify(message)

    def await_recovery(self, *, is_joining: bool = False) -> None:
        """Wait until no state of tasks is lost; with `is_joining`, only while lost state is being restored.

        Then make again what this process had made and a return has freed. Raises TaskLost if lost state cannot be
        restored.
        """
        recovered = self._requests.await_recovery(is_joining=is_joining)
        if recovered.epoch != self.epoch:  # the notice was lost with a connection
            self.restored(recovered.epoch, recovered.undone)
        with contextlib.suppress(DflowError):  # the state is restored; the next request tries this again, and raises
            self._requests.unsaved.make_again()

    def while_paused(self, do: Callable[[], Result], what: str) -> Result:
        """Return `do()`, called while no task runs a step that several tasks take part in; `what` names it in errors.

        `do` may be called several times: again if the coordinator was restarted or a task joined meanwhile.
        raises  StrategyError within such a step, which the pause would wait for; DeadlineExceeded when the running
                steps take too long, or pauses keep being broken
        """
        if is_in_step():
            raise StrategyError(
                f"{what}: expected between two steps of a run, got within one, whose end it waits for",
                "call it in the loop over the run, not in the step",
                at=caller(),
            )
        coordinator = self._requests.coordinator
        with self._pausing:
            for _ in range(PAUSE_ATTEMPTS):
                number, were_paused = 0, False
                try:
                    number = coordinator.ask(PauseSteps(self._task), self.timeout_s).number
                    reach("pause", self._task)
                    found = do()
                finally:
                    were_paused = coordinator.ask(ResumeSteps(self._task, number)).were_paused
                if were_paused:
                    return found
        raise DeadlineExceeded(f"{PAUSE_ATTEMPTS} pauses of the steps ended early, since tasks joined meanwhile")

    def restored(self, epoch: int, undone: int) -> None:
        """Record a return of all tasks to a snapshot, see `StateRestored`, and cancel the steps begun ahead.

        The next call of each function registers its plans again.
        """
        self._requests.used.restored()
        self._requests.unsaved.returned(epoch)
        self.undone = undone
        self.epoch = epoch
        self.state_changed()

    def state_changed(self) -> None:
        """Cancel the steps begun ahead, since this process changed state, or waited for others that may have."""
        for loop in list(self._loops):
            loop.state_changed()

    def save_changes(self, what: str, wait_s: float) -> None:
        """Wait until a snapshot has a change of state that no step makes again, at most `wait_s`; `what` names it.

        Logs a warning if none has it by then. Returns immediately if no snapshots are made. Cancels the steps begun
        ahead. Raises TaskLost if all tasks return to an earlier snapshot.
        """
        self.state_changed()
        try:
            message = SaveChanges(self._task, wait_s)
            is_saved = self._requests.coordinator.ask(message, wait_s + ANSWER_S).is_saved
        except DeadlineExceeded:  # the coordinator is away: the change is made, and its next process may save it
            is_saved = False
        if not is_saved and wait_s:
            LOGGER.warning("no snapshot has %s after %g s: it is undone if a parameter task is lost now", what, wait_s)

    def runner(self, traced: Traced, *, check: bool, observe: Observer | None) -> Runner:
        """Place, partition and register a traced function; calling the result runs one step of it.

        If a task is lost meanwhile, waits for the return to a snapshot, and tries again; raises TaskLost without one.
        """
        step = self.lower(traced, check=check, observe=observe)
        return self.retried(lambda: self.register(step, step.own()))

    def lower(self, traced: Traced, *, check: bool, observe: Observer | None) -> PartitionedStep:
        """Place and partition a traced function.

        Raises DflowError for compiler options; VariableError for two handles of one variable.
        """
        _refuse_two_handles(traced.variables)
        if traced.compiler_options:
            raise _no_options(traced.name)
        passes = pipeline(self._task, self._tasks_of(traced), devices_in_order())
        graph = run_passes(traced.graph, passes, check=check, observe=observe)
        refuse_spread(graph, traced, self.server.store)
        keys = {ref: variable.key for ref, variable in zip(graph.refs, traced.variables, strict=True)}
        return PartitionedStep(self, traced, make_plans(graph, self._task, keys), literals(graph))

    def _tasks_of(self, traced: Traced) -> tuple[str, ...]:
        """Return the live tasks, and those with variables of the function: if they are away, they may come back."""
        holders = (task_of(variable.device) for variable in traced.variables if variable.device is not None)
        return tuple(dict.fromkeys([*self._requests.tasks, *filter(None, holders)]))

    def register_hosted(self, traced: Traced, host: str) -> tuple[Mapping[str, int], Sequence[Any], Sequence[Any]]:
        """Register a traced function that the task `host` will run as a step of `host`.

        Returns the plan handles by task, and the arrays to feed `host`'s part before and after the arguments.
        """
        graph = run_passes(traced.graph, pipeline(host, self._tasks_of(traced)), check=False, observe=None)
        keys = {ref: variable.key for ref, variable in zip(graph.refs, traced.variables, strict=True)}
        return self._registered(make_plans(graph, host, keys)), traced.constants, literals(graph)

    def register(self, step: PartitionedStep, own: Sequence[LoweredProgram]) -> Runner:
        """Register the plans with all tasks, given the lowered programs of this one; the result runs one step."""
        self._release_unused()
        epoch = self.epoch  # before the plans are sent: a return during that has them registered again
        others = {task: part for task, part in step.plans.items() if task != self._task}
        # XLA compiles without the GIL, while other tasks' programs are exported and compiled.
        compiling = ThreadPoolExecutor(1, "dflow-compile")
        try:
            programs = compiling.submit(lambda: [program.compile() for program in own])
            handles = self._registered(others)
            handles[self._task] = self.server.plans.add(step.plans[self._task].plan, programs.result())
        finally:
            compiling.shutdown(wait=False)
        first, last = list(step.traced.constants), step.literals

        def feeds(leaves: Sequence[Any]) -> Sequence[Any]:
            return [*first, *map(as_argument, leaves), *last]

        plans = {task: part.plan for task, part in step.plans.items()}
        released, mine = released_at_call(plans, self._task), self.server.plans.get(handles[self._task])
        traced, why_not = step.traced, why_not_own(mine, step.traced.donated)
        described = traced.name, traced.signature, tuple(map(weakref.ref, written_on_tasks(traced)))
        registered = RegisteredStep(handles, released, feeds, why_not, *described)

        def run(leaves: Sequence[Any]) -> Sequence[Any]:
            nonlocal registered, epoch
            if epoch != (newest := self.epoch):
                # Equal plans have equal handles, except on tasks that were started again.
                handles.update(self._registered(others))
                registered, epoch = replace(registered, handles=dict(handles)), newest
            return self.run(registered, leaves)

        weakref.finalize(run, self._unused.append, handles).atexit = False
        return run

    def _registered(self, parts: Mapping[str, Lowered]) -> dict[str, int]:
        """Register parts of a step with other tasks, concurrently; return the handles by task.

        First makes state again that a return to a snapshot has freed.
        """
        reach("registration", self._task)
        self._requests.unsaved.make_again()
        export = shared_exports()
        with self._requests.used.explained([*parts]):
            asked = {task: start_registration(self.server.peer(task), part, export) for task, part in parts.items()}
        handles = {}
        for task, handle_of in asked.items():
            with self._requests.explained(task):
                handles[task] = handle_of(self._requests.timeout_s)
        return handles

    def _release_unused(self) -> None:
        tasks = {*self._requests.tasks} - {self._task}
        while self._unused:
            handles = self._unused.popleft()
            self.server.plans.release(handles[self._task])
            for task in tasks & {*handles}:
                with contextlib.suppress(DflowError):  # the task is gone, and its plans with it
                    self.server.peer(task).notify(ReleasePlan(handles[task]))

    def run(self, called: RegisteredStep, leaves: Sequence[Any]) -> tuple[jax.Array, ...]:
        """Run one step on every task that has a part in it; return this task's fetches.

        leaves  the leaves of the arguments
        raises  the first error of any task, whose text names it; TaskLost when a task left
        """
        begins_parts()
        loop = CURRENT.get()
        if loop is None and (steps := CURRENT_STEPS.get()) is not None:
            steps.called()
        begun = loop.take(called, leaves) if loop is not None else None
        step = self.server.starter.next_step() if begun is None else begun.step
        recorder = self.server.recorder
        began_ns = recorder.clock()
        recorder.append((began_ns, STEP_BEGAN, step, "", ""))
        try:
            try:  # not `with used.explained(...)`, which is six calls in each step
                fetches = self._run(step, called, leaves, begun, loop)
            except DflowError as error:
                self._requests.used.explain(error, called.handles)
                raise
        except BaseException as error:
            if begun is not None:  # an interrupt may have come before `_run`, which cancels too
                self.server.starter.cancel(step, begun.peers.values(), error)
            if loop is not None:  # also if the program handles the error
                loop.call_failed()
            self._ended(step, began_ns, error)
            raise
        finally:
            if loop is None and self._loops:
                self.state_changed()
        self._ended(step, began_ns, None)
        return fetches

    def _ended(self, step: StepId, began_ns: int, error: BaseException | None) -> None:
        text = described_end(error) if error is not None else ""
        ended_ns = self.server.recorder.clock()
        self.server.recorder.append((ended_ns, STEP_ENDED, step, "", text))
        self.server.step_counts.ended((ended_ns - began_ns) / 1e9, error)

    def _run(
        self,
        step: StepId,
        called: RegisteredStep,
        leaves: Sequence[Any],
        begun: BegunStep | None,
        loop: StepsAhead | None,
    ) -> tuple[jax.Array, ...]:
        starter, timeout_s, handles = self.server.starter, self.timeout_s, called.handles
        peers = starter.peers(handles) if begun is None else begun.peers
        of = own = None
        if (steps := CURRENT_STEPS.get()) is not None:
            of, own = steps.current, steps.own
            steps.peers.update(peers)
        end: queue.SimpleQueue[Outcome[Fetches]] = queue.SimpleQueue() if begun is None else begun.outcome
        try:
            if begun is None:
                parts = starter.start(step, peers, handles, end.put, of=of)
            else:
                parts = begun.parts
            if loop is not None:
                loop.begin_more(step, peers, called, leaves)
            if begun is not None and begun.leaves is not None:
                starter.release_own(step, own)
            else:
                starter.run_own(step, handles, called.feeds(leaves), parts, own)
            if loop is not None:
                for peer in peers.values():
                    peer.flush()
            try:
                # Slightly longer than the receives' own timeout, whose error says more than this one.
                return fetched(end.get(timeout=timeout_s + min(WORD_S, timeout_s)))
            except queue.Empty:
                whose = "; ".join(map(self._requests.coordinator.describe, parts.running))
                text = f"{describe(step)} did not end within {timeout_s:g} s; still at it: {whose}"
                raise DeadlineExceeded(text + self.server.stalled(text)) from None
        except TransportClosed as error:
            gone = [short_task_name(task) for task, peer in peers.items() if peer.closed]
            lost = TaskLost(
                f"{' and '.join(gone) or 'a task'} was lost in {describe(step)}: {error}",
                "see its output; if its process has ended, its variables are lost: start the whole cluster again",
            )
            starter.cancel(step, peers.values(), lost)
            raise lost from None
        except BaseException as error:
            starter.cancel(step, peers.values(), error)
            raise


@dataclass(frozen=True)
class PartitionedStep:
    """The plans of a traced function by task, this task's first, and the literals that the function returns."""

    steps: ClusterSteps
    traced: Traced
    plans: Mapping[str, Lowered]
    literals: Sequence[jax.Array]

    def own(self, platforms: tuple[str, ...] | None = None) -> list[LoweredProgram]:
        """Lower the programs of this task."""
        traced, mine = self.traced, next(iter(self.plans.values()))
        donated = [len(traced.constants) + leaf for leaf in traced.donated]
        return lower_programs(
            mine, self.steps.server.store, donated, traced.name, platforms=platforms, meshes=traced.meshes
        )

    def lower(self, platforms: tuple[str, ...] | None = None) -> LoweredStep:
        """Lower the programs of all tasks, for `platforms` if not None, else for this process's devices."""
        own, (mine, *others) = self.own(platforms), self.plans.values()
        parts = [LoweredPart(mine.plan, [program.stage for program in own])]
        for part in sorted(others, key=lambda part: part.plan.task):
            stages = [
                lower_program(
                    pure.fn, pure.types, len(pure.written), len(pure.read), name=self.traced.name, platforms=platforms
                ).stage
                for pure in part.functions
            ]
            parts.append(LoweredPart(part.plan, stages))
        return LoweredStep(parts, partial(self._compiled, own, platforms))

    def _compiled(
        self, own: Sequence[LoweredProgram], platforms: tuple[str, ...] | None, options: dict[str, Any] | None
    ) -> tuple[Runner, None]:
        """Register the plans with their tasks, which compile their programs.

        Raises DflowError for options, or if the step was lowered for given platforms.
        """
        if options:
            raise _no_options(self.traced.name)
        if platforms is not None:
            raise DflowError(
                f"{self.traced.name} was lowered for {', '.join(platforms)}, and each task compiles for its own "
                f"platform",
                "lower it without lowering_platforms",
            )
        return self.steps.register(self, own), None


@dataclass(frozen=True)
class LoweredPart:
    """A task's part of a step: its plan and its programs, with the methods of JAX's `Lowered`."""

    plan: Plan
    stages: Sequence[jax.stages.Lowered]

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """Return the name of the task and the items of its plan, as comments, then its programs."""
        items = [f"//   {item!r}" for item in self.plan.items]
        texts = [stage.as_text(dialect, debug_info=debug_info) for stage in self.stages]
        return "\n".join([f"// {short_task_name(self.plan.task)}", *items, *texts])

    def cost_analysis(self) -> Mapping[str, float]:
        """Return XLA's estimates, summed over the programs."""
        total: Counter[str] = Counter()
        for stage in self.stages:
            total.update(stage.cost_analysis() or {})
        return total


def written_on_tasks(traced: Traced) -> list[Variable]:
    """Return the variables on tasks of the cluster that a function writes."""
    keys = written_keys(traced)
    return [one for one in traced.variables if is_variable(one) and one.key in keys and is_on_task(one.device)]


def _no_options(name: str) -> DflowError:
    """Return the error for compiler options, which do not reach the tasks that compile."""
    return DflowError(
        f"{name} has variables on other tasks, which compile for themselves, so it takes no compiler_options",
        "set XLA_FLAGS where the tasks are started",
    )


def _refuse_two_handles(variables: Sequence[Any]) -> None:
    """Raise VariableError for two handles of one variable: each would get its buffer, and its updates no order."""
    held: dict[tuple[str | None, str], Any] = {}
    for variable in variables:
        other = held.setdefault((variable.device, variable.key), variable)
        if other is not variable:
            raise VariableError(
                f"a function uses variable {variable.name!r} by two handles, made{at(other.loc)}\n  and"
                f"{at(variable.loc)}\n  use one of the two, or give the other another name or `prefix=`"
            )
