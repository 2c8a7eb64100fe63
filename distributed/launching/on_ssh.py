"""Hosts reached by the system's ssh as a target of a launch: one connection for each process of a task.

ssh starts `ssh_task` on the host, which runs the program. The coordinator runs on the launcher's machine, where its
state is; a task that is started again runs on the same host.

Invariants:
- what a task is to do, its environment and its credentials go through the connection, never on a command line;
- the launcher holds the write end of the input of each ssh. When the launcher ends, even by SIGKILL, the input ends on
  the host too, and `ssh_task` ends the program.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import msgspec

from dflow.distributed.detection.cluster_spec import COORDINATOR
from dflow.distributed.detection.this_host import own_host
from dflow.distributed.launching.ssh_hosts import HostPart, SshHost
from dflow.distributed.launching.ssh_task import ENDED, STARTED, TERMINATE, RemoteStart
from dflow.distributed.launching.task_programs import TaskProgram, ThisMachine
from dflow.distributed.process.child_process import ChildProcess, Running
from dflow.distributed.transport.addresses import TcpAddress
from dflow.distributed.transport.loopback import LOOPBACK
from dflow.distributed.transport.security.configuration import CERTIFICATE_VARIABLES, SECRET_VARIABLE
from dflow.distributed.transport.security.private_files import read_private
from dflow.distributed.wire.messages.basic import PROTOCOL_VERSION
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.environment import read
from dflow.tracing.errors import ConfigError

#: No questions, no terminal, nothing forwarded, no connection that outlives its task; a dead host is noticed in 15 s.
_OPTIONS = (
    "-T -a -x -oBatchMode=yes -oClearAllForwardings=yes -oControlMaster=no -oConnectTimeout=10 "
    "-oServerAliveInterval=5 -oServerAliveCountMax=3"
)
#: Most connections to one host that are not open yet. From 10 on, sshd refuses some of them.
_OPENING = 8
_OPENING_S = 15.0
_POLL_S = 0.02
#: Longest wait for ssh to print its configuration, in s: it may run commands of the user's, as for `Match exec`.
_CONFIGURATION_S = 15.0
#: Longest wait for a program to be gone, in s, before its ssh is killed.
_END_S = 3.0
#: Variables that name files which others may read.
_PUBLIC = (CERTIFICATE_VARIABLES[0], CERTIFICATE_VARIABLES[2])
#: Exit status of ssh when ssh itself fails, as for a host that it does not reach.
_SSH_FAILED = 255
#: Exit status of a program whose host or connection is gone: that of a killed process.
_GONE = -9


class OnSsh:
    """Starts programs on hosts by ssh, in `directory`, with the interpreter `python`.

    `parts`       the host and the share of each task, by full name
    `ssh`         the command, with options that precede all others
    `is_secured`  whether tasks have certificates or a secret, and so may connect over the network
    raises        ConfigError for a host that is not this machine without certificates or a secret; or when the command
                  cannot be run, or does not print the configuration of a host
    """

    def __init__(
        self, parts: Mapping[str, HostPart], ssh: Sequence[str], python: str, directory: str, *, is_secured: bool
    ) -> None:
        self._parts, self._ssh = parts, ssh
        self._words = f"cd {shlex.quote(directory)} && exec {shlex.quote(python)} -P -m {RemoteStart.__module__}"
        self._opening: dict[SshHost, list[_OverSsh]] = {part.host: [] for part in parts.values()}
        names = [self._network_name(host) for host in self._opening]
        away = [name for name in names if not (name == "localhost" or TcpAddress(name, 0).is_loopback)]
        if away and not is_secured:
            raise ConfigError(
                f"{away[0]} is another machine, and tasks connect to other machines only with certificates or a secret",
                "make a secret by `dflow certs secret FILE` and give --secret-file FILE; see docs/security.md",
            )
        #: The host at which the coordinator listens.
        self.address = read("DFLOW_ADDRESS") or (own_host(f"{away[0]}:0") if away else LOOPBACK)
        self._here = ThisMachine()
        #: Ends the coordinator, if it still runs.
        self.close = self._here.close

    def start(self, program: TaskProgram, on_line: Callable[[str], None]) -> Running:
        """Start a program; see `LaunchTarget.start`. The coordinator is started on this machine.

        Waits up to `_OPENING_S` while many connections to the host are not open yet.
        """
        if program.task == COORDINATOR:
            environment = {"DFLOW_ADDRESS": self.address, **program.environment}
            return self._here.start(replace(program, environment=environment), on_line)
        part = self._parts[program.task]
        host, opening = part.host, self._opening[part.host]
        deadline = time.monotonic() + _OPENING_S
        while len(opening) >= _OPENING and time.monotonic() < deadline:
            opening[:] = [each for each in opening if not each.has_started and each.poll() is None]
            time.sleep(_POLL_S)
        started = _OverSsh(program.task, host.name, self._command(host), _order(program, part), on_line)
        opening.append(started)
        return started

    def _command(self, host: SshHost) -> list[str]:
        user = ["-l", host.user] if host.user else []
        port = ["-p", str(host.port)] if host.port else []
        return [*self._ssh, *_OPTIONS.split(), *user, *port, "--", host.name, self._words]

    def _network_name(self, host: SshHost) -> str:
        """Return the name that ssh connects to, by its configuration. Raises ConfigError if ssh does not print it."""
        try:
            done = subprocess.run(
                [*self._ssh, "-G", host.name], capture_output=True, text=True, check=False, timeout=_CONFIGURATION_S
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"--on ssh: {shlex.join(self._ssh)} -G {host.name}: expected the host's configuration within "
                f"{_CONFIGURATION_S:g} s, got no end",
                "run this command, and see which line of the configuration of ssh waits",
            ) from error
        except OSError as error:
            raise ConfigError(
                f"--on ssh: {self._ssh[0]} cannot be run: {error.strerror}", "install ssh, or give --ssh COMMAND"
            ) from error
        if done.returncode:
            raise ConfigError(f"--on ssh: {shlex.join(self._ssh)} refuses {host.name}: {done.stderr.strip()}")
        found = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
        if not found.get("hostname"):
            raise ConfigError(
                f"--on ssh: {shlex.join(self._ssh)} -G {host.name}: expected a line hostname, got none",
                "give --ssh the command of OpenSSH",
            )
        return found["hostname"]


def _order(program: TaskProgram, part: HostPart) -> bytes:
    files = {}
    for name in (*CERTIFICATE_VARIABLES, SECRET_VARIABLE):
        path = program.environment.get(name, read(name))
        if path:
            files[name] = Path(path).read_bytes() if name in _PUBLIC else read_private(Path(path))
    return msgspec.json.encode(RemoteStart(PROTOCOL_VERSION, program, files, part.index, part.count)) + b"\n"


class _OverSsh(Running):
    """The launcher's handle of a program on a host."""

    def __init__(
        self, task: str, host: str, command: Sequence[str], order: bytes, on_line: Callable[[str], None]
    ) -> None:
        super().__init__(on_line)
        self._host = host
        self._ended: int | None = None
        self._status: int | None = None
        #: Whether the program has been started.
        self.has_started = False
        #: Orders for `ssh_task`; None closes its input.
        self._orders: SimpleQueue[bytes | None] = SimpleQueue()
        self._orders.put(order)
        stdin, write_end = os.pipe()
        try:
            self._ssh = ChildProcess(short_task_name(task), command, os.environ, stdin, self._take, stdin=stdin)
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(stdin)
        # A thread, since ssh does not read before it is connected, and the launcher must not wait for that.
        threading.Thread(target=self._write, args=(write_end,), name=f"dflow ssh input {task}", daemon=True).start()

    def poll(self) -> int | None:
        """See `Running`. Shows the cause if the connection failed."""
        if self._status is None and (status := self._ssh.poll()) is not None:
            self._orders.put(None)
            self._status = self._outcome(status)
        return self._status

    def terminate(self) -> None:
        self._orders.put(TERMINATE)

    def kill(self) -> None:
        """End the program and the processes that it started, and wait until they are gone, at most `_END_S`."""
        self._orders.put(None)
        deadline = time.monotonic() + _END_S
        while self._ssh.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._ssh.kill()

    def _outcome(self, status: int) -> int:
        if self._ended is not None:
            return self._ended
        if self.has_started:
            self._show(f"dflow: the connection to {self._host} has ended before the task")
            return _GONE
        if status == _SSH_FAILED:
            self._show(f"dflow: {self._host} was not reached; try: ssh -o BatchMode=yes {self._host} true")
        else:
            self._show(
                f"dflow: {self._host} could not start the task: give --python an interpreter of that host that has "
                "dflow, and --directory a folder there"
            )
        return status or 1

    def _write(self, write_end: int) -> None:
        with suppress(OSError), open(write_end, "wb", buffering=0) as pipe:  # the error: ssh has ended
            while (order := self._orders.get()) is not None:
                while order:
                    order = order[pipe.write(order) :]

    def _take(self, line: str) -> None:
        if line == STARTED:
            self.has_started = True
        elif line.startswith(ENDED):
            self._ended = int(line.removeprefix(ENDED))
        else:
            self._show(line)
