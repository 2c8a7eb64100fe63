"""A Ray cluster as a place for tasks: each task is an actor, on a node with the resources for it; Ray restarts it.

An actor runs the task's program as a child process. It prints the program's output, which Ray keeps as for any actor,
and passes it on to the launcher. Ray pickles what passes through it, so only strings and numbers do; the tasks connect
to each other directly, as everywhere.

Invariants:
- an actor whose program failed ends itself while Ray may restart it; otherwise it reports the program's exit status;
- an actor keeps each line of output until the launcher acknowledges it, and delays its own end for that by at most
  `_HAND_OVER_S`: the last lines say why the program failed;
- a program ends with its actor, however the actor ends.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from dflow.distributed.launching.place import TaskProgram
from dflow.distributed.launching.ray_resources import amounts_text
from dflow.distributed.launching.this_machine import ThisMachine
from dflow.distributed.process.child_process import TAIL_LINES, ChildProcess, describe_end
from dflow.tracing.devices.task_name import short_task_name, split_task_name
from dflow.tracing.errors import ConfigError

#: Time after which an actor answers a request for lines with none.
_LINES_S = 2.0
_POLL_S = 0.1
#: Longest wait of an actor for the launcher to take its last lines, before it ends itself.
_HAND_OVER_S = 10.0
#: Exit status of a program whose actor is gone without reporting one: that of a killed process.
_GONE = -9
#: Environment variables of the launcher that tasks on other nodes need too.
_HANDED_ON = ("DFLOW_SECRET_FILE", "DFLOW_TLS_CERT", "DFLOW_TLS_KEY", "DFLOW_TLS_CA")


class OnRay:
    """The Ray cluster found by RAY_ADDRESS or Ray's own search, else a new one on this machine.

    `resources`  the resources requested by the tasks of each job
    `restarts`   the number of times that Ray may restart the actors of each job; by default 0
    `is_secured` whether tasks have certificates or a secret, and so may connect over the network
    raises       ConfigError for several nodes without certificates or a secret; errors of `ray.init`
    """

    def __init__(
        self, resources: Mapping[str, Mapping[str, float]], restarts: Mapping[str, int], *, is_secured: bool
    ) -> None:
        self._resources = resources
        self._restarts = restarts
        self._is_secured = is_secured
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            ray.init(log_to_driver=False, configure_logging=False)
        self._nodes = sum(bool(node["Alive"]) for node in ray.nodes())
        if self._nodes > 1 and not is_secured:
            self.close()
            raise ConfigError(
                f"the Ray cluster has {self._nodes} nodes, and tasks speak to other machines only if they can "
                "prove who they are",
                "set DFLOW_SECRET_FILE, or DFLOW_TLS_CERT, DFLOW_TLS_KEY and DFLOW_TLS_CA, to "
                "files that each node has; see docs/security.md",
            )

    def start(self, program: TaskProgram, on_line: Callable[[str], None]) -> _OnActor:
        """Start an actor; see `LaunchPlace.start`."""
        is_coordinator = not program.task.startswith("/")
        job = program.task if is_coordinator else split_task_name(program.task)[0]
        asked = {"CPU": 0.0} if is_coordinator else dict(self._resources[job])
        limit = self._restarts.get(job, 0)
        actor = ray.remote(TaskActor).options(
            name=f"dflow {short_task_name(program.task)} {secrets.token_hex(8)}",
            num_cpus=asked.pop("CPU"),
            num_gpus=asked.pop("GPU", 0.0),
            resources=asked,
            max_restarts=limit,
            max_task_retries=limit,
            max_concurrency=4,
        )
        handed_on = {name: os.environ[name] for name in _HANDED_ON if name in os.environ}
        environment, defaults = {**handed_on, **program.environment}, dict(program.defaults)
        made = actor.remote(
            program.task, program.words, environment, defaults, os.getcwd(), self._is_secured, limit > 0
        )
        return _OnActor(made, on_line)

    def described(self, jobs: Mapping[str, int]) -> str:
        """Describe the cluster's resources, and any that the tasks of `jobs` request beyond these."""
        has = ray.cluster_resources()
        asked: defaultdict[str, float] = defaultdict(float)
        for job, count in jobs.items():
            for name, amount in self._resources[job].items():
                asked[name] += count * amount
        short = {name: amount for name, amount in asked.items() if amount > has.get(name, 0.0)}
        nodes = f"{self._nodes} {'node' if self._nodes == 1 else 'nodes'}"
        cluster = f"on a Ray cluster of {nodes} with {amounts_text(has)}"
        if not short:
            return cluster
        return f"{cluster}; the tasks ask for {amounts_text(short)}: those that do not fit wait until it grows"

    def close(self) -> None:
        """Shut down the connection to Ray, and the cluster if it was started here; nothing if Ray was in use before."""
        if self._is_ours:
            ray.shutdown()


