"""Small training runs with loggers, and the warnings that they give."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.distributed import Async
from dflow.loggers.logger import Logger
from tests.distributed.waiting import DEADLINE_S

ROWS = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)


class Later:
    """A scalar of a step that the device has not computed yet."""

    shape, dtype = (), np.dtype(np.float32)

    def __init__(self) -> None:
        self.is_computed = threading.Event()

    def __float__(self) -> float:
        assert self.is_computed.wait(DEADLINE_S)
        return 2.5


def trained(callbacks: list[Any], steps: int = 4, cluster: Any = None, folder: Path | None = None) -> None:
    """Train a small model, with an evaluation after every second step and a checkpoint after every fourth."""
    cluster = cluster or dflow.connect()
    with cluster.parameter_servers():
        w = dflow.Variable(lambda: jnp.zeros(3), name="w")
        optimizer = dflow.Optimizer(optax.sgd(0.1), [w], name="sgd")

    @dflow.jit
    def step(x: Any) -> Any:
        loss, gradients = dflow.value_and_grad(lambda: jnp.mean((x @ w - 1) ** 2), [w])()
        optimizer.apply(gradients)
        return {"loss": loss, "gradient": gradients[0]}

    errors = dflow.jit(lambda x: jnp.mean((x @ w - 1) ** 2))
    manager = dflow.CheckpointManager(folder, {"w": w}, every=4) if folder else None
    trainer = dflow.Trainer(
        step, Async(cluster), evaluation=(errors, [ROWS]), evaluate_every=2, checkpoints=manager, callbacks=callbacks
    )
    try:
        trainer.run(lambda number: ROWS, steps=steps, name="run")
    finally:
        if manager:
            manager.close()


def warned(text: str, call: Callable[[], Any]) -> None:
    """Call, and expect one warning that matches, at a line of the test."""
    with pytest.warns(RuntimeWarning, match=text) as caught:
        call()
    assert all(Path(one.filename).name.startswith("test_") for one in caught)


def write(log: Logger, *entries: tuple[int, Any]) -> None:
    """Log each step's values and flush: the thread may meet what it warns of before the flush, or in it."""
    for step, values in entries:
        log.log(step, values)
    log.flush()
