"""One task on a host of `dflow launch --on ssh`: the program that the launcher's ssh runs there.

    python -P -m dflow.distributed.launching.ssh_task

The first line of stdin is a `RemoteStart`. A later line `terminate` asks the program to end; the end of stdin means
that the launcher is gone, or wants the program to be. The lines of the program go to stdout, after the line `STARTED`
and before the line `ENDED` with its exit status.

Invariants:
- the program and all that it started have ended before this process does, and when stdin ends;
- credentials come by stdin, and are kept in memory: they are on no command line and no disk of this host.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from io import FileIO
from pathlib import Path

import msgspec

from dflow.distributed.launching.shares import even_shares
from dflow.distributed.launching.task_programs import TaskProgram, ThisMachine
from dflow.distributed.process.child_process import ChildProcess
from dflow.distributed.process.parent_watch import ORPHANED, wait_until_ended
from dflow.distributed.process.run_folder import RUN_FOLDER_VARIABLE
from dflow.distributed.wire.messages.basic import PROTOCOL_VERSION

STARTED = "dflow task started"
ENDED = "dflow task ended with status "
TERMINATE = b"terminate\n"


class RemoteStart(msgspec.Struct, frozen=True):
    """The order to start a program on this host.

    `version`  version of the launcher's protocol
    `program`  the program; `files` are the contents of files whose paths its environment needs, by variable
    `index`    number of the task among the `count` tasks of this host that run the script; 0 of 0 for a task server
    """

    version: int
    program: TaskProgram
    files: Mapping[str, bytes]
    index: int
    count: int


def main() -> int:
    """Run one task; when its program has ended, end this process with status 0, whatever the program's status.

    Return `ORPHANED` if stdin ends before the first line, 1 if the launcher speaks another version of the protocol.
    """
    # Without a buffer, since a thread that waits in a buffered read would keep the interpreter from ending.
    with FileIO(0) as orders:
        line = orders.readline()
        if not line:
            return ORPHANED
        start = msgspec.json.decode(line, type=RemoteStart)
        if start.version != PROTOCOL_VERSION:
            _show(
                f"this host's dflow speaks protocol version {PROTOCOL_VERSION} and the launcher's version "
                f"{start.version}; install the same version of dflow"
            )
            return 1
        child = _started(start)
        _show(STARTED)
        threading.Thread(target=_obey, args=(orders, child), name="dflow ssh orders", daemon=True).start()
        with suppress(ProcessLookupError):
            wait_until_ended(child.pid)
        status = child.poll()
        _show(f"{ENDED}{status}")
        os._exit(0)  # the other thread still reads `orders`


def _started(start: RemoteStart) -> ChildProcess:
    program = start.program
    environment = {**program.environment, **{name: _in_memory(name, data) for name, data in start.files.items()}}
    if not Path(environment.get(RUN_FOLDER_VARIABLE, "")).is_dir():  # a folder of the launcher's machine
        environment.pop(RUN_FOLDER_VARIABLE, None)
    program = replace(program, environment=environment)
    shares = even_shares({**os.environ, **environment}, start.count) if start.count else []
    machine = ThisMachine({program.task: shares[start.index]} if shares else {})
    child = machine.start(program, _show)
    # As before this host is taken away: a task server has a snapshot made first, a worker ends its step.
    signal.signal(signal.SIGTERM, lambda *_: child.send(signal.SIGTERM))
    return child


def _in_memory(name: str, data: bytes) -> str:
    """Return the path of a new file with these data, for processes of this user, until this process ends."""
    descriptor = os.memfd_create(name)
    os.fchmod(descriptor, 0o600)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _obey(orders: FileIO, child: ChildProcess) -> None:
    for line in orders:
        if line == TERMINATE:
            child.terminate()
    child.kill()
    os._exit(ORPHANED)


def _show(line: str) -> None:
    sys.stdout.buffer.write(line.encode("utf-8", "backslashreplace") + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
