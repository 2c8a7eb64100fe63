"""Several tasks that know each other, over a transport, and clients of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dflow.distributed.task.task_server import TaskServer, TaskSettings
from dflow.distributed.task_role import TASK_PARTS
from dflow.distributed.transport.base import Peer, Reply, Transport
from dflow.distributed.wire.codec import decode_arrays, encode_array
from dflow.distributed.wire.messages.basic import ArrayInfo, Arrays, Introduce
from dflow.distributed.wire.messages.message import Message
from dflow.distributed.wire.messages.roster import Roster, TaskInfo
from dflow.distributed.wire.messages.variables import CreateVariable, CreateVariables, ReadVariables, VariablesCreated
from tests.distributed.transports import DEADLINE_S, Kind, Recorder, reach

PS, WORKER, OTHER = "/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1"
#: A task that starts steps and runs no partition of them.
CLIENT = "/job:chief/task:0"
CLIENTS = (CLIENT, *(f"/job:client/task:{number}" for number in range(8)))
ONES = np.ones(3, np.float32)


def roster(*servers: TaskServer, left: dict[str, str] | None = None) -> Roster:
    """A roster with all of `servers` live, and each of `left` gone for the given reason."""
    live = tuple(TaskInfo(server.name, server.address, 0.0) for server in servers)
    live += tuple(TaskInfo(task, "nowhere", 0.0) for task in CLIENTS if task not in (left or {}))
    gone = tuple(TaskInfo(task, "", 0.0, 1.0, why) for task, why in (left or {}).items())
    return Roster(live + gone, ())


class Cluster:
    """Several tasks that know each other, and a client of each."""

    def __init__(self, kind: Kind, settings: TaskSettings) -> None:
        self.transport: Transport = kind.make(None)
        self.tasks = {
            name: TaskServer(name, self.transport, TASK_PARTS, address=kind.free, settings=settings)
            for name in (PS, WORKER, OTHER)
        }
        for server in self.tasks.values():
            server.roster_changed(roster(*self.tasks.values()))
        self.ps, self.worker, self.other = (self.tasks[name] for name in (PS, WORKER, OTHER))
        self.client = self.reach_ps(CLIENT)

    def reach_ps(self, name: str) -> Peer:
        """A connection of a member to the parameter server."""
        peer = reach(self.transport, self.ps.address, Recorder(), name=name)
        peer.start(Introduce(0))
        return peer

    def ask(self, message: Message, payload: bytes | memoryview = b"") -> Reply:
        """Send a request to the parameter server."""
        return self.client.call(message, payload, timeout_s=DEADLINE_S)

    def close(self) -> None:
        for server in self.tasks.values():
            server.close()


MakeCluster = Callable[..., Cluster]


def creation(value: np.ndarray[Any, Any], name: str = "w") -> CreateVariables:
    dtype = value.dtype.name
    variable = CreateVariable(name, dtype, value.shape, arrays=1)
    return CreateVariables((variable,), (ArrayInfo(dtype, value.shape),))


def create(cluster: Cluster, name: str = "w", value: np.ndarray[Any, Any] = ONES) -> None:
    assert cluster.ask(creation(value, name), encode_array(value)).message == VariablesCreated()


def read(cluster: Cluster, name: str = "w") -> list[float]:
    message, payload = cluster.ask(ReadVariables((name,)))
    assert isinstance(message, Arrays)
    values: list[float] = decode_arrays(message.arrays, payload)[0].tolist()
    return values
