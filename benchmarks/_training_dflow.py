"""A worker that trains a model of `_models` by dflow, on a cluster or standalone.

With `--synchronous`, the steps are those of `dflow.distributed.Sync`, with `--all-reduce` those of `AllReduce`.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any

import optax

import dflow
from benchmarks._losses import LOSSES
from benchmarks._models import LEARNING_RATE, MODELS, Model
from benchmarks._train import train


def main() -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, default="dense")
    for name in ("layers", "width"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--synchronous", action="store_true")
    parser.add_argument("--all-reduce", action="store_true")
    given = parser.parse_args()
    model, loss = MODELS[given.model](given.layers, given.width), LOSSES[given.model]
    cluster = dflow.connect(collectives=given.all_reduce)
    strategy = dflow.distributed.AllReduce(cluster) if given.all_reduce else dflow.distributed.Sync(cluster)
    place = strategy.variables if given.all_reduce else cluster.parameter_servers
    step = make_step(place, model, loss)
    if given.synchronous or given.all_reduce:
        rounds = strategy.run(step, itertools.repeat(model.batch), steps=1_000_000)
        train(lambda: float(next(rounds)), began)
    else:
        train(lambda: float(step(*model.batch)), began)
    cluster.close()


def make_step(place: Callable[[], Any], model: Model, loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return a training step of the model with Adam, compiled; it takes a batch and returns the loss.

    place  returns the context that the variables are made in
    """
    with place():
        variables = dflow.variables(model.initial)
        optimizer = dflow.Optimizer(optax.adam(LEARNING_RATE), variables, name="adam")

    @dflow.jit
    def step(*batch: Any) -> Any:
        value, gradients = dflow.value_and_grad(lambda: loss(dflow.read(variables), *batch), variables)()
        optimizer.apply(gradients)
        return value

    return step


if __name__ == "__main__":
    main()
