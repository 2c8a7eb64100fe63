"""A listener in a separate process, and the number of files that this process may open."""

from pathlib import Path

import pytest

from dflow.distributed.transport.base import Handler, Peer
from dflow.distributed.transport.sockets import SocketTransport
from dflow.tracing.errors import DeadlineExceeded
from tests.distributed.processes import DEADLINE_S, Spawned

LISTEN = """
import resource, sys, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))
from dflow.distributed.transport.base import Handler
from dflow.distributed.transport.sockets import SocketTransport
listener = SocketTransport().listen("127.0.0.1:0", name="ps", handler=Handler())
print("listening", resource.getrlimit(resource.RLIMIT_NOFILE)[0], listener.address)
threading.Event().wait()
"""


def listening(most_files: int, folder: Path) -> Spawned:
    return Spawned("-c", LISTEN, str(most_files), cwd=folder)


def test_a_listener_raises_the_limit_of_its_process_as_far_as_it_may(tmp_path: Path) -> None:
    with listening(3000, tmp_path) as process:
        assert process.read_until("listening")[0].split()[1] == "3000"


def test_a_process_that_may_open_few_files_takes_few_connections_and_says_so(tmp_path: Path) -> None:
    transport, peers = SocketTransport(), list[Peer]()
    with listening(64, tmp_path) as process:
        _, files, address = process.read_until("listening")[0].split()
        assert files == "64"
        why = (
            "ps has 32 connections and takes no more, since its process may open only 64 files; raise that limit "
            r"\(ulimit -n\) where it starts$"
        )
        for _ in range(32):
            peers.append(transport.connect(address, name="worker", handler=Handler(), who="ps", timeout_s=DEADLINE_S))
        with pytest.raises(DeadlineExceeded, match=why):
            transport.connect(address, name="worker", handler=Handler(), who="ps", timeout_s=0.5)
        for peer in peers:
            peer.close()
