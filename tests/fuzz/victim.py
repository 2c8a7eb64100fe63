"""The task that is fuzzed: `python -m tests.fuzz.victim ADDRESS` prints where it listens, and serves until killed."""

from __future__ import annotations

import faulthandler
import logging
import signal
import sys

from dflow.distributed.task_server import TaskServer, TaskSettings
from dflow.distributed.transport.base import Limits
from dflow.distributed.transport.sockets import SocketTransport
from tests.fuzz.scripts import TASK

LIMITS = Limits(max_payload_bytes=1 << 20, hello_timeout_s=2.0, stall_timeout_s=2.0)


def main() -> None:
    """Serve."""
    faulthandler.enable()
    logging.getLogger("dflow").setLevel(logging.CRITICAL)
    settings = TaskSettings(wait_timeout_s=2.0, connect_timeout_s=1.0)
    server = TaskServer(TASK, SocketTransport(LIMITS), address=sys.argv[1], settings=settings)
    print(f"listening on {server.address}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
