"""Compare a training step of convolutional networks with plain JAX and PyTorch.

The paper's Table 1: AlexNet, Overfeat, OxfordNet and GoogleNet, full size, one step of gradient descent on one device:
by `dflow.jit` over variables; by `jax.jit` over the same functions with the parameters as a donated pytree; and by
PyTorch, eagerly and by `torch.compile`. All have the same parameters and the same batch, and their losses are compared
before the timing. Batches are the paper's on an accelerator, where bfloat16 is measured too, and small on a CPU.

PyTorch is not among the project's dependencies: without it its columns stay empty. `--compile 0` leaves out
`torch.compile`, which can take minutes to compile. `--rounds 0` compares only the programs, which does not depend on
the load of the machine; of the times, processor times depend on it the least.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dflow
from benchmarks._convnet_models import NETWORKS, RATE, Network, batch_of, initial, loss
from benchmarks._launched import last_line_of
from benchmarks._paired import in_turn, median_ratio, publish, seconds_per_call

#: Table 1 of the paper (OSDI 2016), in ms: one Titan X, 32-bit floats, the batches of convnet-benchmarks.
PAPER = {
    "AlexNet": {"Caffe": 324, "Neon": 87, "Torch": 81, "TensorFlow": 81},
    "Overfeat": {"Caffe": 823, "Neon": 211, "Torch": 268, "TensorFlow": 279},
    "OxfordNet": {"Caffe": 1068, "Neon": 320, "Torch": 529, "TensorFlow": 540},
    "GoogleNet": {"Caffe": 1935, "Neon": 270, "Torch": 470, "TensorFlow": 445},
}
#: Batch sizes that two cores process in about a second.
CPU_BATCHES = {"AlexNet": 16, "Overfeat": 8, "OxfordNet": 4, "GoogleNet": 8}

TORCH = "torch"
COMPILED = "torch.compile"

Step = Callable[[], float]


def by_dflow(network: Network, size: int, dtype: Any) -> tuple[Any, tuple[Any, Any]]:
    """Return the step over variables, and its batch."""
    params = dflow.variables(initial(network, dtype=dtype), prefix=f"{network.name}/")

    @dflow.jit
    def step(images: jax.Array, labels: jax.Array) -> jax.Array:
        def of_variables() -> jax.Array:
            return loss(network.layers, dflow.read(params), images, labels)

        value, gradients = dflow.value_and_grad(of_variables, params)()
        for name, variable in params.items():
            variable.assign_sub(RATE * gradients[name])
        return value

    return step, tuple(map(jnp.asarray, batch_of(network, size, dtype=dtype)))


def by_jax(network: Network, size: int, dtype: Any) -> tuple[Any, tuple[Any, Any], list[Any]]:
    """Return the step over a donated pytree, its batch, and the list that holds the parameters."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(params: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
        value, gradients = jax.value_and_grad(lambda params: loss(network.layers, params, images, labels))(params)
        return {name: param - RATE * gradients[name] for name, param in params.items()}, value

    held = [jax.tree.map(jnp.array, initial(network, dtype=dtype))]
    return step, tuple(map(jnp.asarray, batch_of(network, size, dtype=dtype))), held


def steps(network: Network, size: int, dtype: Any, *, compiled: bool) -> Iterator[tuple[str, Step]]:
    """Yield a step of each available framework; each returns the loss before its update."""
    with_dflow, batch = by_dflow(network, size, dtype)
    yield "dflow", lambda: float(with_dflow(*batch))
    with_jax, batch_of_jax, held = by_jax(network, size, dtype)

    def by_pytree() -> float:
        held[0], value = with_jax(held[0], *batch_of_jax)
        return float(value)

    yield "jax", by_pytree
    if find_spec("torch") is None:
        return
    from benchmarks import _convnets_torch as by_torch  # needs torch

    where = by_torch.place(dtype)
    images, labels = by_torch.images_and_labels(*batch_of(network, size), where)
    for name in [TORCH, COMPILED] if compiled else [TORCH]:
        step = by_torch.training_step(
            network, by_torch.parameters(network, initial(network), where), compiled=name == COMPILED
        )
        yield name, lambda step=step: step(images, labels).item()  # type: ignore[misc]


def refuse_other_losses(network: Network, losses: Mapping[str, list[float]], dtype: Any) -> None:
    """Exit with an error if the losses of the first steps differ between frameworks."""
    tolerance = 1e-3 if dtype == np.float32 else 5e-2
    for name, found in losses.items():
        if not np.allclose(found, losses["jax"], rtol=tolerance):
            raise SystemExit(f"{network.name}: the losses are {losses['jax']} by jax and {found} by {name}")


