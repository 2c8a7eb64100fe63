"""The attacked process: `python -m tests.fuzz.victim ROLE ADDRESS` prints its address, and serves until its input
ends.

`ROLE` is `task` or `coordinator`. For each line of its input it prints the number of plans that it keeps.
"""

from __future__ import annotations

import faulthandler
import logging
import sys

from dflow.distributed.coordinator.coordinator import Coordinator
from dflow.distributed.coordinator_role import make_coordinator
from dflow.distributed.task.task_server import TaskServer, TaskSettings
from dflow.distributed.task_role import TASK_PARTS
from dflow.distributed.transport.link import Limits
from dflow.distributed.transport.sockets import SocketTransport
from dflow.distributed.wire.messages.roster import Roster, TaskInfo
from tests.fuzz.scripts import TASK, WORKERS

LIMITS = Limits(max_payload_bytes=1 << 20, hello_timeout_s=2.0, stall_timeout_s=2.0, resume_s=0.0)


def main() -> None:
    """Serve."""
    faulthandler.enable()
    logging.getLogger("dflow").setLevel(logging.CRITICAL)
    role, address = sys.argv[1:]
    server: TaskServer | Coordinator
    if role == "task":
        settings = TaskSettings(wait_timeout_s=2.0, connect_timeout_s=1.0, reach_timeout_s=0.0)
        server = TaskServer(TASK, SocketTransport(LIMITS), TASK_PARTS, address=address, settings=settings)
        server.roster_changed(Roster(tuple(TaskInfo(worker, "127.0.0.1:1", 0.0) for worker in WORKERS), ()))
    else:
        server = make_coordinator(SocketTransport(LIMITS), address, {"ps": 1, "worker": 2})
    print(f"listening on {server.address}", flush=True)
    for _ in sys.stdin:
        print(server.statistics().plans if isinstance(server, TaskServer) else 0, flush=True)


if __name__ == "__main__":
    main()
