"""How long is it from a script's start to the end of its first step, on a cluster?

The script (`_startup_worker.py`) makes variables of 64 x 64 random numbers on 2 ps tasks, with Adam's slots, and does
one step on all of them. Each task is a process of this machine. *first* is the worker that finds an empty cluster;
*late* is another worker, which joins when the variables are there; *restarted* is the first one once more. *alone* is
the same script in one process without a cluster. `after imports` is the time from the end of the imports on.
The second line of each has processor times, which depend less on what else the machine does; `on tasks` is that of the
ps tasks while the worker ran.

`--beside PYTHON` names an environment with TensorFlow, whose own runtime (graph mode, gRPC) then starts the same model
beside ours in each round; its graph and initialisation create the variables. `--variables` measures one size.
"""

from __future__ import annotations

import compileall
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks._paired import in_turn, options, publish

ROOT = Path(__file__).parents[1]
ROUNDS = 3
RUN_S = 900
SIZES = (100, 300, 1000)
PS = 2
KINDS = ("elapsed", "processor")
#: Time of each part of the start, in s, by the part's name.
Parts = dict[str, float]
#: The parts of a worker in `elapsed` and in `processor` time.
Times = dict[str, Parts]


def main() -> None:
    given = options(__doc__, variables=0, rounds=ROUNDS, beside=None)
    write_bytecode()
    rows = [row for size in ([given.variables] if given.variables else SIZES) for row in measured(size, given)]
    publish("startup", rows, as_json=given.json)


def write_bytecode() -> None:
    """Compile dflow's modules for imports, as installing the package does."""
    package = ROOT / "dflow"
    for folder in (package, *filter(Path.is_symlink, package.iterdir())):
        compileall.compile_dir(folder, quiet=2)


def measured(size: int, given: Any) -> list[dict[str, Any]]:
    """Return the rows for `size` variables: for each case the round with the least time after its imports."""
    ways: dict[str, Any] = {"dflow": lambda: by_dflow(size), "alone": lambda: {"alone": worker(size, {})}}
    if given.beside:
        ways["TensorFlow"] = lambda: {"TensorFlow": by_tensorflow(size, str(given.beside))}
    rounds = [times for found in in_turn(ways, given.rounds).values() for times in found]
    whose = list(dict.fromkeys(who for times in rounds for who in times))
    found = {who: [times[who] for times in rounds if who in times] for who in whose}
    best = {who: {kind: min((t[kind] for t in found[who]), key=after_imports) for kind in KINDS} for who in whose}
    return [{"variables": size, "who": who, "time": kind, **line(best[who][kind])} for who in whose for kind in KINDS]


def line(parts: Parts) -> Parts:
    """Return the parts under the names of the table's columns."""
    created = sum(parts.get(part, 0.0) for part in ("variables", "slots", "graph", "initialisation"))
    found = {"imports s": parts["imports"], "join s": parts["join"], "variables and slots s": created}
    after = {"first step s": parts["first step"], "after imports s": after_imports(parts)}
    return found | after | ({"on tasks s": parts["tasks"]} if "tasks" in parts else {})


def after_imports(parts: Parts) -> float:
    """Return the time of the worker after its imports."""
    return sum(parts.values()) - parts["imports"] - parts.get("tasks", 0.0)


def by_dflow(size: int) -> dict[str, Times]:
    """Return the times of three workers on one cluster."""
    coordinator = f"127.0.0.1:{free_port()}"
    joins = {"DFLOW_COORDINATOR": coordinator, "DFLOW_JOB": "worker"}
    jobs = ["--job", f"ps={PS}", "--job", "worker=2"]
    tasks = [["task", "--job", "ps", "--index", str(index), "--coordinator", coordinator] for index in range(PS)]
    with ExitStack() as stack:
        every = (["coordinator", *jobs, "--address", coordinator], *tasks)
        _, *ps = [stack.enter_context(running([sys.executable, "-m", "dflow", *words])) for words in every]
        lives = (("first", 0), ("late", 1), ("restarted", 0))
        return {who: beside(ps, worker, size, {**joins, "DFLOW_INDEX": str(index)}) for who, index in lives}


def beside(tasks: Sequence[subprocess.Popen[str]], run: Callable[..., Times], *given: Any) -> Times:
    """Return the result of `run`, with the processor time of the tasks in the meantime."""
    pids = [task.pid for task in tasks]
    before = sum(map(processor_s, pids))
    times = run(*given)
    times["processor"]["tasks"] = sum(map(processor_s, pids)) - before
    return times


def processor_s(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def worker(size: int, place: dict[str, str]) -> Times:
    """Run the script as the worker that these environment variables configure; standalone without any."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("DFLOW_")}
    script = str(ROOT / "benchmarks" / "_startup_worker.py")
    return times_of([sys.executable, script, "--variables", str(size)], mine | place)


def by_tensorflow(size: int, python: str) -> Times:
    """Return the times of one worker, on a TensorFlow cluster whose ps tasks are running."""
    addresses = [f"localhost:{free_port()}" for _ in range(PS + 1)]
    spec = ["--ps", *addresses[:PS], "--workers", *addresses[PS:]]
    script = [python, str(ROOT / "benchmarks" / "_startup_tensorflow.py")]
    with ExitStack() as stack:
        ps = [[*script, "--job", "ps", "--index", str(index), *spec] for index in range(PS)]
        tasks = [stack.enter_context(running(words)) for words in ps]
        for task in tasks:
            assert task.stdout is not None
            task.stdout.readline()
        words = [*script, "--job", "worker", "--index", "0", "--variables", str(size), *spec]
        return beside(tasks, times_of, words, dict(os.environ))


@contextmanager
def running(words: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """Start a process, and end it with the block."""
    task = subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield task
    finally:
        task.kill()
        task.communicate()


def times_of(words: Sequence[str], variables: dict[str, str]) -> Times:
    """Start a worker with these variables and return the times that it prints."""
    began = [*words, "--began", str(time.time())]
    ended = subprocess.run(began, env=variables, capture_output=True, text=True, timeout=RUN_S, check=False)
    lines = [text for text in ended.stdout.splitlines() if text.startswith("times ")]
    if not lines:
        raise SystemExit(f"a worker failed:\n{ended.stdout}{ended.stderr}")
    found: Times = json.loads(lines[0].removeprefix("times "))
    return found


def free_port() -> int:
    """A port without a listener."""
    with socket.create_server(("localhost", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


if __name__ == "__main__":
    main()
