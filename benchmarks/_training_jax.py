"""A worker of `benchmarks.peers_training` by JAX alone: its multi-process runtime over gloo, and data parallelism.

The parameters and Adam's slots are on all processes, and are donated to the step.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks._losses import LOSSES
from benchmarks._models import LEARNING_RATE, MODELS
from benchmarks._train import train


def main() -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, default="dense")
    for name in ("layers", "width", "index", "workers", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = parser.parse_args()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{given.port}", given.workers, given.index)
    model, loss_of = MODELS[given.model](given.layers, given.width), LOSSES[given.model]
    mesh = jax.make_mesh((given.workers,), ("data",))
    everywhere, divided = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    rule = optax.adam(LEARNING_RATE)
    parameters = jax.tree.map(lambda value: jax.make_array_from_process_local_data(everywhere, value), model.initial)
    slots = jax.jit(rule.init, out_shardings=everywhere)(parameters)

    def updated(parameters: Any, slots: Any, *batch: np.ndarray) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(parameters, *batch)
        updates, slots = rule.update(gradients, slots, parameters)
        return optax.apply_updates(parameters, updates), slots, loss

    compiled = jax.jit(updated, donate_argnums=(0, 1), out_shardings=everywhere)

    def step() -> float:
        nonlocal parameters, slots
        batch = (jax.make_array_from_process_local_data(divided, value) for value in model.batch)
        parameters, slots, loss = compiled(parameters, slots, *batch)
        return float(loss)

    train(step, began)


if __name__ == "__main__":
    main()
