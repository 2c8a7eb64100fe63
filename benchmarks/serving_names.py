"""How many requests with names a second `dflow serve` answers over HTTP and gRPC, beside MLServer and Triton.

A model with a table of names and two dense layers scores rows of 16 names, and each request has one row, as strings. It
is trained and exported once by dflow, with a vocabulary of the names, and served by

- `dflow`: `dflow serve`, with batches of at most 16 rows
- `MLServer`: the same numbers, with a dict from names to rows and a program of JAX, if `--mlserver` names the server's
  command; alone, and with its batches
- `Triton`: likewise in its backend for Python, with its batches, if `--triton` names the folder `site-packages` of an
  environment with nvidia-pytriton, which brings the server, JAX, and NumPy before 2, which its backend needs

All answers are compared before. MLServer takes no strings in binary form over HTTP. The servers run at the same time,
and are loaded one after the other by clients on the same cores, as `benchmarks.serving` has them; `ratio` is the median
of dflow's requests/s over a server's in the same round, in the same protocol and, for HTTP, dflow's binary form.
`make bench-serving` makes both environments.
"""

from __future__ import annotations

import json
import struct
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dflow
from benchmarks._paired import in_turn, median_ratio, options, publish
from benchmarks._serving_load import Load, answer_of, free_ports, load, port_of, request_of, row, running
from dflow.serving.grpc_messages import MESSAGES

#: Names in a request, columns of the table, and units of the hidden layer.
IN_ROW, COLUMNS, UNITS = 16, 16, 64
#: Requests that a client repeats.
REQUESTS = 32
HERE = Path(__file__).parent
#: Names that get rows in one step.
_STEP = 4096


def train_and_export(folder: Path, count: int) -> list[str]:
    """Write the export, and the same numbers for other servers beside it; return the names."""
    random = np.random.default_rng(0)
    names = [f"user-{number}" for number in random.choice(10 * count, count, replace=False)]
    table = dflow.Embedding(2 * count, COLUMNS, name="table", vocabulary=dflow.Vocabulary())
    shapes = {"hidden": (IN_ROW * COLUMNS, UNITS), "out": (UNITS,)}
    hidden, out = (
        dflow.Variable(jnp.asarray(random.normal(size=shape).astype(np.float32) / 8), name=name)
        for name, shape in shapes.items()
    )
    rate = dflow.Optimizer(optax.sgd(0.1), [table], name="sgd")

    @dflow.jit
    def step(ids: Any) -> None:
        found = table.find(ids)
        rate.apply(dflow.grad(lambda: jnp.sum(table(found) ** 2), [table])(), found=found)

    for start in range(0, count, _STEP):
        step(np.resize(names[start : start + _STEP], _STEP))

    def score(names: Any) -> Any:
        rows = table(names).reshape(names.shape[0], -1)
        return jax.nn.relu(rows @ hidden) @ out

    dflow.export(score, dflow.spec(f"b, {IN_ROW}", np.str_), platforms=["cpu"]).save(folder / "model")
    values = {"names": np.array(names), "table": table(names), "hidden": hidden.read(), "out": out.read()}
    np.savez(folder / "values.npz", **values)
    return names


def requests_of(form: str, model: str, names: Sequence[str]) -> list[bytes]:
    """Return the bytes of requests with one row each of these names."""
    rows = [names[start : start + IN_ROW] for start in range(0, len(names), IN_ROW)]
    tensor = {"name": "names", "shape": [1, IN_ROW], "datatype": "BYTES"}
    contents = (b"".join(struct.pack("<I", len(name)) + name.encode() for name in one) for one in rows)
    return [request_of(form, model, tensor, content, one) for content, one in zip(contents, rows, strict=True)]


def score_in(form: str, body: bytes) -> float:
    """Return the one number in the body of an answer."""
    if form == "JSON":
        return float(json.loads(body)["outputs"][0]["data"][0])
    if form == "gRPC":
        answer = MESSAGES["ModelInferResponse"].FromString(body)
        content = b"".join(answer.raw_output_contents)
        return float(np.frombuffer(content, np.float32)[0] if content else answer.outputs[0].contents.fp32_contents[0])
    return float(np.frombuffer(body[-4:], np.float32)[0])


Ports = dict[tuple[str, str], tuple[int, str]]


def start_dflow(stack: ExitStack, folder: Path) -> Ports:
    """Start `dflow serve`; return the port and the model by server and form."""
    words = (sys.executable, "-m", "dflow", "serve", str(folder / "model"), "--max-queue", "1000", "--max-batch", "16")
    server = stack.enter_context(running(*words, "--address", "127.0.0.1:0", "--grpc", "127.0.0.1:0"))
    port = port_of(server)
    found = {("dflow", form): (port, "model") for form in ("binary", "JSON")}
    return {**found, ("dflow", "gRPC"): (port_of(server, "gRPC at "), "model")}


