"""The driver with a clock that advances by hand, against a coordinator in this process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from dflow.distributed.client.coordinator_session import SessionSettings
from dflow.distributed.client.session_driver import SessionDriver
from dflow.distributed.coordinator.coordinator import Coordinator
from dflow.distributed.coordinator.coordinator_events import Asked
from dflow.distributed.coordinator.coordinator_store import MemoryStore
from dflow.distributed.coordinator_role import make_coordinator
from dflow.distributed.transport.memory import MemoryNetwork
from dflow.distributed.wire.messages.roster import Heartbeat, Join
from dflow.distributed.wire.messages.status import GetHealth, GetStatus, Status
from tests.distributed import waiting
from tests.distributed.coordinator.handled_events import handled_events
from tests.manual_clock import ManualClock

WORKER0 = "/job:worker/task:0"
SOON_S = 20.0


class Driven:
    """A driver, its clock, and its coordinator, which can be replaced by one with the same state."""

    def __init__(self) -> None:
        self.network, self.store, self.clock = MemoryNetwork(), MemoryStore(), ManualClock()
        self.beats = 0
        self.coordinator = self.start("")
        self.driver = SessionDriver(
            self.network,
            self.coordinator.address,
            self.beat,
            name=WORKER0,
            process="first",
            settings=SessionSettings(),
            clock=self.clock,
        )

    def start(self, address: str) -> Coordinator:
        coordinator = make_coordinator(self.network, address, {"worker": 1}, store=self.store, tick_s=None)
        self.events = handled_events(coordinator._state)
        return coordinator

    def beat(self) -> None:
        self.beats += 1
        self.driver.tell(Heartbeat(WORKER0))


@pytest.fixture
def driven() -> Iterator[Driven]:
    made = Driven()
    yield made
    made.driver.close("the test has ended")
    made.coordinator.close()


def test_a_lost_connection_is_opened_again_when_the_clock_has_passed_the_pause(driven: Driven) -> None:
    driver, address = driven.driver, driven.coordinator.address
    driver.open(SOON_S)
    driver.ask(Join(WORKER0, "here"), SOON_S)
    driven.coordinator.close()
    waiting.until(lambda: bool(driver.outage))
    driven.coordinator = driven.start(address)
    answer = driver.start(GetStatus())
    driven.clock.advance(0.01)
    assert "there is no connection to it since 0.0 s" in driver.outage
    driven.clock.advance(0.1)
    assert isinstance(answer.result(SOON_S), Status)
    assert not driver.outage


def test_heartbeats_begin_with_the_join_and_end_with_the_session(driven: Driven) -> None:
    driven.driver.open(SOON_S)
    driven.clock.advance(5.0)
    assert driven.beats == 0
    driven.driver.ask(Join(WORKER0, "here"), SOON_S)
    driven.clock.advance(3.5)
    assert driven.beats == 3
    driven.driver.close("done")
    driven.clock.advance(5.0)
    assert driven.beats == 3
    assert driven.clock.is_closed


def test_a_cancelled_request_is_withdrawn(driven: Driven) -> None:
    answer = driven.driver.start(GetStatus())
    assert answer.cancel()
    driven.driver.open(SOON_S)
    driven.driver.ask(GetHealth(WORKER0), SOON_S)
    assert [event.message for event in driven.events if isinstance(event, Asked)] == [GetHealth(WORKER0)]
    with pytest.raises(CancelledError):
        answer.result(0.0)
