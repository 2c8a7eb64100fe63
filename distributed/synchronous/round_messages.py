"""Messages between a worker and the task that aggregates the gradients of synchronous steps, called rounds."""

from __future__ import annotations

from dflow.distributed.wire.messages.basic import ArrayInfo, Ok
from dflow.distributed.wire.messages.message import Message, Request
from dflow.tracing.devices.task_name import short_task_name


class RoundsAgreed(Message, frozen=True):
    """Number of gradients per round, name of the run's accumulator, and whether all rounds are done.

    `process` is the one that has counted the rounds, part of the identity of each.
    """

    wanted: int
    accumulator: str
    is_over: bool
    process: str = ""


class ProposeRounds(Request[RoundsAgreed], frozen=True):
    """Register a worker in a run of synchronous training; answered by `RoundsAgreed`, the same for every worker.

    A run has `rounds` synchronous steps, called rounds. The first worker fixes `wanted`, the number of gradients per
    round, the name of the accumulator, and the `others`, the tasks with a further accumulator of the run, by the names
    of `accumulator_on`. The number of returns to a snapshot is appended to a name, and a number if another run uses it.
    """

    speaker = "worker"

    name: str
    worker: str
    rounds: int
    wanted: int
    accumulator: str
    others: tuple[str, ...] = ()


def accumulator_on(task: str, name: str) -> str:
    """Return the name of the accumulator on another task of the run whose accumulator is `name`."""
    return f"{name}/{short_task_name(task)}"


def rounds_of(run: str, process: str) -> str:
    """Return the identity of the rounds of a run that a process has counted, under which tasks record their updates."""
    return f"{run}\nrounds of {process}"


class OpenRounds(Request[Ok], frozen=True):
    """Become the step aggregator (round host) of a run, unless it is open here.

    In each of `rounds` rounds this task takes the mean of `wanted` gradients from the accumulator. It then starts the
    update, a step over the registered plans `handles` (by task). In this step the other tasks take the mean of the same
    gradients. The payload holds the arrays fed `before` the mean and those fed `after` it. `workers` take part. The
    accumulator is held under `key`, which has the worker's container before its name. `epoch` is the number of returns
    of all tasks to a snapshot before the plans were registered. Unless the run `is_elastic`, its rounds wait for the
    next process of a worker that has died.
    """

    name: str
    rounds: int
    wanted: int
    workers: tuple[str, ...]
    accumulator: str
    key: str
    handles: dict[str, int]
    before: tuple[ArrayInfo, ...] = ()
    after: tuple[ArrayInfo, ...] = ()
    epoch: int = 0
    is_elastic: bool = True


class RoundOpen(Message, frozen=True):
    """The number of the open round, which tags its gradients, and the count of rounds `done` (all: the run is over)."""

    number: int
    done: int


class NextRound(Request[RoundOpen], frozen=True):
    """A worker is done with the round opening number `done` (-1: none yet); answered by `RoundOpen` of a later one.

    `accumulator`  the run's, as agreed when the worker opened it; refused as TaskLost if the run has another one now
    `timeout_s`    longest wait, after which the request is refused as DeadlineExceeded
    """

    speaker = "worker"

    name: str
    worker: str
    done: int
    accumulator: str
    timeout_s: float


class RoundsLeft(Message, frozen=True):
    """A worker has left a run; if it was the last one, the run's accumulators are freed on all tasks."""


class LeaveRounds(Request[RoundsLeft], frozen=True):
    """A worker stops taking part; it has sent its gradients for the openings up to `done` to this accumulator."""

    speaker = "worker"

    name: str
    worker: str
    done: int
    accumulator: str
