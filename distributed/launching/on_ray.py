"""A Ray cluster as a place for tasks: each is an actor, on a node that has its resources, and Ray starts it again.

An actor runs the task's program as a child process of its own, prints its output, so that Ray keeps it like that of
any actor, and hands it on to the launcher. Only plain texts and numbers go through Ray, which pickles what goes through
it; the tasks speak to each other as they do everywhere, directly.

Invariants:
- an actor whose program failed ends itself while Ray may start it again, and else tells how the program ended;
- it keeps each line until the launcher has said that it has it, and does not end itself before, for a while: the last
  lines say why the program failed;
- a program ends with its actor, however that ends.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from dflow.distributed.child_process import TAIL_LINES, ChildProcess, describe_end
from dflow.distributed.launching.place import TaskProgram
from dflow.distributed.launching.ray_resources import RayResources, amounts_text
from dflow.distributed.launching.restarts import NEVER, RestartPolicy
from dflow.distributed.launching.this_machine import ThisMachine
from dflow.tracing.errors import ConfigError
from dflow.tracing.task_name import short_task_name, split_task_name

#: How long an actor waits for new lines before it answers with none.
_LINES_S = 2.0
_POLL_S = 0.1
#: How long an actor that is to end itself waits for the launcher to take its last lines.
_HAND_OVER_S = 10.0
#: What is told of a program whose actor is gone and has not said how it ended: like a process that was killed.
_GONE = -9
#: Variables of the launcher's that tasks need on other nodes too.
_HANDED_ON = ("DFLOW_SECRET_FILE", "DFLOW_TLS_CERT", "DFLOW_TLS_KEY", "DFLOW_TLS_CA")


class OnRay:
    """The Ray cluster that RAY_ADDRESS or Ray's own search finds, else one that is started on this machine.

    `resources`  what the tasks of each job ask for
    `restarts`   how often Ray starts the actors of each job again
    `is_secured` whether tasks can prove who they are, and so may speak over the network
    raises       ConfigError when there are several nodes but no proofs; what `ray.init` raises
    """

    def __init__(
        self,
        resources: Mapping[str, RayResources],
        restarts: Mapping[str, RestartPolicy],
        *,
        is_secured: bool,
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
                "prove who they are\n  set DFLOW_SECRET_FILE, or DFLOW_TLS_CERT, DFLOW_TLS_KEY and DFLOW_TLS_CA, to "
                "files that each node has; see docs/security.md"
            )

    def start(self, program: TaskProgram, on_line: Callable[[str], None]) -> _OnActor:
        """Start an actor; see `place.Place`."""
        is_coordinator = not program.task.startswith("/")
        job = program.task if is_coordinator else split_task_name(program.task)[0]
        asked = RayResources(cpus=0.0) if is_coordinator else self._resources[job]
        limit = self._restarts.get(job, NEVER).limit
        actor = ray.remote(TaskActor).options(
            name=f"dflow {short_task_name(program.task)} {secrets.token_hex(8)}",
            num_cpus=asked.cpus,
            num_gpus=asked.gpus,
            resources=dict(asked.others),
            max_restarts=limit,
            max_task_retries=limit,
            max_concurrency=4,
        )
        handed_on = {name: os.environ[name] for name in _HANDED_ON if name in os.environ}
        return _OnActor(
            actor.remote(
                program.task,
                program.words,
                {**handed_on, **program.environment},
                dict(program.defaults),
                os.getcwd(),
                self._is_secured,
                limit > 0,
            ),
            on_line,
        )

    def described(self, jobs: Mapping[str, int]) -> str:
        """What the cluster has, and what the tasks of `jobs` ask for beyond that."""
        has = ray.cluster_resources()
        asked: dict[str, float] = {}
        for job, count in jobs.items():
            for name, amount in self._resources[job].amounts.items():
                asked[name] = asked.get(name, 0.0) + count * amount
        short = {name: amount for name, amount in asked.items() if amount > has.get(name, 0.0)}
        nodes = f"{self._nodes} {'node' if self._nodes == 1 else 'nodes'}"
        cluster = f"on a Ray cluster of {nodes} with {amounts_text(has)}"
        if not short:
            return cluster
        return f"{cluster}; the tasks ask for {amounts_text(short)}: those that do not fit wait until it grows"

    def close(self) -> None:
        """Leave the Ray cluster, and end it if it was started here."""
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
        #: Random, since an actor that is started again in another container may have the same process number.
        self._incarnation = secrets.randbits(62)
        self._changed = threading.Condition()
        #: Those that the launcher may not have, after so many that it has.
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
        """Wait for the program's end; its exit status. Ends the actor instead when Ray shall start it again."""
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
        """Which life of the actor this is, the lines after the first `had`, and the exit status if the program ended.

        Those up to `had` have come to the launcher, if it speaks of this `life`; they are kept no longer.
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
    """An actor as the launcher sees it; see `place.Running`."""

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
        """None while it runs or may run again, else how its program ended."""
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
        """End the actor and what it started, and wait until Ray says so."""
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
