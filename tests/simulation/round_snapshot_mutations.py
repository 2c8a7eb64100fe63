"""Faults planted in the code of rounds, as far as snapshots and returns to them use it; see `mutations`."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from dflow.distributed.steps import step_gate
from dflow.distributed.synchronous import rounds, step_aggregator
from dflow.distributed.training import run_progress
from dflow.lowering.queues import accumulators
from dflow.lowering.state import applied_steps
from tests.simulation.planting import Mutation, change_is_new, doing_nothing
from tests.simulation.programs import ROUND_SNAPSHOTS

#: The ps task that aggregates the rounds, or another one, dies in the middle of the run.
_HOST_DIES, _OTHER_DIES = "kill=ps:0@6+0.5", "kill=ps:1@6+0.5"
#: The two cannot reach each other for a while, from an update on, so that only one applies it.
_APART = "cut=ps:0/ps:1@0.4385+7.2"
#: The host dies several times: once, a worker does something else at that moment.
_OFTEN = "kill=ps:0@6+0.1,kill=ps:0@10.5+0.1,kill=ps:0@15+0.1,kill=ps:0@19.5+0.1"

_RUN = step_aggregator._AggregatedRun
_AGGREGATOR = step_aggregator.StepAggregator
_ATTEMPT = applied_steps.StepAttempt


def _of_any_accumulator(original: Any) -> Any:
    return lambda run, message, responder: original(
        run, msgspec.structs.replace(message, accumulator=run.accumulator), responder
    )


def _whenever_done(original: Any) -> Any:
    return lambda ledger, report, undone: original(ledger, report, report.undone)


def _as_whole(original: Any) -> Any:
    def copy(run: Any) -> Any:
        run._rounds.is_half_done = False
        return original(run)

    return copy


def _with_one_less(original: Any) -> Any:
    def copy(run: Any) -> Any:
        found = original(run)
        return msgspec.structs.replace(found, done=max(0, found.done - 1))

    return copy


def _whether_open_or_not(original: Any) -> Any:
    def enter(gate: Any, when_open: Any) -> bool:
        if not original(gate, when_open):
            gate._waiting.remove(when_open)
            gate._running += 1
        return True

    return enter


def _in_place(original: Any) -> Any:
    def return_to(run: Any, *args: Any, **kwargs: Any) -> Any:
        vars(run).update(vars(original(run, *args, **kwargs)))
        return run

    return return_to


_planted = partial(Mutation, program=ROUND_SNAPSHOTS)


ROUND_SNAPSHOT_MUTATIONS = (
    _planted(
        "the aggregator does not return to its round",
        _AGGREGATOR,
        "return_to",
        doing_nothing,
        "one moment",
        _OTHER_DIES,
    ),
    _planted("a copy of a run lacks a round", _RUN, "copy", _with_one_less, "one moment", _HOST_DIES),
    _planted("an opening of another process counts", _RUN, "ask", _of_any_accumulator, "the dead", _OFTEN),
    _planted("a sum of before a return is applied", rounds.Rounds, "return_to", _in_place, "applied once", _OTHER_DIES),
    _planted(
        "rounds of before a return are counted",
        run_progress.RunProgress,
        "note_rounds",
        _whenever_done,
        "none lost",
        _OFTEN,
    ),
    _planted(
        "a task does not record the update of a round", _ATTEMPT, "_begins", change_is_new, "applied once", _APART
    ),
    _planted("half of a round is in a snapshot", _RUN, "copy", _as_whole, "one moment", _APART),
    _planted(
        "updates do not wait for the end of a pause",
        step_gate.StepGate,
        "enter",
        _whether_open_or_not,
        "one moment",
        _HOST_DIES,
    ),
    _planted(
        "an accumulator does not return",
        accumulators.HeldAccumulator,
        "return_to",
        doing_nothing,
        "one moment",
        _OTHER_DIES,
    ),
)
