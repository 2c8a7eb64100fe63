"""A worker of `benchmarks.peers_training` by dflow: the click-through model of `_clicks`, by any of its strategies."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import dflow
from benchmarks import _clicks

#: More steps than a run of the benchmark does.
STEPS = 1_000_000


def main() -> None:
    began = time.perf_counter()
    options = _clicks.parser()
    options.add_argument("--workers", type=int, required=True)
    options.add_argument("--strategy", choices=("Async", "Sync", "Hybrid"), required=True)
    given = options.parse_args()
    cluster = dflow.connect(collectives=given.strategy == "Hybrid")
    strategy = getattr(dflow.distributed, given.strategy)(cluster)
    step = make_step(cluster, given.rows, strategy.variables if given.strategy == "Hybrid" else None)
    batches = _clicks.batches(given, cluster.index, given.workers)
    _clicks.train(strategy.run(step, batches, steps=STEPS), began)
    cluster.close()


def make_step(cluster: Any, rows: int, dense_place: Callable[[], Any] | None) -> Callable[..., Any]:
    """Return a training step, compiled; it takes a batch and returns the loss.

    dense_place  returns the context of the layers, which then have an optimizer of their own; None for the ps tasks
    """
    rule = optax.adagrad(_clicks.LEARNING_RATE, _clicks.ACCUMULATOR, _clicks.EPSILON)
    with cluster.parameter_servers():
        table = dflow.Embedding(rows, _clicks.COLUMNS, initializer=initial_table, name="table")
        if dense_place is not None:
            table_rule = dflow.Optimizer(rule, [table], name="adagrad of table")
    with cluster.parameter_servers() if dense_place is None else dense_place():
        layers = dflow.variables(_clicks.initial_layers())
        optimizer = dflow.Optimizer(rule, [table, layers] if dense_place is None else [layers], name="adagrad")

    @dflow.jit
    def step(ids: Any, numbers: Any, clicks: Any) -> Any:
        def loss() -> Any:
            x = jnp.concatenate([table(ids).reshape(len(ids), -1), numbers], 1)
            *hidden, (last, bias) = dflow.read(layers)
            for kernel, shift in hidden:
                x = jax.nn.relu(x @ kernel + shift)
            return optax.sigmoid_binary_cross_entropy((x @ last + bias)[:, 0], clicks).mean()

        value, gradients = dflow.value_and_grad(loss, [table, layers])()
        if dense_place is None:
            optimizer.apply(gradients)
        else:
            table_rule.apply(gradients[:1])
            optimizer.apply(gradients[1:])
        return value

    return step


def initial_table(_: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """`_clicks.initial_table`, computed by the tasks."""
    rows, columns = (jax.lax.broadcasted_iota(dtype, shape, axis) for axis in (0, 1))
    return _clicks.SCALE * jnp.sin(rows * shape[1] + columns)


if __name__ == "__main__":
    main()
