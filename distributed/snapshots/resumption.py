"""The records of snapshots, and the beginning of a cluster with the newest one of a cluster that has ended.

Why: the members, elections, barriers and claims of the earlier cluster mean nothing to processes that run their script
from its beginning. Its snapshot, with the ledger of the runs' steps, is what they go on from.
Invariants:
- numbers of snapshots and of returns are never used again, so that no part of the earlier cluster is taken for a newer
  one;
- a snapshot from before the first run has no count of the steps in its state, which a program of another loop may have
  changed; one in the first part of a trainer that saves checkpoints is older than all of these. The variable with the
  program's own count is then made again, so that the program restores its newest checkpoint;
- the plan of a trainer that the snapshot has steps of is known from the beginning, so that the progress of a part is
  not taken for that of the whole run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from dflow.distributed.coordinator.coordinator_part import CoordinatorPart, copies_of
from dflow.distributed.coordinator.durable_records import DurableRecords, apply_changes
from dflow.distributed.coordinator.variable_directory import placed_again
from dflow.distributed.wire.messages.status import VariableInfo
from dflow.tracing.devices.task_name import short_task_name

#: Keys of the records.
EPOCH, SNAPSHOT = "snapshots/counted", "snapshot/committed"
#: Beginning of the name of a variable with the next step of a program that saves checkpoints (`SharedProgress`).
PROGRESS = "dflow/next_step"


class Snapshot(msgspec.Struct, frozen=True):
    """A snapshot: the tasks that hold parts of it, the names of all state in it, and the coordinator's parts then.

    at_s        time of the capture, as in events
    placed      the placements of the state, and of the hosts of runs; see `VariableDirectory.saved`
    cluster     id of the cluster that made it
    copies      copies of the coordinator's parts, by class
    steps_done  number of steps done then; None before the first run, as in `RunProgress.steps_done`
    """

    number: int
    tasks: tuple[str, ...]
    names: tuple[str, ...]
    at_s: float
    placed: tuple[VariableInfo, ...]
    cluster: str
    copies: dict[str, bytes] = {}
    steps_done: int | None = None

    def described(self, at_s: float) -> str:
        """Return its number, age, steps and tasks as a text, for the log of a cluster that resumes it.

        at_s  time of the earlier cluster's last record
        """
        where = ", ".join(map(short_task_name, self.tasks))
        made = f"made {at_s - self.at_s:.0f} s before the last record of that cluster, with {self.steps_done or 0}"
        return f"snapshot {self.number}, {made} steps done; {where}"


#: The moment before all state: tasks return to it if they lose state before the first snapshot is complete.
BEGINNING = Snapshot(0, (), (), 0.0, (), "")


class Epoch(msgspec.Struct, frozen=True):
    """Counts of returns and snapshots.

    epoch        number of returns to a snapshot
    number       number of the newest snapshot, committed or not
    undone       number of the returns that have undone steps
    resumed      number of the snapshot of an earlier cluster that this one resumes; 0 for none
    is_resuming  whether the tasks have yet to load it
    """

    epoch: int = 0
    number: int = 0
    undone: int = 0
    resumed: int = 0
    is_resuming: bool = False


def newest_snapshot(rows: Mapping[str, bytes]) -> Snapshot | None:
    """Return the newest committed snapshot of a coordinator's records; None if there is none."""
    return next((found for _, found in DurableRecords(rows).load(SNAPSHOT, Snapshot)), None)


def resumed(
    rows: Mapping[str, bytes], snapshot: Snapshot | None, parts: Sequence[type[CoordinatorPart]]
) -> dict[str, bytes]:
    """Return the records of a new cluster that resumes the snapshot, or that begins without state if it is None.

    rows   records of the earlier cluster
    parts  the parts of its coordinator
    """
    before = DurableRecords(rows)
    counted = before.load_one(EPOCH, Epoch())
    kept = Epoch(counted.epoch, counted.number)
    records = DurableRecords()
    if snapshot is None:
        records.put(EPOCH, kept)
    else:
        records.put(EPOCH, msgspec.structs.replace(kept, resumed=snapshot.number, is_resuming=True))
        records.put(SNAPSHOT, snapshot)
        is_counted = snapshot.steps_done is not None
        placed = [info for info in snapshot.placed if is_counted or not info.name.startswith(PROGRESS)]
        for key, record in placed_again(placed):
            records.put(key, record)
        for part in parts:
            for copy in copies_of(part, snapshot.copies):
                for key, made in part.records_of(copy, before):
                    records.put(key, made)
    found: dict[str, bytes] = {}
    apply_changes(found, records.take_changes())
    return found
