"""What a worker's process runs beside itself where a scheduler starts workers alone: the coordinator, stock tasks.

Invariants:
- they end when this process does, however that ends;
- a process that ends well keeps them running until no other worker needs them: none is in the cluster, and none that is
  expected has yet to come (for that it waits `LATECOMERS_S`);
- the end of one of them is said at once.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress

from dflow.distributed.child_process import ChildProcess, describe_end
from dflow.distributed.coordinator_client import CoordinatorClient
from dflow.distributed.detection.cluster_spec import COORDINATOR, STOCK_JOB, ClusterSpec, SecuritySource
from dflow.distributed.launching.own_programs import coordinator_program, stock_program
from dflow.distributed.launching.place import TaskProgram
from dflow.distributed.launching.this_machine import ThisMachine
from dflow.distributed.messages import Status
from dflow.distributed.transport.addresses import TcpAddress, parse_address
from dflow.distributed.transport.base import Transport
from dflow.tracing.errors import DflowError
from dflow.tracing.task_name import short_task_name, split_task_name

LATECOMERS_S = 60.0
GRACE_S = 5.0
_POLL_S = 0.5
_ANSWER_S = 5.0


class Attendants:
    """The children that `spec` says this process has to start, started.

    `show`   takes lines of their output, and what happens to them, from any thread
    raises   OSError when one cannot be started
    """

    def __init__(self, spec: ClusterSpec, show: Callable[[str], None] | None = None) -> None:
        self._spec = spec
        self._show = show or _to_stderr
        self._place = ThisMachine()
        self._closing = threading.Event()
        self._children: dict[str, ChildProcess] = {}
        self._client: CoordinatorClient | None = None
        for task in spec.starts:
            self._start(task)

    def stay_in_touch(self, transport: Transport) -> None:
        """Connect to the coordinator, which runs by now, so as to ask it when this process ends.

        Then it would be too late: a connection has threads, and an interpreter that ends starts none from 3.12 on.
        raises  what `CoordinatorClient` raises
        """
        name = self._spec.task
        self._client = CoordinatorClient(transport, self._spec.coordinator, name=name, timeout_s=_ANSWER_S)

    def wait_until_unneeded(self) -> None:
        """Wait while other workers use them; not at all when the coordinator does not answer."""
        if self._client is None:
            return
        has_said = False
        deadline = time.monotonic() + LATECOMERS_S
        with suppress(DflowError):
            while waiting := list(self._users(self._client.status(timeout_s=_ANSWER_S), time.monotonic() < deadline)):
                if not has_said:
                    self._show(
                        f"dflow: {short_task_name(self._spec.task)} has finished; {self._names()} stay up for "
                        f"{', '.join(map(short_task_name, waiting))}"
                    )
                has_said = True
                time.sleep(_POLL_S)
        self._client.close()

    def close(self) -> None:
        """End them: stock tasks first, by SIGTERM, and by SIGKILL what takes longer than `GRACE_S`."""
        self._closing.set()
        for task in reversed(self._spec.starts):
            child = self._children[task]
            child.terminate()
            deadline = time.monotonic() + GRACE_S
            while child.poll() is None and time.monotonic() < deadline:
                time.sleep(_POLL_S / 10)
            child.kill()
        self._place.close()

    def _users(self, status: Status, latecomers: bool) -> Iterator[str]:
        live = {info.task for info in status.tasks if info.left_at_s is None}
        for task in sorted(live | ({*status.expected} if latecomers else set()), key=split_task_name):
            if split_task_name(task)[0] != STOCK_JOB and task != self._spec.task:
                yield task

    def _names(self) -> str:
        return " and ".join(map(short_task_name, self._spec.starts))

    def _start(self, task: str) -> None:
        name = short_task_name(task)
        child = self._place.start(_program(self._spec, task), lambda line: self._show(f"[{name}] {line}"))
        self._children[task] = child
        threading.Thread(target=self._watch, args=(name, child), name=f"dflow watch {name}", daemon=True).start()

    def _watch(self, name: str, child: ChildProcess) -> None:
        with suppress(ProcessLookupError), os.fdopen(os.pidfd_open(child.pid)) as ended:
            poll = select.poll()  # unlike select, it takes files of any number
            poll.register(ended, select.POLLIN)
            poll.poll()
        if not self._closing.is_set():
            how = describe_end(child.poll() or 0)
            self._show(f"dflow: {name}, which this process started, has ended ({how}); those that need it will fail")


def _program(spec: ClusterSpec, task: str) -> TaskProgram:
    proofs = _proofs(spec.security)
    if task == COORDINATOR:
        return coordinator_program(spec.jobs, _listening(spec.coordinator), proofs, {})
    return stock_program(task, ("--coordinator", spec.coordinator, *proofs), {})


def _listening(coordinator: str) -> str:
    """On every address of this host, as its own name may stand for one that only it can use."""
    address = parse_address(coordinator)
    if isinstance(address, TcpAddress) and not address.is_loopback:
        return str(TcpAddress("::" if ":" in address.host else "0.0.0.0", address.port))
    return coordinator


def _proofs(security: SecuritySource) -> Collection[str]:
    if security.certificates:
        return ("--certificates", str(security.certificates))
    return ("--secret-file", str(security.secret_file)) if security.secret_file else ()


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
