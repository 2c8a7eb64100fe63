"""Send scripts to a task in another process, and check that it is unaffected.

A task is affected when it ends, when it does not close a connection that has ended, when it stops serving a
well-behaved client, or when its memory, threads or file descriptors grow without bound.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from dflow.distributed.transport.addresses import TcpAddress, UnixAddress, parse_address
from dflow.distributed.transport.base import Handler
from dflow.distributed.transport.sockets import SocketTransport
from dflow.distributed.wire.messages.basic import ArrayInfo, Arrays, Introduce
from dflow.distributed.wire.messages.status import GetStatus, Status
from dflow.distributed.wire.messages.variables import CreateVariable, CreateVariables, ReadVariables
from tests.fuzz.scripts import TASK, WORKERS, Script, script

ROOT = Path(__file__).resolve().parents[2]
#: A connection that the task has not closed after this time hangs.
HANG_S = 60.0
CLIENTS = 4
#: Number of connections between two checks of the number of sent frames.
BATCH = 40
HEALTH = "of a well-behaved client"


@dataclass(frozen=True)
class Usage:
    """Resources of a process."""

    memory_mib: float
    threads: int
    descriptors: int
    #: Plans with their compiled programs, which a task keeps.
    plans: int = 0

    def __str__(self) -> str:
        held = f"{self.memory_mib:.0f} MiB, {self.threads} threads, {self.descriptors} descriptors"
        return f"{held}, {self.plans} plans" if self.plans else held


@dataclass
class Tally:
    """Number of sent frames; `began` and `now` are the task's resources after the first round and after the last."""

    frames: int = 0
    connections: int = 0
    sent_bytes: int = 0
    usages: list[Usage] = field(default_factory=list)


class Victim:
    """The attacked process; killed at the end of the `with` block."""

    def __init__(self, address: str, role: str = "task") -> None:
        self._role = role
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DFLOW_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.victim", role, address],
            cwd=ROOT,
            env=environment | {"JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,  # ends with this process, however this process ends
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("listening on "), self.end()
        self.address = line.removeprefix("listening on ").strip()
        self._errors = ThreadPoolExecutor(1)
        self._said = self._errors.submit(self._last_lines)

    def __enter__(self) -> Victim:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> str:
        """Kill the process; return the end of its output."""
        self.process.kill()
        self.process.wait()
        said = self._said.result(HANG_S) if hasattr(self, "_said") else ""
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        return said

    def usage(self) -> Usage:
        """Current resources of the process."""
        folder = Path(f"/proc/{self.process.pid}")
        status = (folder / "status").read_text()
        numbers = {key: int(value) for key, value in re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, re.MULTILINE)}
        descriptors = len(list((folder / "fd").iterdir()))
        return Usage(numbers["VmRSS"] / 1024, numbers["Threads"], descriptors, self._plans())

    def _plans(self) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def check(self) -> None:
        """Make a valid request; raises when the task does not answer it correctly."""
        assert self.process.poll() is None, f"the task ended with status {self.process.poll()}:\n{self.end()}"
        peer = SocketTransport().connect(
            self.address, name=WORKERS[0], handler=Handler(), who="the task", timeout_s=HANG_S
        )
        try:
            if self._role == "coordinator":
                status, _ = peer.call(GetStatus(), timeout_s=HANG_S)
                assert isinstance(status, Status), f"the coordinator answered {status}"
                return
            peer.call(Introduce(0), timeout_s=HANG_S)
            variables = (CreateVariable(HEALTH, "float32", (2,), arrays=1),)
            peer.call(CreateVariables(variables, (ArrayInfo("float32", (2,)),)), bytes(8), timeout_s=HANG_S)
            reply, payload = peer.call(ReadVariables((HEALTH,)), timeout_s=HANG_S)
            assert (reply, payload) == (Arrays((ArrayInfo("float32", (2,)),)), bytes(8)), f"{TASK} answered {reply}"
        finally:
            peer.close()

    def _last_lines(self) -> str:
        """Read the output continuously, so that the process never blocks on it; keep the last lines."""
        kept: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            kept = [*kept[-200:], line[:2000]]
        return "".join(kept)


def send_script(address: str, script: Script) -> None:
    """Send the script until the task closes the connection; raises TimeoutError if it does not."""
    with dialled(address) as sock:
        sock.settimeout(HANG_S)
        with contextlib.suppress(ConnectionError):
            sock.setblocking(False)
            _send_while_reading(sock, script.data)
            sock.settimeout(HANG_S)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass


def _send_while_reading(sock: socket.socket, data: bytes) -> None:
    """Send and receive concurrently, so that neither side blocks the other."""
    rest = memoryview(data)
    deadline = time.monotonic() + HANG_S
    while rest:
        with contextlib.suppress(BlockingIOError):
            rest = rest[sock.send(rest) :]
            continue
        with contextlib.suppress(BlockingIOError):
            if not sock.recv(1 << 16):
                return
        if time.monotonic() > deadline:
            raise TimeoutError(f"the task left {len(rest)} bytes unread for {HANG_S:g} s")


@contextlib.contextmanager
def dialled(address: str) -> Iterator[socket.socket]:
    """A plain connection; reset at the end, since closed ones would use up the ports of this machine."""
    place = parse_address(address)
    if isinstance(place, UnixAddress):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(place.path)
    else:
        assert isinstance(place, TcpAddress)
        sock = socket.create_connection((place.host, place.port))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    with sock:
        yield sock


def besiege(victim: Victim, seed: int, frames: int, tally: Tally) -> None:
    """Send `frames` frames of the scripts that `seed` gives; raises at the first sign that the task is affected."""
    rng = random.Random(seed)
    wanted = tally.frames + frames
    with ThreadPoolExecutor(CLIENTS) as clients:
        while tally.frames < wanted:
            scripts = [script(rng) for _ in range(BATCH)]
            list(clients.map(lambda one: send_script(victim.address, one), scripts))
            tally.frames += sum(one.frames for one in scripts)
            tally.connections += len(scripts)
            tally.sent_bytes += sum(len(one.data) for one in scripts)
    victim.check()
    tally.usages.append(victim.usage())
