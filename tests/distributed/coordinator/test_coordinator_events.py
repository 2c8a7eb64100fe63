from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dflow.distributed.coordinator.coordinator_events import LOG_BYTES, Asked, Event, EventLog, Told
from dflow.distributed.coordinator.coordinator_state import CoordinatorState
from dflow.distributed.wire.messages.roster import EdgeTraffic, Heartbeat
from dflow.distributed.wire.messages.status import GetHealth


@given(st.lists(st.integers(0, 3000), max_size=60))
def test_the_newest_events_are_kept_as_far_as_they_fit(sizes: list[int]) -> None:
    log = EventLog(most=10, most_bytes=9000)
    events: list[Event] = [Asked(0.0, 0, ask, GetHealth("x" * size)) for ask, size in enumerate(sizes)]
    for event in events:
        log.append(event)
    kept = list(log)
    assert kept == events[len(events) - len(kept) :]
    assert len(log) == len(kept) <= 10
    assert log.size_bytes <= 9000
    bounded_by_bytes = log.size_bytes + sum(sizes[len(sizes) - len(kept) - 1 : len(sizes) - len(kept)]) + 250 > 9000
    assert len(kept) == min(len(events), 10) or bounded_by_bytes


def test_a_coordinator_keeps_few_large_messages() -> None:
    state = CoordinatorState({"ps": 1})
    for ask in range(3 * LOG_BYTES >> 20):
        state.handle(Asked(0.0, 0, ask, GetHealth("x" * (1 << 20))))
    kept = [
        event.message.task for event in state.log if isinstance(event, Asked) and isinstance(event.message, GetHealth)
    ]
    assert LOG_BYTES // 2 < sum(map(len, kept)) <= LOG_BYTES


def test_heartbeats_are_kept_without_what_they_tell_of_traffic() -> None:
    log = EventLog()
    log.append(Told(1.0, 2, Heartbeat("/job:ps/task:0", traffic=(EdgeTraffic("e", "a", "b", 1, 4),))))
    assert list(log) == [Told(1.0, 2, Heartbeat("/job:ps/task:0"))]
