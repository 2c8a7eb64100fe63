"""Models to train: initial values and a batch, the same in every process and runtime. The file imports no runtime."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LEARNING_RATE = 1e-4
BATCH = 32
HEADS, TOKENS, WORDS = 4, 16, 64


@dataclass(frozen=True)
class Model:
    """Initial values by name, in the order of the layers, and a batch: the arguments of a loss in `_losses`."""

    initial: dict[str, np.ndarray]
    batch: tuple[np.ndarray, ...]


def dense(layers: int, width: int) -> Model:
    """Return a model of layers that add the ReLU of a product to their input, so that any number of them trains."""
    draw = np.random.default_rng(0)
    initial = {f"w{number:04}": normal(draw, width, width, scale=1 / layers**2) for number in range(layers)}
    return Model(initial, (normal(draw, BATCH, width) * width**0.5, normal(draw, BATCH, width) * width**0.5))


def transformer(layers: int, width: int) -> Model:
    """Return a transformer that predicts the next word, with 12 variables in a layer."""
    draw = np.random.default_rng(0)
    initial = {"words": normal(draw, WORDS, width), "places": normal(draw, TOKENS, width)}
    for number in range(layers):
        block = {
            "scale1": np.ones(width, np.float32),
            "shift1": np.zeros(width, np.float32),
            **{name: normal(draw, width, width) for name in ("query", "key", "value", "out")},
            "scale2": np.ones(width, np.float32),
            "shift2": np.zeros(width, np.float32),
            "up": normal(draw, width, 4 * width),
            "up_bias": np.zeros(4 * width, np.float32),
            "down": normal(draw, 4 * width, width),
            "down_bias": np.zeros(width, np.float32),
        }
        initial |= {f"{number:02}/{name}": value for name, value in block.items()}
    return Model(initial, (draw.integers(WORDS, size=(8, TOKENS + 1), dtype=np.int32),))


def normal(draw: np.random.Generator, rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
    """Draw float32 numbers whose variance is `scale / rows`."""
    return draw.normal(0, (scale / rows) ** 0.5, (rows, columns)).astype(np.float32)


MODELS = {"dense": dense, "transformer": transformer}