def row(network: Network, size: int, dtype: Any, rounds: int, *, compiled: bool) -> dict[str, Any]:
    """Return the times of a network, in ms, and the ratios round by round."""
    ways = dict(steps(network, size, dtype, compiled=compiled))
    refuse_other_losses(network, {name: [step() for _ in range(3)] for name, step in ways.items()}, dtype)
    busy: dict[str, list[float]] = {name: [] for name in ways}

    def timed(name: str) -> float:
        started = time.process_time()
        taken = seconds_per_call(ways[name], 1)
        busy[name].append(time.process_time() - started)
        return taken

    found = in_turn({name: functools.partial(timed, name) for name in ways}, rounds)
    ratio, low, high = median_ratio(found["dflow"], found["jax"])
    told: dict[str, Any] = {"network": network.name, "dtype": np.dtype(dtype).name, "batch": size}
    for name in ("dflow", "jax", TORCH, COMPILED):
        told[f"{name} ms"] = statistics.median(found[name]) * 1e3 if name in found else "-"
    told |= {"dflow / jax": ratio, "p10": low, "p90": high}
    told["of processor time"] = median_ratio(busy["dflow"], busy["jax"])[0]
    for name in (TORCH, COMPILED):
        told[f"dflow / {name}"] = median_ratio(found["dflow"], found[name])[0] if name in found else "-"
    return told


def paper_row(network: Network) -> dict[str, Any]:
    """Return the paper's figures for a network, and its ratio of TensorFlow to Torch."""
    figures = PAPER[network.name]
    told: dict[str, Any] = {"network": network.name, "batch": network.batch}
    told |= {f"{name} ms": figure for name, figure in figures.items()}
    return told | {"TensorFlow / Torch": figures["TensorFlow"] / figures["Torch"]}


def program_row(network: Network, size: int, dtype: Any) -> dict[str, Any]:
    """Compare the compiled programs of dflow and JAX, independent of the machine's load.

    The row has the peak memory of a step, in MB, by XLA's analysis and as resident memory of a separate process, and
    XLA's counts of operations and of bytes read and written.
    """
    told: dict[str, Any] = {"network": network.name, "dtype": np.dtype(dtype).name, "batch": size}
    measured = {way: _measured_alone(network, size, dtype, way) for way in ("dflow", "jax")}
    for what in ("analysed", "resident"):
        told |= {f"{way} {what} MB": found[what] for way, found in measured.items()}
    for what in ("analysed", "resident", "flops", "bytes accessed"):
        ours, theirs = measured["dflow"][what], measured["jax"][what]
        told[f"{what} ratio"] = ours / theirs if isinstance(ours, float) and isinstance(theirs, float) else "-"
    return told


def _measured_alone(network: Network, size: int, dtype: Any, way: str) -> dict[str, Any]:
    words = ["--program-of", way, network.name, str(size), np.dtype(dtype).name]
    found: dict[str, Any] = json.loads(last_line_of("convnets", words, timeout_s=1800))
    return found


def measure_program(way: str, name: str, size: int, dtype: Any) -> dict[str, Any]:
    """Measure memory, operations and bytes of a step's program in this process."""
    network = next(network for network in NETWORKS if network.name == name)
    if way == "dflow":
        step, batch = by_dflow(network, size, dtype)
        compiled = step.lower(*batch).compile()
        run = functools.partial(compiled, *batch)
    else:
        step, batch, held = by_jax(network, size, dtype)
        compiled = step.lower(held[0], *batch).compile()

        def run() -> jax.Array:
            held[0], value = compiled(held[0], *batch)
            return value

    float(run())
    _forget_the_peak()
    for _ in range(2):
        float(run())
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    told = {"analysed": (total + memory.temp_size_in_bytes) / 1e6, "resident": _peak_mb()}
    return told | {what: float(cost[what]) for what in ("flops", "bytes accessed")}


def _forget_the_peak() -> None:
    path = Path("/proc/self/clear_refs")
    if path.exists():
        path.write_text("5")  # Linux: reset the peak of resident memory


def _peak_mb() -> float | str:
    status = Path("/proc/self/status")
    if not status.exists() or jax.default_backend() != "cpu":
        return "-"
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


def shown(found: dict[str, Any]) -> dict[str, Any]:
    """Print a row immediately and return it: the whole table takes long, and the run may be interrupted."""
    print({key: round(value, 3) if isinstance(value, float) else value for key, value in found.items()}, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="write the figures to benchmarks/results/")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--compile", type=int, default=1, help="0 leaves torch.compile out")
    parser.add_argument("--networks", nargs="+", default=[network.name for network in NETWORKS])
    parser.add_argument("--program-of", nargs=4, metavar=("WAY", "NETWORK", "BATCH", "DTYPE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.program_of:
        way, name, size, dtype = given.program_of
        print(json.dumps(measure_program(way, name, int(size), np.dtype(dtype))))
        return
    on_cpu = jax.default_backend() == "cpu"
    chosen = [network for network in NETWORKS if network.name in given.networks]
    cases = [
        (network, CPU_BATCHES[network.name] if on_cpu else network.batch, dtype)
        for network in chosen
        for dtype in ([np.float32] if on_cpu else [np.float32, jnp.bfloat16])
    ]
    print(f"on {jax.devices()[0].device_kind}")
    if find_spec("torch") is None:
        print("torch is not installed here, so its columns are empty")
    publish("paper's Table 1", [paper_row(network) for network in chosen], as_json=False)
    if given.rounds:
        rows = [shown(row(*case, given.rounds, compiled=bool(given.compile))) for case in cases]
        publish("convnets", rows, as_json=given.json)
    publish("convnets_programs", [shown(program_row(*case)) for case in cases], as_json=given.json)


if __name__ == "__main__":
    main()
