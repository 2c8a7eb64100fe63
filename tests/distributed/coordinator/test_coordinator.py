"""The coordinator's shell and client over both transports; test_coordinator_state.py tests the decisions."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from dflow.distributed.asynchronous.worker_claims import claimed
from dflow.distributed.client.coordinator_client import CoordinatorClient
from dflow.distributed.client.coordinator_session import SessionSettings
from dflow.distributed.coordinator.coordinator_events import Told
from dflow.distributed.coordinator.coordinator_store import MemoryStore
from dflow.distributed.coordinator.task_totals import EDGES_TOLD
from dflow.distributed.coordinator_role import make_coordinator
from dflow.distributed.training.work_messages import ClaimSteps
from dflow.distributed.transport.base import Handler, Peer, Transport
from dflow.distributed.transport.memory import MemoryNetwork
from dflow.distributed.transport.sockets import SocketTransport
from dflow.distributed.wire.messages.message import Message
from dflow.distributed.wire.messages.roster import EdgeTraffic, Heartbeat, Roster
from dflow.distributed.wire.messages.status import GetStatus
from dflow.tracing.errors import DeadlineExceeded, InternalError, SecurityError, TaskLost, TransportClosed
from tests.distributed import waiting
from tests.distributed.coordinator.handled_events import handled_events
from tests.manual_clock import ManualClock

PS0, WORKER0, WORKER1 = "/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1"
SOON_S = 20.0


class Cluster:
    """A coordinator on a manual clock, and the connections to it."""

    def __init__(self, transport: Transport, address: str) -> None:
        self.now_s = 100.0
        self.transport = transport
        self.clients: list[CoordinatorClient] = []
        self.store = MemoryStore()
        self.start(address)

    def start(self, address: str, store: MemoryStore | None = None) -> None:
        self.coordinator = make_coordinator(
            self.transport,
            address,
            {"ps": 1, "worker": 2},
            store=store or self.store,
            tick_s=None,
            clock=lambda: self.now_s,
        )
        self.events = handled_events(self.coordinator._state)

    def client(self, name: str = "tool", give_up_s: float = 600.0, heartbeat_s: float = 1.0) -> CoordinatorClient:
        settings = SessionSettings(longest_pause_s=0.05, give_up_s=give_up_s, heartbeat_s=heartbeat_s)
        address = self.coordinator.address
        client = CoordinatorClient(self.transport, address, name=name, timeout_s=SOON_S, settings=settings)
        self.clients.append(client)
        return client

    def task(self, task: str, give_up_s: float = 600.0) -> CoordinatorClient:
        client = self.client(task, give_up_s)
        client.join(task, f"at {task}")
        return client

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.coordinator.close()


@pytest.fixture(params=["memory", "tcp"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    made = Cluster(MemoryNetwork(), "") if request.param == "memory" else Cluster(SocketTransport(), "127.0.0.1:0")
    yield made
    made.close()


def roster_event(client: CoordinatorClient, condition: Callable[[Roster], bool]) -> threading.Event:
    """Event that is set when the client sees a roster that fulfils the condition."""
    event = threading.Event()
    client.session.call_on_roster(lambda roster: event.set() if condition(roster) else None)
    return event


def test_a_wait_names_who_is_missing_and_why(cluster: Cluster) -> None:
    first, second = cluster.task(WORKER0), cluster.task(WORKER1)
    seen = roster_event(first, lambda roster: any(info.left for info in roster.tasks))
    cluster.now_s += 3
    second.leave("had enough")
    assert seen.wait(SOON_S)
    with pytest.raises(DeadlineExceeded, match=r"2 are missing: ps:0, worker:1 \(left at 3.0 s: had enough\)"):
        first.wait_for_tasks([WORKER0, PS0, WORKER1], timeout_s=0.01)


def test_silence_ends_the_connection_of_a_task(cluster: Cluster) -> None:
    client = cluster.task(WORKER0)
    lost: list[str] = []
    gone = threading.Event()
    client.session.call_on_lost(lambda reason: (lost.append(reason), gone.set())[1])
    cluster.now_s += 1000
    cluster.coordinator.tick()
    assert gone.wait(SOON_S)
    assert client.session.ended
    with pytest.raises(TaskLost, match=r"did not take this task back: coordinator: worker:0 left at 1000.0 s"):
        client.ask(GetStatus())
    [task] = cluster.client().ask(GetStatus()).tasks
    assert task.left == "no heartbeat for 10.0 s"
    late: list[str] = []
    client.session.call_on_lost(late.append)
    assert late == lost


def test_a_request_that_only_a_task_may_make_is_refused_before_it_is_sent(cluster: Cluster) -> None:
    with pytest.raises(InternalError, match="join first"):
        cluster.client().ask(ClaimSteps("run", WORKER0, 1))


def test_the_coordinators_end_for_longer_than_is_borne_wakes_those_who_wait(cluster: Cluster) -> None:
    client = cluster.task(WORKER0, give_up_s=0.0)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.wait_for_tasks, [PS0], timeout_s=SOON_S)
        cluster.coordinator.close()
        with pytest.raises(TransportClosed, match=r"coordinator at .* is lost: it could not be reached for 0.0 s"):
            waiting.result(SOON_S)
    client.leave()


def test_a_claim_that_waits_long_says_in_the_waiting_worker_who_holds_the_steps(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    first, clock = cluster.task(WORKER0), ManualClock()
    assert first.ask(ClaimSteps("run", first.task, 1)).steps == range(1)
    second = CoordinatorClient(cluster.transport, cluster.coordinator.address, name=WORKER1, clock=clock)
    cluster.clients.append(second)
    second.join(WORKER1, "h:1")
    with ThreadPoolExecutor() as pool:
        claim = pool.submit(claimed, second, ClaimSteps("run", second.task, 1))

        def is_announced() -> bool:
            clock.advance(100.0)
            return "worker:1 has waited 60 s for steps; of the claimed steps, worker:0 (" in caplog.text

        waiting.until(is_announced)
        assert first.ask(ClaimSteps("run", first.task, 1, done=1)).steps == range(1, 1)
        assert claim.result(SOON_S).steps == range(1, 1)
    assert caplog.text.count("has waited 60 s") == 1


def test_a_question_in_vain_says_since_when_there_is_no_coordinator(cluster: Cluster) -> None:
    client = cluster.task(WORKER0)
    cluster.coordinator.close()
    with pytest.raises(DeadlineExceeded, match=r"did not answer GetStatus of .* there is no connection to it since"):
        client.ask(GetStatus(), 0.5)
    with pytest.raises(DeadlineExceeded, match=r"1 are missing: ps:0; .* there is no connection to it since"):
        client.wait_for_tasks([PS0], timeout_s=0.01)
    assert "there is no connection" in client.session.outage


def test_a_task_is_described_for_errors_about_it(cluster: Cluster) -> None:
    first, second = cluster.task(WORKER0), cluster.client(WORKER1)
    second.join(WORKER1, "here", steps=lambda: 12, doing=lambda: "step 13: waits for edge 'w'")
    first.wait_for_tasks([WORKER1], timeout_s=SOON_S)
    assert first.describe(WORKER1) == "worker:1 (just joined)"
    assert first.describe(PS0) == "ps:0 (has not joined)"
    cluster.now_s += 5.0
    second._beat()
    second.ask(GetStatus())
    cluster.now_s += 2.5
    heard = "worker:1 (last heard 2.5 s ago, 12 steps ended, now at: step 13: waits for edge 'w')"
    assert first.describe(WORKER1) == heard
    second.leave()
    assert first.describe(WORKER1) == "worker:1 (left at 7.5 s: finished)"
    cluster.coordinator.close()
    first.session.call_on_lost(lambda reason: None)
    with pytest.raises(DeadlineExceeded):
        first.ask(GetStatus(), 0.5)
    assert first.describe(WORKER0).startswith("worker:0 (there is no connection to it since")


def beats(cluster: Cluster) -> list[Message]:
    return [event.message for event in cluster.events if isinstance(event, Told)]


def test_traffic_over_more_edges_than_fit_into_a_message_is_told_in_sum(cluster: Cluster) -> None:
    client = cluster.client(WORKER0)
    sent = tuple(EdgeTraffic(f"edge {n} {'x' * 200}", WORKER0, PS0, 1, n) for n in range(10_000))
    client.join(WORKER0, "here", traffic=lambda: sent)
    client.leave()
    status = cluster.client().ask(GetStatus())
    assert status.tasks[0].left == "finished"
    assert status.traffic[0] == sent[-1]
    assert len(status.traffic) == EDGES_TOLD + 1
    assert sum(edge.size_bytes for edge in status.traffic) == sum(edge.size_bytes for edge in sent)
    assert [type(message) for message in beats(cluster)] == [Heartbeat]


def test_a_roster_of_more_than_fits_into_a_message_reaches_all(cluster: Cluster) -> None:
    first = cluster.task(WORKER0)
    for index in range(1, 12):
        cluster.task(f"/job:worker/task:{index}")
    place = "x" * 200_000
    for index in range(8):
        cluster.client(f"/job:big/task:{index}").join(f"/job:big/task:{index}", place)
    cluster.client("/job:big/task:8").join("/job:big/task:8", place)
    first.wait_for_tasks([f"/job:big/task:{index}" for index in range(9)], timeout_s=SOON_S)
    assert len(first.ask(GetStatus()).tasks) == len(first.session.roster.tasks) == 21


def test_no_one_joins_by_the_name_of_another(cluster: Cluster) -> None:
    client = CoordinatorClient(cluster.transport, cluster.coordinator.address, name=WORKER1, timeout_s=SOON_S)
    with pytest.raises(SecurityError, match=f"{WORKER1} asks to join as {WORKER0}; a task joins by its own name"):
        client.join(WORKER0, "here")
    client.close()


def test_a_connection_that_ends_before_the_session_knows_of_it_is_made_again() -> None:
    network, broken = MemoryNetwork(), list[str]()
    coordinator = make_coordinator(network, "", {}, tick_s=None)
    made: list[Peer] = []

    class Watched:
        listen = staticmethod(network.listen)

        def connect(self, address: str, *, name: str, handler: Handler, who: str, timeout_s: float) -> Peer:
            made.append(network.connect(address, name=name, handler=handler, who=who, timeout_s=timeout_s))
            return made[-1]

    class Breaking(ManualClock):
        @property
        def now_s(self) -> float:
            if len(made) == 1 and not broken:  # the clock is read for the time of the connection
                broken.append("immediately")
                made[0].close("it broke")
            return super().now_s

    clock = Breaking()
    client = CoordinatorClient(Watched(), coordinator.address, name="tool", clock=clock)
    with ThreadPoolExecutor() as pool:
        status = pool.submit(client.ask, GetStatus(), SOON_S)
        until(status.done, lambda: clock.advance(0.1))
    assert status.result().tasks == ()
    client.close()
    coordinator.close()


def until(condition: Callable[[], bool], do: Callable[[], None]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition() and time.monotonic() < deadline:
        do()


def test_a_callback_that_fails_does_not_end_the_heartbeats(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    again, times = threading.Event(), itertools.count()

    def steps() -> int:
        if next(times) == 0:
            raise RuntimeError("a callback of ours")
        again.set()
        return 1

    cluster.client(WORKER0, heartbeat_s=0.01).join(WORKER0, "here", steps=steps)
    assert again.wait(SOON_S)
    assert "a callback of ours" in caplog.text


def test_a_call_that_is_interrupted_is_withdrawn(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    client, other = cluster.task(WORKER0), cluster.task(WORKER1)
    assert other.ask(ClaimSteps("run", other.task, 1)).steps == range(1)
    with monkeypatch.context() as patched:
        patched.setattr(Future, "result", lambda future, timeout_s=None: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            client.ask(ClaimSteps("run", client.task, 1))
    assert not client.session._session._asks
