"""A coordinator whose state lost its newest changes is detected by the tasks that saw them."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.distributed.client.coordinator_client import CoordinatorClient
from dflow.distributed.client.coordinator_session import SessionSettings
from dflow.distributed.coordinator.coordinator_events import Asked, Log, Persist, SendReply, Started
from dflow.distributed.coordinator.coordinator_state import CoordinatorState
from dflow.distributed.coordinator.coordinator_store import SqliteStore
from dflow.distributed.coordinator.durable_records import Change, DurableRecords, apply_changes
from dflow.distributed.coordinator.state_marks import StateMarks
from dflow.distributed.coordinator_role import make_coordinator, make_coordinator_state
from dflow.distributed.transport.memory import MemoryNetwork
from dflow.distributed.wire.messages.basic import Failure
from dflow.distributed.wire.messages.message import Mark
from dflow.distributed.wire.messages.placement import PlaceVariable
from dflow.distributed.wire.messages.roster import Join
from tests.effort import examples

WORKER0, WORKER1 = "/job:worker/task:0", "/job:worker/task:1"
SOON_S = 20.0


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=5))
def test_a_mark_is_missing_exactly_when_a_write_up_to_it_was_lost(lives: list[tuple[int, int]]) -> None:
    """Each life of the coordinator writes `more` times, and then loses its newest writes."""
    writes: list[tuple[Change, ...]] = []
    given_marks: list[tuple[Mark, int]] = []
    for number, (more, lost) in enumerate(lives):
        rows: dict[str, bytes] = {}
        for write in writes:
            apply_changes(rows, write)
        records = DurableRecords(rows)
        marks = StateMarks(records)
        # Of the marks from earlier lives, exactly those of the remaining writes are known.
        marks.started(f"start {number}")
        for place in range(1 + more):
            if place:
                records.put("something", Mark("", place))
            marks.written()
            writes.append(records.take_changes())
            given_marks.append((marks.newest, len(writes)))
        for mark, size in given_marks:
            assert bool(marks.missing(mark)) == (size > len(writes)), mark
        kept = max(len(writes) - lost, 0)
        del writes[kept:]
        given_marks = [(mark, size if size <= kept else 1_000_000) for mark, size in given_marks]


def test_a_coordinator_that_lost_its_newest_write_takes_back_only_tasks_that_saw_nothing_of_it() -> None:
    writes: list[tuple[Change, ...]] = []

    def handled(state: CoordinatorState, event: Started | Asked) -> tuple[Any, list[str]]:
        """Return the answer to a request, and what is logged."""
        commands = state.handle(event)
        writes.extend(command.changes for command in commands if isinstance(command, Persist))
        answers = [command.message for command in commands if isinstance(command, SendReply)]
        return [*answers, None][0], [command.text for command in commands if isinstance(command, Log)]

    first = make_coordinator_state({"ps": 1, "worker": 2})
    handled(first, Started(0.0, "blue"))
    handled(first, Asked(0.0, 1, 1, Join(WORKER0, "h:1", "life 1")))
    roster, _ = handled(first, Asked(0.0, 2, 2, Join(WORKER1, "h:1", "life 2")))
    placed, _ = handled(first, Asked(0.0, 1, 3, PlaceVariable("w", "float32", (), 4, "ps")))
    rows: dict[str, bytes] = {}
    for changes in writes[:-1]:
        apply_changes(rows, changes)
    second = make_coordinator_state({"ps": 1, "worker": 2}, rows=rows)
    handled(second, Started(0.0, "start 2"))
    for peer, is_logged in ((11, True), (12, False)):
        refusal, log = handled(second, Asked(0.0, peer, 1, Join(WORKER0, "h:1", "life 1", "blue", 1, placed.mark)))
        assert log == ([refusal.text] if is_logged else []), "logged once"
        assert refusal.text == (
            "the coordinator's state is older than what worker:0 has seen of it: of the changes up to 4 it has those "
            "up to 3; the file of its state was damaged or replaced, so end the run and start it again with a new one"
        )
    back, _ = handled(second, Asked(0.0, 13, 1, Join(WORKER1, "h:1", "life 2", "blue", 2, roster.mark)))
    assert not isinstance(back, Failure)


def test_a_flipped_bit_in_the_write_ahead_log_is_found_out(tmp_path: Path) -> None:
    network, lost, gone = MemoryNetwork(), list[str](), threading.Event()
    first = make_coordinator(network, "", {"ps": 1, "worker": 1}, store=SqliteStore(tmp_path / "state"), tick_s=None)
    client = CoordinatorClient(network, first.address, name=WORKER0, settings=SessionSettings(longest_pause_s=0.05))
    client.join(WORKER0, "h:1")
    client.session.call_on_lost(lambda reason: (lost.append(reason), gone.set())[1])
    client.ask(PlaceVariable("w", "float32", (), 4, "ps"))
    (tmp_path / "damaged").mkdir()
    for file in tmp_path.glob("state*"):
        shutil.copy(file, tmp_path / "damaged")
    log = tmp_path / "damaged/state-wal"
    data = bytearray(log.read_bytes())
    data[-100] ^= 1
    log.write_bytes(data)
    first.close()
    store = SqliteStore(tmp_path / "damaged/state")
    second = make_coordinator(network, first.address, {"ps": 1, "worker": 1}, store=store, tick_s=None)
    assert gone.wait(SOON_S)
    assert "the coordinator's state is older than what worker:0 has seen of it: of the changes up to" in lost[0]
    client.close()
    second.close()
