"""How long is it from the death of a process to the next training step?

A cluster of `--ps` ps tasks and `--workers` workers, with `--restart` and `--snapshots`, trains tables of `--mib` MiB
on each ps task. Each round starts it again, and after the first snapshot SIGKILL ends a ps task, a worker and the
coordinator, one after the other. *without a step* is, for the ps task, the time from the signal to the end of the
first step of any worker after it; for the others, the longest pause between the ends of two steps of a worker that was
not killed. *before* is the longest such pause in the 5 s before the signal. The parts of a ps task's time: the launcher
has *noticed* the end, and has *started* another process; that has *joined* the cluster; all ps tasks have *loaded* the
snapshot; the first *step* has ended. *back* is the time from the signal until the worker's next process has done a
step, or until the next coordinator answers.

`--beside PYTHON` names an environment with TensorFlow, whose ParameterServerStrategy then trains the same tables on as
many processes, and loses a ps task after its first checkpoint. The ps task is started again immediately, and so is the
coordinator's program, when it has ended with an UnavailableError; it connects (*joined*) and restores the checkpoint.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._launched import ROOT, launch, processes
from benchmarks._paired import in_turn, options, publish
from benchmarks._recovery_worker import BATCH, COLUMNS, TABLES, rows_of
from benchmarks._step_ends import StepEnds
from benchmarks._watched import Watched
from benchmarks.null_step import free_ports
from dflow.distributed.client.coordinator_client import CoordinatorClient
from dflow.distributed.transport.sockets import SocketTransport
from dflow.distributed.wire.messages.status import GetStatus
from dflow.tracing.devices.task_name import task_name

#: Time of training before each signal, and after the cluster has recovered, in s.
STEADY_S = 5.0
#: Longest wait for anything, in s.
WAIT_S = 300.0

#: Name of the time without the end of a step.
WITHOUT = "without a step s"
#: Times in s, by name.
Times = dict[str, float]


def main() -> None:
    given = options(__doc__, rounds=3, mib="16,256,1024", ps=2, workers=2, beside=None)
    rows = [row for mib in map(int, given.mib.split(",")) for row in measured(mib, given)]
    publish("recovery", rows, as_json=given.json)


def measured(mib: int, given: Any) -> list[dict[str, Any]]:
    """Return the rows of tables of this size: medians of the rounds."""
    ways: dict[str, Callable[[], dict[str, Times]]] = {"dflow": lambda: by_dflow(mib, given.ps, given.workers)}
    if given.beside:
        ways["TensorFlow"] = lambda: by_tensorflow(str(given.beside), mib, given.ps, given.workers)
    rows = []
    for by, rounds in in_turn(ways, given.rounds).items():
        for killed in rounds[0]:
            row: dict[str, Any] = {"MiB": mib, "killed": killed, "by": by}
            for name in rounds[0][killed]:
                times = sorted(times[killed][name] for times in rounds)
                row[name] = statistics.median(times)
                if name == WITHOUT:
                    row |= {"least": times[0], "most": times[-1]}
            rows.append(row)
    return rows


def by_dflow(mib: int, ps: int, workers: int) -> dict[str, Times]:
    """Return the times of one cluster, by killed process."""
    with tempfile.TemporaryDirectory() as scratch:
        steps = StepEnds(Path(scratch, "ends"))
        words = ["--ps", str(ps), "--mib", str(mib), "--ends", str(steps.folder)]
        policy = ["--restart", "on-failure", "--restart", "ps=on-failure", "--snapshots", f"{scratch}/snapshots"]
        with Watched(*launch("_recovery_worker.py", words, *policy, ps=ps, workers=workers)) as launcher:
            line = launcher.wait_for("to watch: ", WAIT_S)
            client = CoordinatorClient(SocketTransport(), line.text.split()[-1], name="benchmark", timeout_s=WAIT_S)
            with contextlib.closing(client):
                launcher.wait_for("the first snapshot", WAIT_S)
                launcher.wait_until(lambda: steps.since(0.0) == workers, "a step of each worker", WAIT_S)
                return {
                    "ps task": lost_ps_task(launcher, client, steps),
                    "worker": lost_worker(launcher, steps, f"worker:{workers - 1}"),
                    "coordinator": lost_coordinator(launcher, client, steps),
                }


def lost_ps_task(launcher: Watched, client: CoordinatorClient, steps: StepEnds) -> Times:
    """Kill a ps task; return the times until the next step."""
    before, killed_s = kill_one(launcher, "ps:0", steps)
    at_s = {
        "noticed s": launcher.wait_for("ps:0 ended", WAIT_S, killed_s).at_s,
        "started s": launcher.wait_for("ps:0 runs again", WAIT_S, killed_s).at_s,
        "joined s": 0.0,
        "loaded s": launcher.wait_for("returned to snapshot", WAIT_S, killed_s).at_s,
    }
    status = client.ask(GetStatus(), WAIT_S)
    joined_s = max(info.joined_at_s for info in status.tasks if info.task == task_name("ps", 0))
    at_s["joined s"] = time.monotonic() - status.now_s + joined_s
    return before | until_the_next_step(launcher, steps, killed_s, at_s)


def until_the_next_step(trainer: Watched, steps: StepEnds, killed_s: float, at_s: Times) -> Times:
    """Wait for the next step; return the times of the parts of the recovery, which ended `at_s`, and of all."""
    trainer.wait_until(lambda: steps.since(at_s["loaded s"]), "a step", WAIT_S)
    time.sleep(STEADY_S)
    at_s["step s"] = steps.end_of_longest_pause(killed_s)
    begins_s = [killed_s, *at_s.values()]
    parts = {name: end_s - begin_s for (name, end_s), begin_s in zip(at_s.items(), begins_s, strict=False)}
    return {WITHOUT: at_s["step s"] - killed_s, **parts}


def lost_worker(launcher: Watched, steps: StepEnds, name: str) -> Times:
    """Kill a worker; return the longest pause of the others, and when it is back."""
    before, killed_s = kill_one(launcher, name, steps)
    back_s = launcher.wait_until(lambda: steps.first_of(name, killed_s), f"a step of {name}", WAIT_S)
    time.sleep(STEADY_S)
    return before | {WITHOUT: steps.longest_pause(killed_s, time.monotonic()), "back s": back_s - killed_s}


def lost_coordinator(launcher: Watched, client: CoordinatorClient, steps: StepEnds) -> Times:
    """Kill the coordinator; return the longest pause of the workers, and when the next one answers."""
    before, killed_s = kill_one(launcher, "coordinator", steps)
    launcher.wait_for("coordinator ended", WAIT_S, killed_s)
    client.ask(GetStatus(), WAIT_S)
    back_s = time.monotonic()
    time.sleep(STEADY_S)
    launcher.wait_until(lambda: steps.since(back_s), "a step", WAIT_S)
    return before | {WITHOUT: steps.longest_pause(killed_s, time.monotonic()), "back s": back_s - killed_s}


def kill_one(launcher: Watched, role: str, steps: StepEnds) -> tuple[Times, float]:
    """Kill a process of the launcher; return the longest pause of the steps before, and the time of the signal."""
    before = usual_pause(steps)
    victim = processes(launcher.process.pid)[role]
    killed_s = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    return before, killed_s


def usual_pause(steps: StepEnds) -> Times:
    """Return the longest pause between two steps while nothing happens."""
    from_s = time.monotonic()
    time.sleep(STEADY_S)
    return {"before s": steps.longest_pause(from_s, time.monotonic())}


def by_tensorflow(python: str, mib: int, ps: int, workers: int) -> dict[str, Times]:
    """Return the times of one cluster of TensorFlow, which loses a ps task."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        steps = StepEnds(Path(scratch, "ends"))
        addresses = iter([f"localhost:{port}" for port in free_ports(1 + ps + workers)])
        jobs = {"chief": 1, "ps": ps, "worker": workers}
        spec = {job: list(itertools.islice(addresses, count)) for job, count in jobs.items()}
        sizes = {"tables": TABLES * ps, "rows": rows_of(mib), "columns": COLUMNS, "batch": BATCH}
        words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
        words += ["--spec", json.dumps(spec), "--ends", str(steps.folder), "--checkpoints", f"{scratch}/checkpoints"]
        script = [python, str(ROOT / "benchmarks" / "_recovery_tensorflow.py"), *words]

        def start(job: str, index: int) -> Watched:
            return stack.enter_context(Watched([*script, "--job", job, "--index", str(index)], os.environ))

        servers = [start(job, index) for job in ("ps", "worker") for index in range(jobs[job])]
        for server in servers:
            server.wait_for("up", WAIT_S)
        chief = start("chief", 0)
        chief.wait_for("saved", WAIT_S)
        before, killed_s = usual_pause(steps), time.monotonic()
        servers[0].process.kill()
        servers[0].process.wait()
        start("ps", 0)
        chief.process.wait(WAIT_S)
        at_s = {"noticed s": time.monotonic()}
        chief = start("chief", 0)
        at_s["started s"] = time.monotonic()
        for part, text in (("joined s", "connected"), ("loaded s", "restored")):
            at_s[part] = chief.wait_for(text, WAIT_S).at_s
        return {"ps task": before | until_the_next_step(chief, steps, killed_s, at_s)}


if __name__ == "__main__":
    main()
