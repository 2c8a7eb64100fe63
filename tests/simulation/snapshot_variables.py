"""A worker's use of variables that are in snapshots: it creates them, waits in pauses, and goes on after a return.

Each ps task has two variables. A variable has the number of times that each step, or round, was applied to it, and at
its end a number that no other initial value has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial

from dflow.distributed.snapshots.snapshot_messages import AwaitRecovery, SnapshotCommitted, StateRestored
from dflow.distributed.snapshots.unsaved_state import UnsavedState
from dflow.distributed.snapshots.used_state import UsedState
from dflow.distributed.steps.step_gate import RunningStep, _step
from dflow.distributed.wire.codec import encode_array
from dflow.distributed.wire.failures import error_of
from dflow.distributed.wire.messages.basic import ArrayInfo
from dflow.distributed.wire.messages.placement import Placed, PlaceVariable
from dflow.distributed.wire.messages.variables import CreateVariable, CreateVariables
from dflow.tracing.context_values import within
from dflow.tracing.errors import DflowError
from dflow.tracing.moments import reach
from tests.simulation.blocking_program import end_wait
from tests.simulation.checks import name_of
from tests.simulation.snapshot_checks import SnapshotChecks, names_on
from tests.simulation.steps_program import CLAIM_S, TrainingWorker
from tests.simulation.tasks import Member

REQUEST_S = 8.0
#: Number of times in a row that a worker is refused, because lost state cannot be restored, before it gives up.
REFUSALS = 3
#: Longest wait for the end of a pause.
PAUSE_S = 600.0


class SnapshotVariables:
    """The variables of all ps tasks, as `worker` uses them.

    length      number of elements of a variable
    on_restore  called when all tasks have returned to a snapshot
    """

    def __init__(
        self,
        worker: TrainingWorker,
        member: Member,
        checks: SnapshotChecks,
        length: int,
        on_restore: Callable[[], None] = lambda: None,
    ) -> None:
        self._worker, self._member, self._checks = worker, member, checks
        self._length, self._on_restore = length, on_restore
        self.used, self.unsaved = UsedState(member.name, lambda: member.roster), UnsavedState()
        self._is_in_step = False
        member.driver.call_on(StateRestored, self._restored)
        member.driver.call_on(SnapshotCommitted, lambda notice: self.unsaved.snapshot_complete())

    def train(self, train: Callable[[], None]) -> None:
        """Call `train` until it returns, or until lost state cannot be restored several times in a row."""
        refusals = 0
        while refusals < REFUSALS:
            try:
                self.await_recovery(is_joining=True)
                train()
                return
            except DflowError as error:
                self._member.failed(error)
            try:
                self.await_recovery()
                refusals = 0
            except DflowError as refusal:
                self._member.say(f"is refused: {refusal}")
                refusals += 1

    def await_recovery(self, *, is_joining: bool = False) -> None:
        """Wait until no state is lost. Raises TaskLost if lost state cannot be restored."""
        text = f"{self._member.name} waits for a return within a step, for whose end the return waits"
        self._checks.require(not self._is_in_step, "no cycle", text)
        try:
            recovered = self._member.ask_coordinator(AwaitRecovery(self._member.name, is_joining), CLAIM_S)
        except DflowError as refusal:
            self._checks.refused(str(refusal))
            raise
        if recovered.epoch != self._worker.epoch:  # the notice was lost with a connection
            self._restored(StateRestored(recovered.epoch, recovered.undone))
        with suppress(DflowError):  # the next request tries this again
            self.unsaved.make_again()

    def _restored(self, notice: StateRestored) -> None:
        self.used.restored()
        self.unsaved.returned(notice.epoch)
        self._worker.epoch, self._worker.undone = notice.epoch, notice.undone
        self._on_restore()

    @contextmanager
    def step(self) -> Iterator[None]:
        """As `StepGate.step`, in simulated time."""
        gate = self._member.server.gate
        while not gate.enter(partial(end_wait, may_try := Future[None](), None)):
            self._member.wait("the end of a pause", PAUSE_S, may_try)
        self._is_in_step = True
        try:
            with within(_step, RunningStep(gate, PAUSE_S, is_counted=True)):
                self.unsaved.make_again()
                yield
        finally:
            self._is_in_step = False
            gate.leave()

    def place(self, request: PlaceVariable) -> Placed:
        """Place state on a task, or learn where it is."""
        placed = self._member.ask_coordinator(request)
        self.used.note(request.name, placed)
        return placed

    def create_on(self, host: str) -> None:
        """Place the variables of a ps task, and create them there unless they exist."""
        shape, epoch = (self._length,), self.unsaved.epoch
        for name in names_on(host):
            placed = self.place(PlaceVariable(name, "int32", shape, 4 * self._length, "ps", on=name_of(host)))
            variable = CreateVariable(name, "int32", shape, arrays=1, process=placed.process)
            message = CreateVariables((variable,), (ArrayInfo("int32", shape),))
            initial = encode_array(self._checks.initial(self._length))
            reach("creation", self._member.name)
            answer = self._member.ask(host, message, initial, timeout_s=REQUEST_S)
            for failure in answer.message.failures.values():
                raise error_of(failure)
            if placed.is_saved:
                self.unsaved.note(name, epoch, host, self._create_again)

    def _create_again(self, hosts: Sequence[str]) -> None:
        for host in dict.fromkeys(hosts):
            self.create_on(host)