class TaskActor:
    """The actor: runs one program as a child process, from its construction on."""

    def __init__(
        self,
        task: str,
        words: Sequence[str],
        environment: Mapping[str, str],
        defaults: Mapping[str, str],
        folder: str,
        is_secured: bool,
        is_restarted: bool,
    ) -> None:
        self._name = short_task_name(task)
        self._is_restarted = is_restarted
        #: Random, since an actor that is restarted in another container may have the same PID.
        self._incarnation = secrets.randbits(62)
        self._changed = threading.Condition()
        #: Lines that the launcher has not acknowledged. `_had` counts the acknowledged ones before them.
        self._lines: deque[str] = deque()
        self._had = 0
        self._status: int | None = None
        self._stopping = False
        if os.path.isdir(folder):
            os.chdir(folder)
        where = {"DFLOW_ADDRESS": ray.util.get_node_ip_address()} if is_secured else {}
        program = TaskProgram(task, tuple(words), {**where, **environment}, defaults)
        self._child: ChildProcess = ThisMachine(python=sys.executable).start(program, self._take)

    def run(self) -> int:
        """Wait for the program's end and return its exit status.

        If the program failed and Ray may restart the actor, end the actor's process instead, so that Ray restarts it.
        """
        while (status := self._child.poll()) is None:
            time.sleep(_POLL_S)
        with self._changed:
            self._status = status
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._lines, timeout=_HAND_OVER_S)
            starts_again = self._is_restarted and status != 0 and not self._stopping
        if starts_again:
            print(f"{self._name} ended: {describe_end(status)}; Ray may start it again", flush=True)
            os._exit(1)
        return status

    def lines(self, life: int | None, had: int) -> tuple[int, tuple[str, ...], int | None]:
        """Return this life of the actor, the lines after the first `had`, and the exit status if the program has ended.

        life  the launcher's last known life of the actor; if it is this one, `had` acknowledges lines, dropped here
        """
        with self._changed:
            while life == self._incarnation and self._had < had:
                self._lines.popleft()
                self._had += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: bool(self._lines) or self._status is not None, timeout=_LINES_S)
            return self._incarnation, tuple(self._lines), self._status

    def stop(self) -> None:
        """Ask the program to end."""
        self._stopping = True
        self._child.terminate()

    def _take(self, line: str) -> None:
        print(line, flush=True)
        with self._changed:
            self._lines.append(line)
            self._changed.notify_all()


class _OnActor:
    """The launcher's handle of an actor; see `Running`."""

    def __init__(self, actor: Any, on_line: Callable[[str], None]) -> None:
        self._actor = actor
        self._on_line = on_line
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._last_status: int | None = None
        self._status: int | None = None
        self._end = actor.run.remote()
        self._reader = threading.Thread(target=self._read, name="dflow ray output", daemon=True)
        self._reader.start()

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines of output."""
        return tuple(self._tail)

    def poll(self) -> int | None:
        """Return the program's exit status; None while it runs or may run again."""
        if self._status is None and ray.wait([self._end], timeout=0)[0]:
            try:
                self._status = int(ray.get(self._end))
            except ray.exceptions.RayError:
                self._status = self._last_status or _GONE
            self._reader.join(_LINES_S)
            ray.kill(self._actor)
        return self._status

    def terminate(self) -> None:
        """Ask the program to end."""
        if self._status is None:
            self._actor.stop.remote()

    def kill(self) -> None:
        """End the actor and the processes that it started, and wait until Ray reports the end, at most `_LINES_S`."""
        if self.poll() is None:
            ray.kill(self._actor)
            ray.wait([self._end], timeout=_LINES_S)
            self._status = _GONE

    def _read(self) -> None:
        life, had = None, 0
        while self._status is None:
            try:
                now, lines, status = ray.get(self._actor.lines.remote(life, had))
            except ray.exceptions.RayError:
                if ray.wait([self._end], timeout=_POLL_S)[0]:
                    return
                continue
            if life not in (None, now):
                self._on_line("(started again by Ray)")
            had = len(lines) + (had if life == now else 0)
            life, self._last_status = now, status
            for line in lines:
                self._tail.append(line)
                self._on_line(line)
            if status is not None and not lines and ray.wait([self._end], timeout=_POLL_S)[0]:
                return
