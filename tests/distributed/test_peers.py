from __future__ import annotations

import pytest

from dflow.distributed.peers import Peers
from dflow.distributed.transport.base import Handler, Peer
from dflow.distributed.transport.memory import MemoryNetwork
from dflow.tracing.errors import TaskLost
from tests.distributed.transports import DEADLINE_S, Recorder

PS0 = "/job:ps/task:0"


def test_whoever_answers_at_a_tasks_address_is_that_task_or_not_spoken_to() -> None:
    network, other = MemoryNetwork(), Recorder()
    listener = network.listen("", name="/job:ps/task:1", handler=other)
    peers = Peers(network, name="/job:worker/task:0", handler=Recorder(), connect_timeout_s=DEADLINE_S)
    peers.set_addresses({"/job:ps/task:0": listener.address, "/job:ps/task:1": listener.address})
    with pytest.raises(TaskLost, match="/job:ps/task:0 is not at memory:1 any more, where /job:ps/task:1 answers"):
        peers.get("/job:ps/task:0")
    assert other.closed.get(timeout=DEADLINE_S)
    assert peers.get("/job:ps/task:1").name == "/job:ps/task:1"
    peers.close()
    listener.close()


def test_a_connection_to_a_task_that_leaves_while_it_is_made_is_not_kept() -> None:
    network, other, made = MemoryNetwork(), Recorder(), list[Peer]()
    listener = network.listen("", name=PS0, handler=other)

    class Leaving:
        listen = staticmethod(network.listen)

        def connect(self, address: str, *, name: str, handler: Handler, who: str, timeout_s: float) -> Peer:
            made.append(network.connect(address, name=name, handler=handler, who=who, timeout_s=timeout_s))
            peers.set_addresses({})
            return made[-1]

    peers = Peers(Leaving(), name="/job:worker/task:0", handler=Recorder(), connect_timeout_s=DEADLINE_S)
    peers.set_addresses({PS0: listener.address})
    with pytest.raises(TaskLost, match="/job:ps/task:0 at memory:1 has left or moved while a connection to it was"):
        peers.get(PS0)
    assert made[0].closed
    listener.close()


def test_after_close_nobody_is_missing_but_this_task_itself() -> None:
    peers = Peers(MemoryNetwork(), name="/job:worker/task:0", handler=Recorder(), connect_timeout_s=DEADLINE_S)
    peers.set_addresses({PS0: "memory:1"})
    peers.close()
    with pytest.raises(TaskLost, match="worker/task:0 has left the cluster, since close was called") as caught:
        peers.get(PS0)
    assert f"at {__file__}:" in str(caught.value)
    assert "dflow.connect()" in str(caught.value)
