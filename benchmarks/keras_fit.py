"""Measure `fit` of a Keras model on parameter servers: examples/s of a ranking model with embeddings and an AUC.

Each of `--workers` workers trains asynchronously on batches of `--batch` ratings; two parameter tasks have the
variables. Each task is a process, on this machine. An epoch has `--steps` steps; the first is left out, which compiles.

`--beside PYTHON` names an environment with TensorFlow and `tf_keras`, whose ParameterServerStrategy then runs `fit` of
the same model on a cluster of as many processes and a coordinator, each run after one of dflow's. Keras 3 has no such
strategy.

    python3 -m venv .venv-tensorflow && .venv-tensorflow/bin/pip install 'tensorflow-cpu==2.21.*' tf_keras
    python -m benchmarks.keras_fit --beside .venv-tensorflow/bin/python
"""

from __future__ import annotations

import statistics
import subprocess
from importlib.util import find_spec
from typing import Any

from benchmarks._launched import ROOT, figures_in, launched
from benchmarks._paired import median_ratio, options, publish
from benchmarks.null_step import free_ports

PS = 2
RUN_S = 900


def main() -> None:
    given = options(__doc__, rounds=3, workers=2, batch=1024, steps=200, epochs=4, beside=None)
    if find_spec("keras") is None:
        print("keras_fit: skipped, since Keras is not installed")
        return
    words = [word for name in ("batch", "steps", "epochs") for word in (f"--{name}", str(getattr(given, name)))]
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    for _ in range(given.rounds):
        ours.append(by_dflow(words, given.workers))
        if given.beside:
            theirs.append(by_tensorflow(words, given.workers, given.beside))
    examples = given.batch * given.steps

    def rates(found: list[dict[str, Any]]) -> list[float]:
        return [examples / statistics.median(run["epochs_s"]) for run in found]

    row = {"workers": given.workers, "batch": given.batch, "examples/s": statistics.median(rates(ours))}
    row["AUC"] = statistics.median(run["auc"] for run in ours)
    if theirs:
        ratio, low, high = median_ratio(rates(ours), rates(theirs))
        row |= {"TensorFlow examples/s": statistics.median(rates(theirs))}
        row |= {"/ TensorFlow": ratio, "p10": low, "p90": high}
        row["TensorFlow AUC"] = statistics.median(run["auc"] for run in theirs)
    publish("keras_fit", [row], as_json=given.json)


def by_dflow(words: list[str], workers: int) -> dict[str, Any]:
    """Return the seconds of each epoch after the first, and the last AUC, by dflow."""
    ended = launched("_keras_fit_dflow.py", words, ps=PS, workers=workers, timeout_s=RUN_S)
    return figures_in(ended.stdout + ended.stderr)


def by_tensorflow(words: list[str], workers: int, python: str) -> dict[str, Any]:
    """Return the same of TensorFlow's ParameterServerStrategy."""
    addresses = [f"localhost:{port}" for port in free_ports(PS + workers + 1)]
    spec = ["--ps", *addresses[:PS], "--workers", *addresses[PS:-1], "--chief", addresses[-1]]
    command = [python, str(ROOT / "benchmarks" / "_keras_fit_tensorflow.py"), *words, *spec]
    servers = [("ps", index) for index in range(PS)] + [("worker", index) for index in range(workers)]
    running = [
        subprocess.Popen([*command, "--job", job, "--index", str(index)], stderr=subprocess.DEVNULL)
        for job, index in servers
    ]
    try:
        ended = subprocess.run([*command, "--job", "chief"], capture_output=True, text=True, timeout=RUN_S, check=False)
    finally:
        for server in running:
            server.kill()
            server.wait()
    return figures_in(ended.stdout + ended.stderr)


if __name__ == "__main__":
    main()