def start_mlserver(stack: ExitStack, folder: Path, command: str) -> Ports:
    """Start MLServer with the model alone, and with batches."""
    port, place = free_ports(), folder / "mlserver"
    settings = {"host": "127.0.0.1", "http_port": port, "grpc_port": port + 1, "metrics_port": port + 2,
                "parallel_workers": 0, "debug": False}  # fmt: skip
    runtime = {"implementation": "_serving_mlserver.Names", "parameters": {"uri": str(folder)}}
    batches = {"max_batch_size": 16, "max_batch_time": 0.002}
    for name, more in (("model", {}), ("batched", batches)):
        (place / name).mkdir(parents=True)
        (place / name / "model-settings.json").write_text(json.dumps({"name": name, **runtime, **more}))
    (place / "settings.json").write_text(json.dumps(settings))
    silent(stack, command, "start", str(place), PYTHONPATH=str(HERE))
    both = {"MLServer": "model", "MLServer, batches": "batched"}
    return {
        (server, form): (port + (form == "gRPC"), model) for server, model in both.items() for form in ("JSON", "gRPC")
    }


def start_triton(stack: ExitStack, folder: Path, packages: Path) -> Ports:
    """Start Triton with the model in its backend for Python."""
    port, place, server = free_ports(), folder / "triton" / "model", packages / "pytriton" / "tritonserver"
    (place / "1").mkdir(parents=True)
    # Its Python reads no PYTHONPATH.
    own = f"import sys\nsys.path[:0] = {[str(HERE), str(packages)]}\nfrom _serving_triton import TritonPythonModel\n"
    (place / "1" / "model.py").write_text(own)
    (place / "config.pbtxt").write_text(
        f'''backend: "python"
max_batch_size: 16
dynamic_batching {{ max_queue_delay_microseconds: 2000 }}
input {{ name: "names" data_type: TYPE_STRING dims: {IN_ROW} }}
output {{ name: "result" data_type: TYPE_FP32 dims: 1 }}
parameters {{ key: "folder" value {{ string_value: "{folder}" }} }}
'''
    )
    backend, version = folder / "backends" / "python", packages.parent.name.removeprefix("python")
    backend.mkdir(parents=True)
    for part in (*(server / "backends" / "python").iterdir(), *(server / "python_backend_stubs" / version).iterdir()):
        (backend / part.name).symlink_to(part)
    words = {
        "model-repository": place.parent, "backend-directory": backend.parent, "http-port": port, "grpc-port": port + 1,
        "metrics-port": port + 2, "http-address": "127.0.0.1", "grpc-address": "127.0.0.1",
    }  # fmt: skip
    silent(stack, str(server / "bin" / "tritonserver"), *(f"--{key}={word}" for key, word in words.items()))
    return {("Triton, batches", form): (port + (form == "gRPC"), "model") for form in ("binary", "JSON", "gRPC")}


def silent(stack: ExitStack, *words: str, **settings: str) -> None:
    """Start a server whose log is read and dropped."""
    server = stack.enter_context(running(*words, **settings))
    threading.Thread(target=lambda: [None for _ in server.stdout or ()], daemon=True).start()


def main() -> None:
    given = options(__doc__, rounds=3, clients=16, milliseconds=3000, names=100_000, mlserver=None, triton=None)
    seconds = given.milliseconds / 1e3
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        names = train_and_export(folder, given.names)
        ports = start_dflow(stack, folder)
        if given.mlserver:
            ports |= start_mlserver(stack, folder, given.mlserver)
        if given.triton:
            ports |= start_triton(stack, folder, Path(given.triton).resolve())
        drawn = np.random.default_rng(1).choice(names, (given.clients, REQUESTS * IN_ROW)).tolist()
        ways, scores = {}, {}
        for (server, form), (port, model) in ports.items():
            requests = [requests_of(form, model, own) for own in drawn]
            scores[server, form] = score_in(form, answer_of(port, form, requests[0][0]))
            ways[f"{server}|{form}"] = lambda port=port, form=form, to=requests: load(port, form, to, seconds)
        np.testing.assert_allclose([*scores.values()], scores["dflow", "binary"], rtol=1e-4)
        measured = in_turn(ways, given.rounds)
    rows = [row(way, times, seconds) | {"ratio": ratio_of(way, measured)} for way, times in measured.items()]
    publish("serving_names", rows, as_json=given.json)


def ratio_of(way: str, measured: dict[str, list[Load]]) -> float:
    """Return dflow's requests/s over those of a way in the same protocol: the median of the rounds."""
    own = "dflow|gRPC" if way.endswith("gRPC") else "dflow|binary"
    rates = {name: [len(one.times_s) for one in measured[name]] for name in (way, own)}
    return median_ratio(rates[own], rates[way])[0]


if __name__ == "__main__":
    main()
