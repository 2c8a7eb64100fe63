"""A program of `AllReduce`, for a test and for the scripts of its workers, which begin with this file's text."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dflow

#: Batches of all workers together.
ROWS = 12
_DRAWN = np.random.default_rng(1)
DATA = [(_DRAWN.normal(size=(ROWS, 4)), _DRAWN.normal(size=(ROWS, 8))) for _ in range(12)]


def part_of(strategy: Any, number: int) -> tuple[Any, Any]:
    index, count = strategy.part
    x, y = (array.astype(np.float32) for array in DATA[number])
    mine = slice(index * ROWS // count, (index + 1) * ROWS // count)
    return x[mine], y[mine]


class TableProgram:
    """A table on the parameter tasks, and dense layers in the workers."""

    def __init__(self, cluster: Any, strategy: Any) -> None:
        self.strategy = strategy
        with cluster.parameter_servers():
            self.table = dflow.Variable(lambda: jax.random.normal(jax.random.key(1), (50, 4)), name="table")
            self.of_table = dflow.Optimizer(optax.adagrad(0.1), [self.table], name="adagrad")
        with strategy.variables():
            self.w = dflow.Variable(lambda: jax.random.normal(jax.random.key(0), (4, 8)), name="dense")
            self.optimizer = dflow.Optimizer(optax.adam(0.1), [self.w], name="of dense")
            self.seen = dflow.Variable(np.zeros(8, np.float32), name="moving mean")
            self.steps = dflow.Variable(0, name="steps")

        @dflow.jit
        def step(ids: Any, y: Any) -> Any:
            self.seen.assign(0.9 * self.seen + 0.1 * jnp.mean(y, 0))
            self.steps.assign_add(1)

            def loss() -> Any:
                return jnp.mean((self.table[ids] @ self.w - y) ** 2)

            value, (dense, table) = dflow.value_and_grad(loss, [[self.w], [self.table]])()
            self.optimizer.apply(dense)
            self.of_table.apply(table)
            return value

        self.step = step

    def train(self) -> list[float]:
        parts = [part_of(self.strategy, number) for number in range(4)]
        ids = [(np.abs(x[:, 0]) * 20).astype(np.int32) for x, _ in parts]
        batches = [(one, y) for one, (_, y) in zip(ids, parts, strict=True)]
        assert len(list(self.strategy.run(self.step, batches, steps=4, name="table"))) == 4
        state = self.table, self.w, self.seen, self.steps
        return [float(jnp.sum(variable.read() ** 2)) for variable in state]


class Program:
    """A model and its training step under a strategy; `spec` is that of the kernel."""

    def __init__(self, strategy: Any, name: str, spec: Any = None) -> None:
        assert strategy.batches_per_step == strategy.part[1]
        self.strategy, self.name = strategy, name
        with strategy.variables():
            # The last dimension is the larger one.
            self.w = dflow.Variable(
                lambda: jax.random.normal(jax.random.key(0), (4, 8)), name=f"{name}/w", sharding=spec
            )
            self.b = dflow.Variable(np.zeros(8, np.float32), name=f"{name}/b")
            self.generator = dflow.Generator(3, name=f"{name}/generator")
            self.optimizer = dflow.Optimizer(optax.adam(0.1), {"w": self.w, "b": self.b}, name=f"{name}/adam")

        @dflow.jit
        def step(x: Any, y: Any, scale: Any) -> Any:
            def loss() -> Any:
                noise = jax.random.normal(self.generator.split(), (8,))
                return scale * jnp.mean((x @ self.w + self.b + noise - y) ** 2)

            value, gradients = dflow.value_and_grad(loss, {"w": self.w, "b": self.b})()
            self.optimizer.apply(gradients)
            return {"loss": value}

        self.step = step

    @property
    def state(self) -> list[Any]:
        return [self.w, self.b, self.generator, self.optimizer]

    def train(self) -> list[float]:
        batches = [(*part_of(self.strategy, number), np.float32(0.5)) for number in range(4)]
        run = self.strategy.run(self.step, batches, steps=4, name=self.name)
        return [float(metrics["loss"]) for metrics in run]


#: Optimizers with slots that begin at values of the parameters.
MAKERS = {
    "prodigy": optax.contrib.prodigy,
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(0.1),
    "mechanize": lambda: optax.contrib.mechanize(optax.adam(0.1)),
}


def sum_by_optimizer(strategy: Any, kind: str) -> float:
    with strategy.variables():
        w = dflow.Variable(np.linspace(-1, 1, 8, dtype=np.float32).reshape(4, 2), name=f"{kind}/w")
        optimizer = dflow.Optimizer(MAKERS[kind](), [w], name=kind)

    @dflow.jit
    def step(x: Any, y: Any) -> None:
        optimizer.apply(dflow.grad(lambda: jnp.mean((x @ w - y[:, :2]) ** 2), [w])())

    batches = [part_of(strategy, number) for number in range(2)]
    assert len([*strategy.run(step, batches, steps=2, name=kind)]) == 2
    return float(jnp.abs(w.read()).sum())
