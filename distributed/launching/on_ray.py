"""A Ray cluster as a target of a launch: each process of a task is an actor, on a node with the resources for it.

An actor runs the task's program as a child process. It prints the program's output, which Ray keeps as for any actor,
and passes it on to the launcher. Ray pickles what passes through it, so only strings and numbers do; the tasks connect
to each other directly, as everywhere.

Ray restarts no actor: the launcher makes another one, by the policies that hold on this machine, and by the address
and the state that the coordinator had. So the coordinator runs on the launcher's node, as another node has neither.

Invariants:
- an actor keeps each line of output until the launcher acknowledges it, and delays the report of its program's end for
  that by at most `_HAND_OVER_S`: the last lines say why the program failed;
- a program ends with its actor, however the actor ends, and with Ray's process on its node, the raylet;
- a task server with snapshots runs only on a node that sees the launcher's folder of snapshots.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dflow.distributed.detection.cluster_spec import COORDINATOR
from dflow.distributed.launching.task_programs import TaskProgram, ThisMachine
from dflow.distributed.process.child_process import ChildProcess, Running
from dflow.distributed.process.parent_watch import end_with_parent
from dflow.distributed.process.run_folder import write_whole_file
from dflow.distributed.transport.security.configuration import CERTIFICATE_VARIABLES, SECRET_VARIABLE
from dflow.tracing.devices.task_name import short_task_name, split_task_name
from dflow.tracing.errors import ConfigError

#: Time after which an actor answers a request for lines with none.
_LINES_S = 2.0
_POLL_S = 0.1
#: Time between two looks of an actor at the nodes that Ray drains.
_DRAIN_S = 1.0
#: Longest wait of an actor for the launcher to take its last lines.
_HAND_OVER_S = 10.0
#: File in the folder of snapshots. It shows an actor that the folder is the launcher's.
_LAUNCH_ID = "launch.id"
#: Exit status of a program whose actor is gone without reporting one: that of a killed process.
_GONE = -9


class OnRay:
    """The Ray cluster found by RAY_ADDRESS or Ray's own search, else a new one on this machine.

    Construction connects this process to it, unless it is connected.

    `resources`  the resources requested by the tasks of each job
    `snapshots`  the folder of snapshots, which each node with a task server must see; empty for none
    `is_secured` whether tasks have certificates or a secret, and so may connect over the network
    raises       ConfigError for several nodes without certificates or a secret, or when this machine is not a node of
                 the cluster; errors of `ray.init`
    """

    def __init__(self, resources: Mapping[str, Mapping[str, float]], snapshots: str, *, is_secured: bool) -> None:
        self._resources = resources
        self._is_secured = is_secured
        address = os.environ.get("RAY_ADDRESS", "")
        if "://" in address:
            raise ConfigError(
                f"RAY_ADDRESS: expected the address of a cluster that this machine is a node of, got {address}: the "
                "coordinator runs beside the launcher",
                "run dflow launch on a node, for instance by ray job submit",
            )
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
        self._snapshots, self._launch_id = snapshots, secrets.token_hex(8)
        if snapshots:
            write_whole_file(Path(snapshots) / _LAUNCH_ID, self._launch_id.encode())

    def start(self, program: TaskProgram, on_line: Callable[[str], None]) -> _OnActor:
        """Start an actor; see `LaunchTarget.start`."""
        if program.task == COORDINATOR:
            asked = {"CPU": 0.0}
            node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        else:
            asked, node = dict(self._resources[split_task_name(program.task)[0]]), None
        actor = ray.remote(TaskActor).options(
            name=f"dflow {short_task_name(program.task)} {secrets.token_hex(8)}",
            num_cpus=asked.pop("CPU"),
            num_gpus=asked.pop("GPU", 0.0),
            resources=asked,
            scheduling_strategy=node,
            max_concurrency=4,
        )
        # Tasks on other nodes need them too.
        proofs = {name: os.environ[name] for name in (*CERTIFICATE_VARIABLES, SECRET_VARIABLE) if name in os.environ}
        environment, defaults = {**proofs, **program.environment}, dict(program.defaults)
        has_part = bool(self._snapshots) and self._snapshots in program.words
        # A script and a server with snapshots leave without a loss; another server would lose its state before it must,
        # and the coordinator has no other node.
        leaves = has_part or program.ends_by == signal.SIGTERM
        made = actor.remote(
            program.task,
            program.words,
            environment,
            defaults,
            int(program.ends_by),
            os.getcwd(),
            self._is_secured,
            (self._snapshots, self._launch_id) if has_part else None,
            leaves,
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
        cluster = f"on a Ray cluster of {nodes} with {_amounts_text(has)}"
        if not short:
            return cluster
        return f"{cluster}; the tasks ask for {_amounts_text(short)}: those that do not fit wait until it grows"

    def close(self) -> None:
        """Shut down the connection to Ray, and the cluster if it was started here; nothing if Ray was in use before."""
        if self._is_ours:
            ray.shutdown()


class TaskActor:
    """The actor: runs one program as a child process, from its construction on.

    `folder`      working directory of the program, if this node has it
    `is_secured`  whether the program's address is that of the node
    `seen`        a folder that this node must see, and the id of the launch in it
    `leaves`      whether the program is sent SIGTERM when Ray drains this node
    raises        ConfigError when this node sees another folder, or none
    """

    def __init__(
        self,
        task: str,
        words: Sequence[str],
        environment: Mapping[str, str],
        defaults: Mapping[str, str],
        ends_by: int,
        folder: str,
        is_secured: bool,
        seen: tuple[str, str] | None = None,
        leaves: bool = False,
    ) -> None:
        if seen is not None:
            _check_seen(task, *seen)
        self._changed = threading.Condition()
        #: Lines that the launcher has not acknowledged. `_had` counts the acknowledged ones before them.
        self._lines: deque[str] = deque()
        self._had = 0
        self._status: int | None = None
        if os.path.isdir(folder):
            os.chdir(folder)
        where = {"DFLOW_ADDRESS": ray.util.get_node_ip_address()} if is_secured else {}
        program = TaskProgram(task, tuple(words), {**where, **environment}, defaults, signal.Signals(ends_by))
        # Ray's processes block SIGINT, and the program would inherit that, though it is to end by it.
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            self._child: ChildProcess = ThisMachine(python=sys.executable).start(program, self._take)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if ray.is_initialized():
            self._follow_ray(leaves)

    def run(self) -> int:
        """Wait for the program's end, then up to `_HAND_OVER_S` until no line is left; return its exit status."""
        while (status := self._child.poll()) is None:
            time.sleep(_POLL_S)
        with self._changed:
            self._status = status
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._lines, timeout=_HAND_OVER_S)
        return status

    def lines(self, had: int) -> tuple[tuple[str, ...], int | None]:
        """Return the lines after the first `had`, and the exit status if the program has ended.

        `had` acknowledges lines, which are dropped here. Waits up to `_LINES_S` for a line or the end.
        """
        with self._changed:
            while self._had < had:
                self._lines.popleft()
                self._had += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: bool(self._lines) or self._status is not None, timeout=_LINES_S)
            return tuple(self._lines), self._status

    def stop(self) -> None:
        """Ask the program to end with the whole launch."""
        self._child.terminate()

    def _follow_ray(self, leaves: bool) -> None:
        """End this process, and so the program, with its Ray parent; have the program leave at SIGTERM.

        leaves  whether the program also leaves when Ray drains this node
        """
        # Ray ends an actor half a minute after its raylet, and reports that earlier: the launcher would start the next
        # program of the task while this one runs.
        end_with_parent()
        # Ray constructs actors on the main thread. Its own handler would end the actor, and the program with it.
        signal.signal(signal.SIGTERM, self._leave)
        if leaves:
            threading.Thread(target=self._leave_when_drained, name="dflow ray drain", daemon=True).start()

    def _leave(self, number: int = signal.SIGTERM, frame: FrameType | None = None) -> None:
        """Ask the program to leave: a task server has a snapshot made first, a worker ends its step."""
        self._child.send(signal.SIGTERM)

    def _leave_when_drained(self) -> None:
        while not _is_drained():
            time.sleep(_DRAIN_S)
        self._leave()

    def _take(self, line: str) -> None:
        print(line, flush=True)
        with self._changed:
            self._lines.append(line)
            self._changed.notify_all()


