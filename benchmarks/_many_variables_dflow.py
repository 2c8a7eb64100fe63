"""The worker of `benchmarks.many_variables` by dflow, standalone or on a cluster: a model's name and its layers."""

from __future__ import annotations

import sys
import time
from typing import Any

import optax

import dflow
from benchmarks._losses import LOSSES
from benchmarks._models import LEARNING_RATE, MODELS
from benchmarks._train import train


def main() -> None:
    began = time.perf_counter()
    name, layers = sys.argv[1], int(sys.argv[2])
    model, loss = MODELS[name](layers), LOSSES[name]
    cluster = dflow.connect()
    with cluster.parameter_servers():
        variables = dflow.variables(model.initial)
        optimizer = dflow.Optimizer(optax.adam(LEARNING_RATE), variables, name="adam")

    @dflow.jit
    def step(*batch: Any) -> Any:
        value, gradients = dflow.value_and_grad(lambda: loss(dflow.read(variables), *batch), variables)()
        optimizer.apply(gradients)
        return value

    train(lambda: float(step(*model.batch)), began)
    cluster.close()


if __name__ == "__main__":
    main()
