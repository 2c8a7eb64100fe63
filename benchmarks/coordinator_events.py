"""Measure the cost of an event for a coordinator, without and with its state in a file.

The state machine handles each event, and one call per event writes its lasting changes, which is the worst case: events
that arrive together are written together. *memory* keeps the records in a dict, *file* in SQLite, on the disk when the
write returns. `wall us` is the time of an event with its write, `cpu us` its processor time; a heartbeat writes
nothing. `restart` is the time to read the state back, with all tasks and claims.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks._paired import options, publish
from dflow.distributed.coordinator.coordinator_events import Asked, Event, Persist, SendReply, Started, Told
from dflow.distributed.coordinator.coordinator_part import CoordinatorSettings
from dflow.distributed.coordinator.coordinator_store import CoordinatorStore, MemoryStore, SqliteStore
from dflow.distributed.coordinator_role import make_coordinator_state
from dflow.distributed.training.work_messages import Claimed, ClaimSteps
from dflow.distributed.wire.messages.placement import PlaceVariable
from dflow.distributed.wire.messages.roster import Heartbeat, Join

STEPS = 10**9


def main() -> None:
    given = options(__doc__, tasks=1000, rounds=5)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        stores: dict[str, Callable[[], CoordinatorStore]] = {
            "memory": MemoryStore,
            "file": lambda: SqliteStore(Path(folder, f"state{time.monotonic_ns()}")),
        }
        for name, make in stores.items():
            rows += measured(name, make(), given.tasks, given.rounds)
    publish("coordinator_events", rows, as_json=given.json)


def measured(name: str, store: CoordinatorStore, tasks: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each kind of event, and one for the restart."""
    workers = [f"/job:worker/task:{index}" for index in range(tasks)]
    state = make_coordinator_state({"worker": tasks}, CoordinatorSettings())
    claimed: dict[int, int] = {}

    def run(events: Iterable[Event]) -> None:
        for event in events:
            for command in state.handle(event):
                match command:
                    case Persist(changes):
                        store.write(changes)
                    case SendReply(ask, Claimed(_, count)):
                        claimed[ask] = count

    def claims(number: int) -> list[Event]:
        return [
            Asked(0.0, peer, peer, ClaimSteps("run", task, STEPS, number, number - 1, claimed.get(peer, 0)))
            for peer, task in enumerate(workers)
        ]

    run([Started(0.0, "cluster")])
    kinds: dict[str, Callable[[int], list[Event]]] = {
        "heartbeat": lambda number: [Told(0.0, peer, Heartbeat(task, (), number)) for peer, task in enumerate(workers)],
        "claim": claims,
        "placement": lambda number: [
            Asked(0.0, peer, 0, PlaceVariable(f"v{number}.{peer}", "float32", (), 4, "worker"))
            for peer in range(min(tasks, 100))
        ],
    }
    joins: list[Event] = [
        Asked(0.0, peer, 0, Join(task, f"10.0.0.1:{peer}", "life")) for peer, task in enumerate(workers)
    ]
    rows = [timed(name, "join", [joins], run)]
    for kind, events in kinds.items():
        rows.append(timed(name, kind, [events(number) for number in range(1, rounds + 1)], run))
    started = time.perf_counter()
    make_coordinator_state({"worker": tasks}, CoordinatorSettings(), store.load())
    rows.append({"state": name, "event": "restart", "wall us": (time.perf_counter() - started) * 1e6, "cpu us": 0.0})
    return rows


def timed(name: str, kind: str, batches: list[list[Event]], run: Callable[[Iterable[Event]], None]) -> dict[str, Any]:
    """Return the mean over all events of the batches."""
    count, wall_s, cpu_s = sum(map(len, batches)), time.perf_counter(), time.process_time()
    for batch in batches:
        run(batch)
    wall_us, cpu_us = (time.perf_counter() - wall_s) * 1e6 / count, (time.process_time() - cpu_s) * 1e6 / count
    return {"state": name, "event": kind, "wall us": wall_us, "cpu us": cpu_us}


if __name__ == "__main__":
    main()
