"""Sidecar processes of a worker whose scheduler starts workers only: the coordinator and task servers.

Invariants:
- they end when this process does, however it ends;
- a process that ends cleanly keeps them running while other workers are in the cluster, or (for up to `LATECOMERS_S`)
  expected to join;
- the end of one of them is reported immediately.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import suppress

from dflow.distributed.client.coordinator_client import CoordinatorClient
from dflow.distributed.detection.cluster_spec import COORDINATOR, STOCK_JOB, ClusterSpec, SecuritySource
from dflow.distributed.launching.task_programs import ThisMachine, coordinator_program, stock_program
from dflow.distributed.process.child_process import ChildProcess, describe_end
from dflow.distributed.process.parent_watch import wait_until_ended
from dflow.distributed.transport.addresses import TcpAddress, parse_address
from dflow.distributed.transport.base import Transport
from dflow.distributed.wire.messages.status import GetStatus, Status
from dflow.tracing.devices.task_name import short_task_name, split_task_name
from dflow.tracing.errors import DflowError

LATECOMERS_S = 60.0
GRACE_S = 5.0
_POLL_S = 0.5
_ANSWER_S = 5.0


class Sidecars:
    """The sidecar processes in `spec.starts`, started by construction; their output goes to stderr.

    raises   OSError when one cannot be started
    """

    def __init__(self, spec: ClusterSpec) -> None:
        self._spec = spec
        self._machine = ThisMachine()
        self._closing = threading.Event()
        self._children: dict[str, ChildProcess] = {}
        self._client: CoordinatorClient | None = None
        for task in spec.starts:
            self._start(task)

    def stay_in_touch(self, transport: Transport) -> None:
        """Connect to the coordinator, which runs by now, in order to query it when this process ends.

        Connecting at the end fails: it starts threads, which an ending interpreter refuses from Python 3.12 on.
        raises  what `CoordinatorClient` raises
        """
        name = self._spec.task
        self._client = CoordinatorClient(transport, self._spec.coordinator, name=name, timeout_s=_ANSWER_S)

    def wait_until_unneeded(self) -> None:
        """Wait while other workers are in the cluster, or for `LATECOMERS_S` are expected; tell stderr once.

        Returns if the coordinator does not answer, and does nothing without `stay_in_touch` before.
        """
        if self._client is None:
            return
        has_said = False
        deadline = time.monotonic() + LATECOMERS_S
        with suppress(DflowError):
            while waiting := list(self._users(self._client.ask(GetStatus(), _ANSWER_S), time.monotonic() < deadline)):
                if not has_said:
                    sidecars, others = (map(short_task_name, tasks) for tasks in (self._spec.starts, waiting))
                    finished = short_task_name(self._spec.task)
                    _show(f"dflow: {finished} has finished; {' and '.join(sidecars)} stay up for {', '.join(others)}")
                has_said = True
                time.sleep(_POLL_S)
        self._client.close()

    def close(self) -> None:
        """End the sidecar processes one by one, task servers first, by SIGINT, and after `GRACE_S` by SIGKILL."""
        self._closing.set()
        for task in reversed(self._spec.starts):
            child = self._children[task]
            child.terminate()
            deadline = time.monotonic() + GRACE_S
            while child.poll() is None and time.monotonic() < deadline:
                time.sleep(_POLL_S / 10)
            child.kill()
        self._machine.close()

    def _users(self, status: Status, latecomers: bool) -> Iterator[str]:
        live = {info.task for info in status.tasks if info.left_at_s is None}
        for task in sorted(live | ({*status.expected} if latecomers else set()), key=split_task_name):
            if split_task_name(task)[0] != STOCK_JOB and task != self._spec.task:
                yield task

    def _start(self, task: str) -> None:
        name, spec, proofs = short_task_name(task), self._spec, _proofs(self._spec.security)
        if task == COORDINATOR:
            program = coordinator_program(spec.jobs, _listening(spec.coordinator), proofs, {})
        else:
            program = stock_program(task, ("--coordinator", spec.coordinator, *proofs), {})
        child = self._machine.start(program, lambda line: _show(f"[{name}] {line}"))
        self._children[task] = child
        threading.Thread(target=self._watch, args=(name, child), name=f"dflow watch {name}", daemon=True).start()

    def _watch(self, name: str, child: ChildProcess) -> None:
        with suppress(ProcessLookupError):
            wait_until_ended(child.pid)
        if not self._closing.is_set():
            how = describe_end(child.poll() or 0)
            _show(f"dflow: {name}, which this process started, has ended ({how}); processes that need it will fail")


def _listening(coordinator: str) -> str:
    """Return the address for the coordinator to listen at: all addresses of this host, unless it is a loopback address.

    The host's name may resolve to an address that only this host can use, so the coordinator does not listen there.
    """
    address = parse_address(coordinator)
    if isinstance(address, TcpAddress) and not address.is_loopback:
        return str(TcpAddress("::" if ":" in address.host else "0.0.0.0", address.port))
    return coordinator


def _proofs(security: SecuritySource) -> Collection[str]:
    if security.certificates:
        return ("--certificates", str(security.certificates))
    return ("--secret-file", str(security.secret_file)) if security.secret_file else ()


def _show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
