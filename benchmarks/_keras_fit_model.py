"""The ranking model of `benchmarks.keras_fit`, for Keras 3 and for TensorFlow's Keras 2, and its data."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

USERS, FILMS, SIZE = 6040, 3706, 32


def ratings(count: int) -> tuple[dict[str, Any], Any]:
    """Draw ratings in the shape of MovieLens 1M: users and films i32[count], and whether a film is liked."""
    drawn = np.random.default_rng(0)
    tastes, kinds = drawn.normal(size=(USERS, 4)), drawn.normal(size=(FILMS, 4))
    users = drawn.integers(USERS, size=count, dtype=np.int32)
    films = (FILMS * drawn.random(count) ** 3).astype(np.int32)
    liked = (tastes[users] * kinds[films]).sum(1) + 0.5 * drawn.normal(size=count) > 0
    return {"user": users, "film": films}, liked[:, None].astype(np.float32)


def make_model(keras: Any) -> Any:
    """Embed the user and the film, and predict from both whether it is liked."""
    inputs = {name: keras.Input((), dtype="int32", name=name) for name in ("user", "film")}
    both = [keras.layers.Embedding(rows, SIZE)(inputs[name]) for name, rows in (("user", USERS), ("film", FILMS))]
    hidden = keras.layers.Concatenate()(both)
    for width in (256, 64):
        hidden = keras.layers.Dense(width, activation="relu")(hidden)
    return keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(hidden), name="ranking")


def compile_arguments(keras: Any) -> dict[str, Any]:
    """Optimizer, loss and metrics."""
    return {
        "optimizer": keras.optimizers.Adagrad(0.1),
        "loss": "binary_crossentropy",
        "metrics": ["accuracy", keras.metrics.AUC(name="auc")],
    }


def epoch_times(keras: Any) -> Any:
    """Return a callback whose `figures` are the seconds of each epoch after the first, and the last AUC."""

    class Times(keras.callbacks.Callback):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.figures: dict[str, Any] = {"epochs_s": []}

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.begun_s = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch:
                self.figures["epochs_s"].append(time.perf_counter() - self.begun_s)
            self.figures["auc"] = float(logs["auc"])

    return Times()
