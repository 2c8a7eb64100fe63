"""The worker of `benchmarks.many_variables` by dflow, standalone or on a cluster."""

from __future__ import annotations

import sys
import time
from typing import Any

import optax

import dflow
from benchmarks._models import LEARNING_RATE, dense
from benchmarks._rounds import train


def main() -> None:
    began = time.perf_counter()
    model = dense(int(sys.argv[1]))
    cluster = dflow.connect()
    with cluster.parameter_servers():
        variables = dflow.variables(model.initial)
        optimizer = dflow.Optimizer(optax.adam(LEARNING_RATE), variables, name="adam")

    @dflow.jit
    def step(*batch: Any) -> Any:
        value, gradients = dflow.value_and_grad(lambda: model.loss(dflow.read(variables), *batch), variables)()
        optimizer.apply(gradients)
        return value

    train(lambda: float(step(*model.batch)), began)
    cluster.close()


if __name__ == "__main__":
    main()