def _amounts_text(resources: Mapping[str, float]) -> str:
    """Format amounts for a person, without memory and resources that name a single node."""
    names = [name for name in sorted(resources) if ":" not in name and "memory" not in name]
    return ", ".join(f"{name} {resources[name]:g}" for name in names) or "nothing"


def _check_seen(task: str, folder: str, launch_id: str) -> None:
    try:
        found = (Path(folder) / _LAUNCH_ID).read_text()
    except OSError:
        found = ""
    if found != launch_id:
        raise ConfigError(
            f"--snapshots {folder}: expected a folder that all nodes see, but {short_task_name(task)} on the node "
            f"{ray.util.get_node_ip_address()} sees {'another one' if found else 'none'}",
            "give a folder of a shared file system, or keep task servers on the launcher's node: --ps-resources "
            "node:ADDRESS=0.001",
        )


def _is_drained() -> bool:
    """Whether Ray drains the node of this process, which then ends soon."""
    # Ray has no public way to ask; its own libraries for training and serving ask like this.
    return ray.get_runtime_context().get_node_id() in ray._private.state.state.get_draining_nodes()


class _OnActor(Running):
    """The launcher's handle of an actor."""

    def __init__(self, actor: Any, on_line: Callable[[str], None]) -> None:
        super().__init__(on_line)
        self._actor = actor
        self._last_status: int | None = None
        self._status: int | None = None
        self._end = actor.run.remote()
        self._reader = threading.Thread(target=self._read, name="dflow ray output", daemon=True)
        self._reader.start()

    def poll(self) -> int | None:
        """See `Running`. At the end, shows the error of an actor that failed, and ends the actor."""
        if self._status is None and ray.wait([self._end], timeout=0)[0]:
            try:
                status, why = int(ray.get(self._end)), ""
            except ray.exceptions.RayError as error:
                status, why = _GONE if self._last_status is None else self._last_status, str(error)
            self._status = status
            self._reader.join(_LINES_S)
            for line in why.splitlines():
                self._show(line)
            ray.kill(self._actor)
        return self._status

    def terminate(self) -> None:
        if self._status is None:
            self._actor.stop.remote()

    def kill(self) -> None:
        """End the actor and the processes that it started, and wait until Ray reports the end, at most `_LINES_S`."""
        if self.poll() is None:
            ray.kill(self._actor)
            ray.wait([self._end], timeout=_LINES_S)
            self._status = _GONE

    def _read(self) -> None:
        had = 0
        while self._status is None:
            try:
                lines, status = ray.get(self._actor.lines.remote(had))
            except ray.exceptions.RayError:
                if ray.wait([self._end], timeout=_POLL_S)[0]:
                    return
                continue
            had += len(lines)
            self._last_status = status
            for line in lines:
                self._show(line)
            if status is not None and not lines and ray.wait([self._end], timeout=_POLL_S)[0]:
                return
