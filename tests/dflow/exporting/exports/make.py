"""Make the export beside this file, named after JAX, which later versions of JAX and dflow must be able to load.

    JAX_TRACEBACK_IN_LOCATIONS_LIMIT=0 python tests/dflow/exporting/exports/make.py

`expected.json` holds what the function gives in three steps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dflow

STEPS = [{"x": np.full((size, 3), size, np.float32), "y": (np.arange(size, dtype=np.int32),)} for size in (1, 4, 4)]


def make() -> Any:
    """An export of a function with an optimizer, random state, a large constant, control flow and letters in shapes."""
    table = jnp.tile(jnp.arange(200.0), (100, 1))
    w = dflow.Variable(jnp.full((3, 2), 0.5), name="layer/w")
    count = dflow.Variable(0, name="count", trainable=False)
    generator = dflow.Generator(7, name="generator")
    optimizer = dflow.Optimizer(optax.sgd(0.125, momentum=0.5), [w], name="sgd")

    @dflow.jit
    def step(batch: Any) -> Any:
        gradient = dflow.grad(lambda: ((batch["x"] @ w) ** 2).mean() / 64, [w])()
        optimizer.apply(gradient)
        jax.lax.fori_loop(0, 3, lambda i, _: count.assign_add(i), None)
        drawn = jax.random.randint(generator.split(), (), 0, 1000)
        return {"rows": table[batch["y"][0], 0], "drawn": drawn, "w": w.read(), "count": count.read()}

    return dflow.export(
        {"step": (step, {"x": dflow.spec("b, 3", jnp.float32), "y": (dflow.spec("b", jnp.int32),)})}
    ), step


def main() -> None:
    exported, step = make()
    path = exported.save(Path(__file__).parent / f"jax{jax.__version__}", overwrite=True)
    expected = [jax.tree.map(lambda array: np.asarray(array).tolist(), step(given)) for given in STEPS]
    (path / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
