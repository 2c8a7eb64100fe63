"""Faults planted at the named moments, and in writes of the coordinator that fail; see `mutations`."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from dflow.distributed.coordinator import coordinator, coordinator_state, surviving_store
from dflow.distributed.snapshots import recovery
from dflow.distributed.snapshots.resumption import SNAPSHOT
from tests.simulation.planting import Mutation, giving
from tests.simulation.programs import SNAPSHOTS

#: A task is lost after the coordinator's disk was full for a while.
_LOST = "full=coordinator@1+2,kill=ps:0@6+0.5"

#: The coordinator ends before its disk takes writes again.
_FULL = "full=coordinator@0+3,kill=worker:0@0.5+0.3,kill=coordinator@2.5+0.5"

#: The coordinator ends as the first task knows that the second snapshot is complete, and a task as the other one does.
_KNOWN = "at=commit*5/coordinator+1,at=commit*6/ps:0+3"

_STORE = surviving_store.SurvivingStore
_STATE = coordinator_state.CoordinatorState


def _once(original: Any) -> Any:
    def try_to_write(store: Any, at_s: float) -> None:
        original(store, at_s)
        if store.pending:
            store._retry_s = math.inf

    return try_to_write


def _as_written(original: Any) -> Any:
    def try_to_write(store: Any, at_s: float) -> None:
        original(store, at_s)
        store.pending.clear()

    return try_to_write


def _with_the_next_write(original: Any) -> Any:
    def written(shell: Any, changes: Any, commands: Any) -> Any:
        earlier, shell.later = getattr(shell, "later", []), [one for one in changes if one.key == SNAPSHOT]
        return original(shell, [*earlier, *(one for one in changes if one.key != SNAPSHOT)], commands)

    return written


_planted = partial(Mutation, program=SNAPSHOTS)


MOMENT_MUTATIONS = (
    _planted("a write that failed is not tried again", _STORE, "_try", _once, "none lost", _LOST),
    _planted("a write that failed counts as done", _STORE, "_try", _as_written, "one in office", _FULL),
    _planted("what is not written is told", _STATE, "waits", giving(False), "one in office", _FULL),
    _planted(
        "a snapshot is told of before its record is written",
        coordinator.Coordinator,
        "_written",
        _with_the_next_write,
        "none lost",
        _KNOWN,
    ),
    _planted(
        "a return does not wait for a task that ended in it",
        recovery.Recovery,
        "_repeat",
        giving(False),
        "none lost",
        "kill=ps:1@2.5+0.5,at=restore*2/ps:0+0.7",
    ),
)
