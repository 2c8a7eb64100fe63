"""How many requests a second `dflow serve` answers over HTTP and gRPC, and how late, beside others.

One model, a small classifier, is exported once, and served by

- `dflow`: `dflow serve`, each request alone; and with batches of at most 16 rows
- `by hand`: the program called by `jax.export` in a starlette app of 15 lines, which takes raw numbers
- `MLServer`: the same program in a custom runtime, if `--mlserver` names its command, of an environment that has JAX

All servers run at the same time, and are loaded one after the other; `--alone` runs the one with batches. The clients
are threads of one process, each with one kept connection, that send a row and wait for the answer. They run on the same
cores as the server. Those of HTTP are sockets that send prepared bytes; those of gRPC use `grpcio`, which takes more of
the cores: `client, us` is the clients' processor time for a request. Then the server with batches is loaded again while
every second client sends bad requests, and its memory is read before and after.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import dflow
from benchmarks._paired import in_turn, options, publish
from benchmarks._serving_load import answer_of, free_ports, load, memory_mib, port_of, request_of, row, running


def export_classifier(path: Path, width: int) -> None:
    """Write a classifier of 784 inputs with one hidden layer, and its variables beside it."""
    random = np.random.default_rng(0)
    values = {
        "first": np.float32(random.normal(size=(784, width)) / 28),
        "second": np.float32(random.normal(size=(width, 10)) / width**0.5),
    }
    first, second = (dflow.Variable(jnp.asarray(value), name=name) for name, value in values.items())

    def classify(x: jax.Array) -> jax.Array:
        return jax.nn.softmax(jax.nn.relu(x @ first) @ second)

    dflow.export(classify, dflow.spec("b, 784", jnp.float32)).save(path)
    np.savez(path.parent / "values.npz", **values)


def classify_request(form: str, *, is_bad: bool = False) -> bytes:
    """Return the bytes of a request for one row."""
    values = np.random.default_rng(1).normal(size=784).astype(np.float32)
    tensor = {"name": "y" if is_bad else "x", "shape": [1, 784], "datatype": "FP32"}
    return request_of(form, "model", tensor, values.tobytes(), values.tolist())


def mlserver_folder(folder: Path, model: Path, port: int) -> Path:
    """Write the settings of MLServer for the model, and return their folder."""
    folder.mkdir()
    (folder / "settings.json").write_text(
        json.dumps({"host": "127.0.0.1", "http_port": port, "grpc_port": port + 1, "metrics_port": port + 2,
                    "parallel_workers": 0, "debug": False})
    )  # fmt: skip
    runtime = {"name": "model", "implementation": "_serving_mlserver.Classifier", "parameters": {"uri": str(model)}}
    (folder / "model-settings.json").write_text(json.dumps(runtime))
    return folder


def main() -> None:
    given = options(__doc__, rounds=3, clients=16, milliseconds=3000, width=2048, mlserver=None, alone=False)
    seconds = given.milliseconds / 1e3
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        export_classifier(folder / "model", given.width)
        python = (sys.executable, "-m")
        where = ("--address", "127.0.0.1:0", "--grpc", "127.0.0.1:0")
        serve = (*python, "dflow", "serve", str(folder / "model"), *where, "--max-queue", "1000")
        batched = stack.enter_context(running(*serve, "--max-batch", "16"))
        ports = {
            ("dflow, batches", "binary"): port_of(batched),
            ("dflow, batches", "gRPC"): port_of(batched, "gRPC at "),
        }
        if not given.alone:
            by_hand = stack.enter_context(running(*python, "benchmarks._serving_bare", str(folder / "model")))
            plain = stack.enter_context(running(*serve))
            ports |= {("by hand", "raw"): port_of(by_hand), ("dflow", "binary"): port_of(plain)}
            ports["dflow", "gRPC"] = port_of(plain, "gRPC at ")
            ports["dflow, batches", "JSON"] = ports["dflow, batches", "binary"]
        if given.mlserver:
            port = ports["MLServer", "JSON"] = free_ports()
            ports["MLServer", "gRPC"] = port + 1
            words = given.mlserver, "start", str(mlserver_folder(folder / "ml", folder / "model", port))
            server = stack.enter_context(running(*words, PYTHONPATH=str(Path(__file__).parent)))
            threading.Thread(target=lambda: [None for _ in server.stdout or ()], daemon=True).start()  # its log
        for (_, form), port in ports.items():
            answer_of(port, form, classify_request(form))
        measured = in_turn(
            {f"{name}|{form}": lambda port=port, form=form: load(
                port, form, [[classify_request(form)]] * given.clients, seconds
            ) for (name, form), port in ports.items()}, given.rounds,
        )  # fmt: skip
        rows = [row(way, times, seconds) for way, times in measured.items()]
        before = memory_mib(batched)
        port = ports["dflow, batches", "binary"]
        mixed = [[classify_request("binary", is_bad=number % 2 == 1)] for number in range(given.clients)]
        statuses = load(port, "binary", mixed, 3 * seconds).statuses
        good, bad = statuses.pop(200), statuses.pop(400)
        under_errors = {
            "clients": given.clients, "good answers": good, "refused": bad, "other": statuses.total(),
            "MiB before": before, "MiB after": memory_mib(batched),
        }  # fmt: skip
    publish("serving_errors", [under_errors], as_json=given.json)
    publish("serving", rows, as_json=given.json)


if __name__ == "__main__":
    main()
