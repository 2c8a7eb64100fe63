"""Print where the time of a step goes at each task, in us: `dflow trace --summary` of a cluster of processes.

The step is the scalar one of `benchmarks.null_step`, or with `--layers N` a training step of N dense layers with Adam.
The figures are of a traced step. It is slower than others, since the ends of XLA's programs are recorded.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import IO

from benchmarks._launched import ROOT
from benchmarks._paired import machine, options

START_S = 120
END_S = 30


def main() -> None:
    given = options(__doc__, ps=2, layers=0, width=64, steps=400)
    words = [word for name in ("ps", "layers", "width") for word in (f"--{name}", str(getattr(given, name)))]
    script = str(ROOT / "benchmarks" / "_budget_worker.py")
    command = [sys.executable, "-m", "dflow", "launch", "--ps", str(given.ps), "--workers", "1", script, *words]
    # A launched script can import modules from its own folder; the package is in the parent folder.
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    launch = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert launch.stdout is not None
        trace = ["trace", "--summary", "--steps", str(given.steps), "--timeout", str(START_S)]
        subprocess.run(
            [sys.executable, "-m", "dflow", *trace, "--coordinator", coordinator_of_warm(launch.stdout)],
            timeout=2 * START_S,
            check=True,
        )
    finally:
        launch.terminate()
        launch.communicate(timeout=END_S)
    print(", ".join(f"{key} {value}" for key, value in machine().items()))


def coordinator_of_warm(lines: IO[str]) -> str:
    """Read the output of a launch until the worker is warm; return the coordinator's address, which comes before."""
    address, said = "", []
    for line in lines:
        said.append(line)
        if found := re.search(r"--coordinator (\S+)", line):
            address = found[1]
        if line.strip() == "[worker:0] warm":
            return address
    raise RuntimeError("the launch ended before its worker was warm:\n" + "".join(said))


if __name__ == "__main__":
    main()
