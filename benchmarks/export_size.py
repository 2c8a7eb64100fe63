"""How much memory and time does the export of a large table take, and its server?

A table of float32 with 16 columns lies on ps tasks, each a process of this machine. One worker exports a lookup in it,
in each form of the weights. `worker MB` and `ps MB` are what the worker, and a ps task at most, take for the export
(VmHWM, beyond its value before); `held MB` is the part of the table that a ps task has.

Then two `dflow serve` of the export are started, one after the other, from files that the system has not read before.
`answer s` is the time from the start of a process to its first answer, `answer cpu s` its processor time until then,
and `read MB` what it read from the disk. A server before these compiles the sources to bytecode, as an installation
does. `private MB` is the memory that the second one shares with no process after 100 requests of 1,000 random ids, and
`shared MB` that which both use, such as pages of the table.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks._export_size_worker import COLUMNS
from benchmarks._launched import ROOT, launch, processes
from benchmarks._paired import options, publish

FORMS = ("float32", "int8", "bfloat16")
REQUESTS, IDS = 100, 1000
RUN_S = 1800.0
MB = 1e6


def main() -> None:
    given = options(__doc__, rows=16_000_000, ps=4)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        rows = exported(given.rows, given.ps, folder)
        for row in rows:
            row |= served(folder / row["weights"], given.rows)
    publish("export_size", rows, as_json=given.json)


def exported(rows: int, ps: int, folder: Path) -> list[dict[str, Any]]:
    """Export the table in each form; return the figures."""
    words = ["--rows", str(rows), "--folder", str(folder), "--forms", *FORMS]
    command, environment = launch("_export_size_worker.py", words, ps=ps, workers=1)
    found = []
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as launched:
        await_done(launched, "made")
        for form in FORMS:
            tasks = processes(launched.pid)
            for process in tasks.values():
                Path(f"/proc/{process}/clear_refs").write_text("5")  # the highest memory is the present one
            before = {role: highest_bytes(process) for role, process in tasks.items()}
            (folder / f"go-{form}").touch()
            took = await_done(launched, form)
            grown = {role: highest_bytes(process) - before[role] for role, process in tasks.items()}
            size = sum(file.stat().st_size for file in (folder / form).rglob("*") if file.is_file())
            found.append(
                {
                    "weights": form,
                    "files MB": size / MB,
                    "export s": took,
                    "worker MB": grown["worker:0"] / MB,
                    "ps MB": max(grown[role] for role in grown if role.startswith("ps")) / MB,
                    "held MB": 4 * rows * COLUMNS / ps / MB,
                }
            )
        (folder / "go-end").touch()
        launched.communicate(timeout=RUN_S)
    return found


def await_done(launched: subprocess.Popen[str], what: str) -> float:
    """Return the time that the worker took for something, in s."""
    seen = []
    for line in launched.stdout or ():
        seen.append(line)
        _, is_it, took = line.partition(f"done {what} ")
        if is_it:
            return float(took)
    raise SystemExit(f"the run failed:\n{''.join(seen)}")


def highest_bytes(process: int) -> int:
    return fields_of(Path(f"/proc/{process}/status"))["VmHWM"]


def fields_of(file: Path) -> dict[str, int]:
    """Return the fields in bytes of a file of /proc."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


def served(model: Path, rows: int) -> dict[str, float]:
    """Serve an export twice; return the times to the first answers and the memory of the second server."""
    random = np.random.default_rng(0)
    with contextlib.ExitStack() as stack:
        servers, took = [], []
        with serving(model) as (process, url):
            await_answer(process, url)
        for _ in range(2):
            forget_pages(model)
            started = time.perf_counter()
            process, url = stack.enter_context(serving(model))
            await_answer(process, url)
            took.append((time.perf_counter() - started, *used_by(process.pid)))
            servers.append((process.pid, url))
        for _ in range(REQUESTS):
            ids = random.integers(0, rows, (1, IDS), np.int32)
            for _, url in servers:
                ask(url, ids)
        memory = fields_of(Path(f"/proc/{servers[1][0]}/smaps_rollup"))
    private = memory["Private_Clean"] + memory["Private_Dirty"]
    answer_s, cpu_s, read_bytes = map(statistics.median, zip(*took, strict=True))
    return {
        "answer s": answer_s,
        "answer cpu s": cpu_s,
        "read MB": read_bytes / MB,
        "private MB": private / MB,
        "shared MB": (memory["Rss"] - private) / MB,
    }


def forget_pages(folder: Path) -> None:
    """Have the system forget the contents of files that no process uses: the next to use them reads the disk."""
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open() as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def await_answer(process: subprocess.Popen[str], url: str) -> None:
    """Return when the server answers."""
    while process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            return ask(url, np.zeros((1, 1), np.int32))
        time.sleep(0.02)
    raise SystemExit(f"the server ended:\n{process.stdout.read() if process.stdout else ''}")


def used_by(process: int) -> tuple[float, int]:
    """Return the processor time of a process and its children in s, and the bytes that it read from the disk."""
    ticks = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:15]
    read = dict(line.split(": ") for line in Path(f"/proc/{process}/io").read_text().splitlines())
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"), int(read["read_bytes"])


@contextlib.contextmanager
def serving(model: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server; give its process, and the URL of the model."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = f"127.0.0.1:{listener.getsockname()[1]}"
    words = [sys.executable, "-m", "dflow", "serve", str(model), "--name", "m", "--address", where]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    with subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process, f"http://{where}/v2/models/m/infer"
        finally:
            process.terminate()


def ask(url: str, ids: np.ndarray[Any, Any]) -> None:
    given = {"name": "ids", "datatype": "INT32", "shape": [*ids.shape], "data": ids.ravel().tolist()}
    body = msgspec.json.encode({"inputs": [given]})
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        response.read()


if __name__ == "__main__":
    main()
