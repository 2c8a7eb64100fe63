"""Several tasks in one process, each with a store, and mail between them. A seed determines the order of the work."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from dflow.lowering.passes.base import run_passes
from dflow.lowering.pipeline import pipeline
from dflow.lowering.programs.program import Program
from dflow.lowering.queues.channel import Channel, Deliver, StepId
from dflow.lowering.state.store import Store
from dflow.lowering.steps.compile_plan import run_of
from dflow.lowering.steps.executable import Executable
from dflow.lowering.steps.execute import Execution, Fetches
from dflow.lowering.steps.local_step import lower_programs
from dflow.lowering.steps.lowered import literals, make_plans
from dflow.lowering.steps.plan import Plan
from dflow.lowering.values.devices import device_named
from dflow.lowering.values.outcome import Outcome
from dflow.lowering.values.payload_layout import PayloadLayout
from dflow.tracing.devices.device_name import split_device_name, task_of
from dflow.tracing.ir.graph import Graph
from dflow.tracing.ir.types import RefType
from tests.lowering.meaning import TASKS, WORKER

#: The default step of `begin`.
STEP = StepId(WORKER, 1)


class Mail:
    """Matches a send with its receive by step, edge, source and destination, in either order."""

    def __init__(self) -> None:
        self.values: dict[Any, Any] = {}
        self.waiting: dict[Any, Deliver] = {}
        self.log: list[tuple[str, str]] = []

    def put(self, key: Any, value: Any) -> None:
        """Deliver a value, or keep it for its receive."""
        assert key not in self.values, f"{key} is sent twice"
        if key in self.waiting:
            self.waiting.pop(key)(value)
        else:
            self.values[key] = value

    def take(self, key: Any, deliver: Deliver) -> None:
        """Return a delivered value, or wait for it."""
        assert key not in self.waiting, f"{key} is received twice"
        if key in self.values:
            deliver(self.values.pop(key))
        else:
            self.waiting[key] = deliver


class Mailbox:
    """A task's end of the mail."""

    def __init__(self, mail: Mail, task: str) -> None:
        self._mail, self._task = mail, task
        self.channel = Channel(self.send, self.receive)

    def send(self, step: StepId, edge: str, destination: str, values: Sequence[Any]) -> None:
        self._mail.log.append(("send", edge))
        # A value that arrives at a task is on none of the sender's devices.
        there = [jax.device_put(np.asarray(value)) for value in values]
        self._mail.put((step, edge, self._task, destination), there)

    def receive(self, step: StepId, edge: str, source: str, layout: PayloadLayout, deliver: Deliver) -> None:
        self._mail.log.append(("receive", edge))
        self._mail.take((step, edge, source, self._task), deliver)


def begin(
    plan: Plan,
    programs: Sequence[Program] = (),
    feeds: Sequence[Any] = (),
    *,
    store: Store | None = None,
    channel: Channel | None = None,
    step: StepId = STEP,
    submit: Callable[[Callable[[], None]], object] = lambda work: work(),
    **options: Any,
) -> tuple[Execution, list[Outcome[Fetches]]]:
    """Make a run of a plan, without starting it; return it and the list of its outcomes."""
    outcomes: list[Outcome[Fetches]] = []
    here = channel or Mailbox(Mail(), plan.task).channel
    run = run_of(Executable(plan, programs), store or Store(), here, step, feeds, outcomes.append, submit, **options)
    return run, outcomes


class Cluster:
    """The tasks of a graph, each with the variables placed on it and its compiled plan."""

    def __init__(
        self, graph: Graph, state: Mapping[str, Any], tasks: Sequence[str] = TASKS, devices: tuple[str, ...] = ()
    ) -> None:
        lowered = run_passes(graph, pipeline(WORKER, tuple(tasks), devices), check=True)
        keys = {ref: ref.name for ref in lowered.refs}
        self.mail = Mail()
        self.stores = {task: Store() for task in tasks}
        self._home = {ref.name: task_of(str(ref.device)) for ref in lowered.refs}
        for ref in lowered.refs:
            assert isinstance(ref.type, RefType)
            _, local = split_device_name(str(ref.device))
            place = SingleDeviceSharding(device_named(local)) if local else None
            make = partial(state.__getitem__, ref.name)
            self.stores[self._home[ref.name]].create(ref.name, ref.type.of, make, place)
        self.lowered, self._literals = make_plans(lowered, WORKER, keys), literals(lowered)
        self._parts = {
            task: Executable(part.plan, [program.compile() for program in lower_programs(part, self.stores[task])])
            for task, part in self.lowered.items()
        }
        self._steps = 0

    def run(self, inputs: Sequence[Any], seed: int = 0) -> Sequence[Any]:
        """Run one step on all tasks; return the caller's fetches. Raises the error of any task."""
        chance = random.Random(seed)
        self._steps += 1
        step = StepId(WORKER, self._steps)
        outcomes: dict[str, Outcome[Fetches]] = {}
        work: list[Callable[[], None]] = []
        work += [partial(self._start, task, step, inputs, outcomes, work.append) for task in self._parts]
        while work:
            work.pop(chance.randrange(len(work)))()
        for outcome in outcomes.values():
            if isinstance(outcome, BaseException):
                raise outcome
        assert set(outcomes) == set(self._parts)
        assert not self.mail.values
        assert not self.mail.waiting
        fetches = outcomes[WORKER]
        assert isinstance(fetches, tuple)
        return fetches

    def _start(
        self,
        task: str,
        step: StepId,
        inputs: Sequence[Any],
        outcomes: dict[str, Outcome[Fetches]],
        submit: Callable[[Callable[[], None]], object],
    ) -> None:
        feeds = [*inputs, *self._literals] if task == WORKER else []

        def on_done(outcome: Outcome[Fetches]) -> None:
            assert task not in outcomes, f"{task} is done twice"
            outcomes[task] = outcome

        channel = Mailbox(self.mail, task).channel
        run_of(self._parts[task], self.stores[task], channel, step, feeds, on_done, submit).start()

    def state(self) -> dict[str, jax.Array]:
        """The values of all variables."""
        return {name: self.stores[task].read(name) for name, task in self._home.items()}
