"""Values of variables on tasks at one moment between two steps, captured by one task and read by any of them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress

import jax

from dflow.distributed.cluster.cluster_resources import task_of_resource
from dflow.distributed.cluster.cluster_steps import ClusterSteps
from dflow.distributed.cluster.outgoing_requests import OutgoingRequests
from dflow.distributed.task.checkpoint_messages import (
    CaptureVariables,
    EndCapture,
    EndShare,
    ReadCapture,
)
from dflow.distributed.wire.codec import decode_arrays
from dflow.tracing.errors import DflowError
from dflow.tracing.state.resources import Variable

#: Numbers that identify this process's captures and restores on the tasks.
CAPTURE_NUMBERS = itertools.count()


class SharedValues:
    """The values of variables on tasks at one moment, which other tasks of the cluster can read by a name.

    `name`  by default one that no other capture has
    """

    def __init__(
        self, requests: OutgoingRequests, steps: ClusterSteps, variables: Sequence[Variable], name: str | None = None
    ) -> None:
        self._requests, self._steps, self._variables = requests, steps, variables
        self._name = name or f"{next(CAPTURE_NUMBERS)} of {requests.task}"
        self._keys: dict[str, list[str]] = defaultdict(list)
        for variable in variables:
            self._keys[task_of_resource(variable)].append(variable.key)

    def capture(self) -> None:
        """Have all tasks keep the values of one moment between two steps, in place of an earlier capture of the name.

        raises  what `while_paused` raises, or the first error of a task; the values are then released
        """
        me, number = self._requests.task, next(CAPTURE_NUMBERS)
        captures = {task: CaptureVariables(me, number, tuple(keys)) for task, keys in self._keys.items()}
        try:
            self._steps.while_paused(lambda: self._requests.ask_each(captures), "an evaluation")
            self._requests.ask_each(dict.fromkeys(self._keys, EndCapture(me, number, share_as=self._name)))
        except BaseException:
            with suppress(DflowError):
                self._requests.ask_each(dict.fromkeys(self._keys, EndCapture(me, number)))
            raise

    def read(self) -> tuple[str, list[jax.Array]] | None:
        """Return an id of the capture and its values, in the order of the variables; None unless all tasks have it."""
        me = self._requests.task
        answers = self._requests.ask_each(
            {task: ReadCapture(me, self._name, tuple(keys)) for task, keys in self._keys.items()}
        )
        captures = {f"{answer.number} by {answer.origin}" if answer.origin else "" for answer, _ in answers}
        if len(captures) != 1 or "" in captures:
            return None
        values: dict[str, jax.Array] = {}
        for keys, (answer, payload) in zip(self._keys.values(), answers, strict=True):
            values.update(zip(keys, map(jax.device_put, decode_arrays(answer.arrays, payload)), strict=True))
        return captures.pop(), [values[variable.key] for variable in self._variables]

    def end(self) -> None:
        """End this task's use of the values; ignores errors, since a task that is gone has released them too."""
        with suppress(DflowError):
            self._requests.ask_each(dict.fromkeys(self._keys, EndShare(self._requests.task, self._name)))
