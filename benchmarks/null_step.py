"""Measure a step without computation: the cost of the runtime itself (section 6.2 of the OSDI 2016 paper).

Every worker fetches from every shard, computes next to nothing, sends a trivial update to every shard, and waits for
the other workers. Each task is a process. *scalar* fetches one number from each shard; *dense* the whole model of
`--mb` MB; *sparse* 32 random rows of a table of `--mb` MB. *raw* is the same bytes over plain TCP sockets between as
many processes, in the same run, round by round. A sparse step also runs on a table of a sixteenth, interleaved: its
time should not depend on the size. The paper's own figures are of 16 ps tasks on as many machines.

`--beside PYTHON` names an environment with TensorFlow, whose own runtime (gRPC, graph mode) then does the same step on
a cluster of as many processes, interleaved with dflow's. `make bench-peers` makes such an environment. `--every`
measures all published steps.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks._launched import ROOT, launched
from benchmarks._null_step_worker import COLUMNS, ROWS_FETCHED, SMALLER
from benchmarks._paired import median_ratio, options, publish
from benchmarks._raw_sockets import raw_servers

ROUNDS = 5
RUN_S = 900
#: Median step times of 1 and of 100 workers, in ms.
PAPER = {"scalar": "1.8 to 8.8", "dense 100": "147 to 613", "dense 1000": "1010 to 7160", "sparse": "5 to 20"}


#: Number of times that each runtime is started again when two are compared.
TURNS = 3

#: Step times in s, by alternative, round and step.
Times = dict[str, list[list[float]]]


@dataclass(frozen=True)
class Step:
    """A step to measure: `steps` is the total number of steps, `rounds` the number of rounds."""

    kind: str
    ps: int
    workers: int
    mb: int
    steps: int
    rounds: int

    def words(self, *names: str) -> list[str]:
        """Return command-line options with the values of these fields."""
        numbers = {**asdict(self), "steps": max(1, self.steps // self.rounds)}
        return [word for name in names for word in (f"--{name}", str(numbers[name]))]


#: The published steps.
EVERY = (
    *(Step("scalar", 2, workers, 0, 1000, 4 * ROUNDS) for workers in (1, 2, 4)),
    *(Step("dense", 2, workers, 100, 50, 2 * ROUNDS) for workers in (1, 2)),
    Step("dense", 2, 1, 1000, 15, ROUNDS),
    Step("sparse", 2, 1, 4000, 1000, 4 * ROUNDS),
)


def main() -> None:
    numbers = {"ps": 2, "workers": 1, "mb": 100, "steps": 400, "rounds": ROUNDS}
    given = options(__doc__, kind=("scalar", "dense", "sparse"), **numbers, beside=None, every=False)
    step = Step(given.kind, given.ps, given.workers, given.mb, given.steps, given.rounds)
    rows = [measured(each, given.beside) for each in (EVERY if given.every else [step])]
    publish("null_step", rows, as_json=given.json)


def measured(step: Step, beside: str | None) -> dict[str, Any]:
    """Return a row of the table."""
    times = by_dflow(step)
    peers: list[list[float]] = []
    for _ in range(TURNS if beside else 0):
        peers += by_tensorflow(step, str(beside))
        again = by_dflow(step)
        times = {way: times[way] + again[way] for way in times}
    ours, raws = ([statistics.median(round_) for round_ in times[way]] for way in ("dflow", "raw"))
    ratio, low, high = median_ratio(ours, raws)
    every = sorted(time for round_ in times["dflow"] for time in round_)
    row = {
        "kind": step.kind,
        "ps": step.ps,
        "workers": step.workers,
        "MB": step.mb if step.kind != "scalar" else 0,
        "median ms": 1e3 * statistics.median(every),
        "p90 ms": 1e3 * every[len(every) * 9 // 10],
        "raw ms": 1e3 * statistics.median(time for round_ in times["raw"] for time in round_),
        "/ raw": ratio,
        "p10": low,
        "p90": high,
        **against_smaller(ours, times),
        "paper ms": PAPER.get(step.kind) or PAPER.get(f"{step.kind} {step.mb}", ""),
    }
    if peers:
        theirs = [statistics.median(round_) for round_ in peers]
        ratio, low, high = median_ratio(ours[: len(theirs)], theirs)
        row |= {"TensorFlow ms": 1e3 * statistics.median(theirs), "/ TensorFlow": ratio, "p10 ": low, "p90 ": high}
    return row


def against_smaller(ours: Sequence[float], times: Times) -> dict[str, float]:
    """Return the ratio of step times to those on a table `SMALLER` times smaller, if these were measured."""
    if "smaller" not in times:
        return {}
    ratio, low, high = median_ratio(ours, [statistics.median(round_) for round_ in times["smaller"]])
    return {f"/ 1:{SMALLER}": ratio, " p10": low, " p90": high}


def by_dflow(step: Step) -> Times:
    """Return the times of worker 0: of dflow's steps, and of the alternatives interleaved with them."""
    ask, reply = request_bytes(step.kind, step.ps, step.mb)
    with raw_servers(step.ps, step.workers, ask, reply) as ports:
        words = step.words("kind", "ps", "workers", "mb", "steps", "rounds")
        said = [*words, "--ask", str(ask), "--reply", str(reply), "--ports", *map(str, ports)]
        ended = launched("_null_step_worker.py", said, ps=step.ps, workers=step.workers, timeout_s=RUN_S)
    found: Times = found_in(ended.stdout, "[worker:0] times ", ended.stdout + ended.stderr)
    return found


def by_tensorflow(step: Step, python: str) -> list[list[float]]:
    """Return the times of worker 0 of a TensorFlow cluster."""
    script = str(ROOT / "benchmarks" / "_null_step_tensorflow.py")
    output = by_tasks([python, script, *step.words("kind", "mb", "steps", "rounds")], step.ps, step.workers, RUN_S)
    found: list[list[float]] = found_in(output, "times ", output)
    return found


def by_tasks(command: Sequence[str], ps: int, workers: int, run_s: float) -> str:
    """Run `command` as each task of another framework's cluster, with its job and index; return worker 0's output."""
    addresses = [f"localhost:{port}" for port in free_ports(ps + workers)]
    spec = ["--ps", *addresses[:ps], "--workers", *addresses[ps:]]
    tasks = [("ps", index) for index in range(ps)] + [("worker", index) for index in range(workers)]
    running = {
        (job, index): subprocess.Popen(
            [*command, "--job", job, "--index", str(index), *spec],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for job, index in tasks
    }
    try:
        output, _ = running["worker", 0].communicate(timeout=run_s)
    finally:
        for task in running.values():
            task.kill()
            task.wait()
    return output


def found_in(output: str, start: str, all_output: str) -> Any:
    """Parse the JSON that a worker printed after `start`."""
    lines = [line for line in output.splitlines() if line.startswith(start)]
    if not lines:
        raise SystemExit(f"the cluster failed:\n{all_output}")
    return json.loads(lines[0].removeprefix(start))


def free_ports(count: int) -> Sequence[int]:
    """Return ports without a listener."""
    socks = [socket.create_server(("localhost", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in socks]
    for sock in socks:
        sock.close()
    return ports


def request_bytes(kind: str, ps: int, mb: int) -> tuple[int, int]:
    """Return the sizes in bytes of a worker's request to a shard and of the shard's reply."""
    if kind == "scalar":
        return 4, 4
    if kind == "dense":
        return 4, mb * 1_000_000 // ps
    rows = ROWS_FETCHED // ps
    return 4 * rows, 4 * COLUMNS * rows


if __name__ == "__main__":
    main()
