"""Steps of this process alone: no cluster, no threads, and for most functions one XLA call a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from dflow.lowering.programs.program import LoweredProgram, Program, lower_program
from dflow.lowering.queues.channel import StepId
from dflow.lowering.state.store import Store
from dflow.lowering.state_backend import LoweredStep, Runner
from dflow.lowering.steps.compile_plan import run_of
from dflow.lowering.steps.executable import Executable, takes
from dflow.lowering.steps.execute import Fetches
from dflow.lowering.steps.lowered import Lowered
from dflow.lowering.steps.plan import Call, calls_in
from dflow.lowering.values.devices import device_named
from dflow.lowering.values.kept_shardings import kept_shardings
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.devices.device_name import device_name
from dflow.tracing.jaxprs.trace import Traced


@dataclass(frozen=True)
class LocalStep:
    """A traced function over variables of this process, lowered.

    `traced` is without its graph and its variables, which the step must not keep alive. `literals` are the literals
    that the function returns. `call` is the one XLA call that the step is, if no other work is needed around it.
    """

    traced: Traced
    lowered: Lowered
    literals: Sequence[jax.Array]
    store: Store
    call: Call | None

    def values(
        self, written: Sequence[Any], read: Sequence[Any], constants: Sequence[Any], leaves: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return the new values of the variables that `call` writes, and the step's results; JAX traces this."""
        plan, call = self.lowered.plan, self.call
        assert call is not None
        registers = dict(zip(plan.feeds, [*constants, *leaves, *self.literals], strict=True))
        # Looked up in each trace: there is another one when the shardings of the variables have changed.
        kept = kept_shardings(self.lowered.functions[0].fn, self.store.shardings(call.writes))
        results = kept(*written, *read, *(registers[register] for register in call.takes))
        registers.update(zip(call.gives, results[len(written) :], strict=True))
        return results[: len(written)], [registers[register] for register in plan.fetches]

    def lower(self, platforms: tuple[str, ...] | None = None) -> LoweredStep:
        """Lower the programs, for `platforms` if not None, else for this process."""
        traced = self.traced
        donated = [len(traced.constants) + leaf for leaf in traced.donated]
        programs = lower_programs(
            self.lowered, self.store, donated, traced.name, traced.compiler_options, platforms, traced.meshes
        )

        def compiled(compiler_options: dict[str, Any] | None) -> tuple[Runner, list[Any]]:
            found = [program.compile(compiler_options) for program in programs]
            return self._runner(found, donated), [program.compiled for program in found]

        return LoweredStep([program.stage for program in programs], compiled)

    def _runner(self, programs: Sequence[Program], donated: Collection[int]) -> Runner:
        plan, store, constants, literals = self.lowered.plan, self.store, self.traced.constants, self.literals
        if len(plan.items) == 1 and isinstance(plan.items[0], Call) and plan.fetches == plan.items[0].gives:
            return _one_call(plan.items[0], plan.feeds, programs[0], store, constants)
        executable = Executable(plan, programs)
        given_back = [index for index, register in enumerate(plan.feeds) if register in plan.fetches]
        lost = set(donated).intersection(given_back)

        def run(leaves: Sequence[Any]) -> Sequence[Any]:
            feeds = [*constants, *leaves, *literals]
            for index in given_back:
                # A copy, because the caller may write to a NumPy array, and loses an array that was donated.
                is_kept = isinstance(feeds[index], jax.Array) and index not in lost
                feeds[index] = feeds[index] if is_kept else jnp.array(feeds[index])
            results = fetched(_run_here(executable, store, feeds))
            for index in lost:
                given = leaves[index - len(constants)]
                if isinstance(given, jax.Array):
                    given.delete()
            return results

        return run


def single_call(lowered: Lowered, variables: Sequence[Any]) -> Call | None:
    """Return the call of a plan that is nothing but one call, if JAX will run it on the right device; else None.

    JAX runs a call on the device of its variables. So a call with a device must use one of `variables` there.
    """
    items = lowered.plan.items
    if len(items) != 1 or not isinstance(call := items[0], Call):
        return None
    is_beside = not call.device or any(
        variable.device == device_name("", call.device) and variable.key in {*call.writes, *call.reads}
        for variable in variables
    )
    return call if is_beside else None


def lower_programs(
    lowered: Lowered,
    store: Store,
    given_up: Collection[int] = (),
    name: str = "step",
    compiler_options: dict[str, Any] | None = None,
    platforms: tuple[str, ...] | None = None,
    meshes: Mapping[AbstractMesh, Mesh] = MappingProxyType({}),
) -> list[LoweredProgram]:
    """Lower a plan's programs for this process, or for `platforms`.

    `given_up`  indices of feeds that the caller donates; one is donated if a single call takes it
    `name`      the name that compilation logs and profiles show
    `meshes`    the meshes of the feeds

    Written variables keep the shardings that they have in the `store`.
    """
    plan = lowered.plan
    uses = Counter([*plan.fetches, *(register for item in plan.items for register in takes(item))])
    registers = {plan.feeds[number] for number in given_up if uses[plan.feeds[number]] == 1}
    donated = {
        item.program: [index for index, register in enumerate(item.takes) if register in registers]
        for item in plan.items
        if isinstance(item, Call)
    }
    calls = {call.program: call for call in calls_in(plan)}
    return [
        lower_program(
            pure.fn,
            pure.types,
            len(pure.written),
            len(pure.read),
            donated.get(number, ()),
            name,
            compiler_options,
            device_named(calls[number].device) if calls[number].device else None,
            platforms,
            calls[number].keeps,
            store.shardings((*calls[number].writes, *calls[number].reads)),
            meshes,
        )
        for number, pure in enumerate(lowered.functions)
    ]


def _run_here(executable: Executable, store: Store, feeds: Sequence[Any]) -> Outcome[Fetches]:
    """Run a plan on this thread. Items that other threads make ready also run on this thread."""
    outcomes: list[Outcome[Fetches]] = []
    work: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def on_done(outcome: Outcome[Fetches]) -> None:
        outcomes.append(outcome)
        work.put(lambda: None)

    execution = run_of(executable, store, _NO_CHANNEL, StepId(executable.plan.task, 0), feeds, on_done, work.put)
    try:
        execution.start()
        while not outcomes:
            work.get()()
    except BaseException as error:
        execution.cancel(error)
        raise
    return outcomes[0]


def fetched(outcome: Outcome[Fetches]) -> tuple[jax.Array, ...]:
    """Return the fetches of an execution that has ended; raise the error that ended it."""
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def _one_call(call: Call, feeds: tuple[int, ...], program: Program, store: Store, constants: Sequence[Any]) -> Runner:
    """The common case: a step is one XLA call, its operands picked from constants and arguments."""
    picks = [feeds.index(register) for register in call.takes]

    def run(leaves: Sequence[Any]) -> Sequence[Any]:
        values = [*constants, *leaves]
        return store.call(program, call.writes, call.reads, [values[index] for index in picks])

    return run


#: A local step has one plan, without sends and receives.
_NO_CHANNEL: Any = None
