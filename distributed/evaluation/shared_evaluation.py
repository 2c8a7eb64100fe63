"""An evaluation that several tasks share: they claim its batches, and use values of one moment of all tasks.

One task captures the values on the tasks that hold them, and shares the capture under the name of the evaluation. Each
task reads the values once. The ledger of steps says which task captures, hands out the batches, and adds up what they
gave.

Invariants:
- each batch is in the sums once: a batch whose task died is claimed again, and the dead task's is in no sum;
- all sums are of one capture, since each capture has a separate run in the ledger. A capture is kept as long as a
  task that uses it lives. If all of them die, the evaluation begins again with another capture;
- the evaluation has one result, the first that is recorded.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import jax
from msgspec.structs import replace

from dflow.distributed.cluster.cluster_resources import task_of_resource
from dflow.distributed.cluster.cluster_steps import ClusterSteps
from dflow.distributed.cluster.outgoing_requests import OutgoingRequests
from dflow.distributed.steps.retries import retried
from dflow.distributed.wire.codec import decode_arrays
from dflow.distributed.wire.messages.checkpoints import (
    CaptureVariables,
    EndCapture,
    EndShare,
    ReadCapture,
    ShareCapture,
)
from dflow.distributed.wire.messages.message import Answer, Request
from dflow.distributed.wire.messages.rounds import Claimed, ClaimSteps
from dflow.tracing.errors import DflowError
from dflow.tracing.state.resources import Variable

#: Numbers that identify this process's captures and restores on the tasks.
CAPTURE_NUMBERS = itertools.count()

#: Evaluates the batches of some numbers with values of variables; returns sums by name.
Sums = Callable[[range, Sequence[jax.Array]], Mapping[str, float]]


class SharedValues:
    """The values of variables on tasks at one moment, which other tasks of the cluster can read by a name."""

    def __init__(
        self, requests: OutgoingRequests, steps: ClusterSteps, variables: Sequence[Variable], name: str | None = None
    ) -> None:
        self._requests, self._steps, self._variables = requests, steps, variables
        self._name = name or f"{next(CAPTURE_NUMBERS)} of {requests.task}"
        self._keys: dict[str, list[str]] = defaultdict(list)
        for variable in variables:
            self._keys[task_of_resource(variable)].append(variable.key)

    def capture(self) -> None:
        """Have all tasks keep the values of one moment between two steps."""
        me, number = self._requests.task, next(CAPTURE_NUMBERS)
        captures = {task: CaptureVariables(me, number, tuple(keys)) for task, keys in self._keys.items()}
        try:
            self._steps.while_paused(lambda: self._ask(captures), "an evaluation")
            self._ask(dict.fromkeys(self._keys, ShareCapture(me, number, self._name)))
        except BaseException:
            with suppress(DflowError):
                self._ask(dict.fromkeys(self._keys, EndCapture(me, number)))
            raise

    def read(self) -> tuple[str, list[jax.Array]] | None:
        """Return a name of the capture and its values, in the order of the variables; None unless all tasks have it."""
        me = self._requests.task
        answers = self._ask({task: ReadCapture(me, self._name, tuple(keys)) for task, keys in self._keys.items()})
        captures = {f"{answer.number} by {answer.origin}" if answer.origin else "" for answer, _ in answers}
        if len(captures) != 1 or "" in captures:
            return None
        values: dict[str, jax.Array] = {}
        for keys, (answer, payload) in zip(self._keys.values(), answers, strict=True):
            values.update(zip(keys, map(jax.device_put, decode_arrays(answer.arrays, payload)), strict=True))
        return captures.pop(), [values[variable.key] for variable in self._variables]

    def end(self) -> None:
        """End this task's use of the values; a task that is gone has released them too."""
        with suppress(DflowError):
            self._ask(dict.fromkeys(self._keys, EndShare(self._requests.task, self._name)))

    def _ask(self, messages: Mapping[str, Request[Answer]]) -> list[Any]:
        answers = self._requests.ask_all([(task, message, b"") for task, message in messages.items()])
        for answer in answers:
            if isinstance(answer, DflowError):
                raise answer
        return answers


class SharedEvaluation:
    """This task's part in the evaluation `name` of `count` batches."""

    def __init__(self, requests: OutgoingRequests, steps: ClusterSteps, name: str, count: int) -> None:
        self._requests, self._steps, self._name, self._count = requests, steps, name, count
        self._result = self._claim(f"result of evaluation {name}", 1)

    def run(self, variables: Sequence[Variable], sums: Sums) -> dict[str, float]:
        """Evaluate batches until all are counted; return the sums over all of them.

        If a task with variables is lost, begins again when all tasks have returned to a snapshot.

        sums  evaluates the batches of some numbers with these values of the variables, and returns their sums by name
        """
        return retried(self._steps, lambda: self._run(variables, sums))

    def _run(self, variables: Sequence[Variable], sums: Sums) -> dict[str, float]:
        shared = SharedValues(self._requests, self._steps, variables, self._name)
        try:
            found = self._captured(shared)
            return found if isinstance(found, dict) else self._recorded(self._summed(*found, sums))
        finally:
            shared.end()

    def _captured(self, shared: SharedValues) -> tuple[str, list[jax.Array]] | dict[str, float]:
        """Return the capture and its values; or the result, if the evaluation is complete.

        An attempt at a capture is a run of one step. If it is done, and there is neither a capture nor a result, the
        tasks that used the capture have died or failed.
        """
        for attempt in itertools.count():
            if result := self._ask(replace(self._result, more=False)).sums:
                return dict(result)
            claim = self._claim(f"capture {attempt} of evaluation {self._name}", 1)
            if self._ask(claim).count:
                with self._returned(claim):
                    shared.capture()
                self._ask(replace(claim, done=1))
            if found := shared.read():
                return found
        raise AssertionError

    def _summed(self, capture: str, values: Sequence[jax.Array], sums: Sums) -> dict[str, float]:
        claim = self._claim(f"evaluation {self._name} of capture {capture}", self._count)
        claimed = self._ask(claim)
        while claimed.count:
            with self._returned(claim):
                found = sums(claimed.steps, values)
            claimed = self._ask(replace(claim, done=claimed.count, sums=dict(found)))
        return dict(claimed.sums)

    def _recorded(self, sums: dict[str, float]) -> dict[str, float]:
        """Record the result, for tasks that come later; return the one that was recorded first."""
        claimed = self._ask(self._result)
        if claimed.count:
            claimed = self._ask(replace(self._result, done=1, sums=sums))
        return dict(claimed.sums)

    @contextmanager
    def _returned(self, claim: ClaimSteps) -> Iterator[None]:
        """Return a context whose error returns the claimed steps to the other tasks."""
        try:
            yield
        except BaseException:
            with suppress(DflowError):
                self._ask(replace(claim, more=False))
            raise

    def _claim(self, run: str, count: int) -> ClaimSteps:
        return ClaimSteps(run, self._requests.task, count, is_training=False)

    def _ask(self, claim: ClaimSteps) -> Claimed:
        return self._requests.coordinator.ask(claim)
