"""A model whose training has an exact answer: all values are whole numbers, few enough for float32.

So the state after each step is the same on any number of workers, and here in NumPy, whatever the order of the
sums. The gradients depend on the values in a chaotic way: a step that is left out, repeated, or done from another state
changes all later ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

#: Number of examples of a step, which 2 and 3 workers divide; rows of the table; values of an example and of a row.
EXAMPLES, ROWS, WIDTH = 12, 24, 4
#: The optimizer's update is minus its momentum, divided by this.
DIVISOR = 4
State = dict[str, np.ndarray]


def examples(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of the table that the step's examples look up, s32[12], and their values, f32[12,4]."""
    draw = np.random.default_rng(step)
    return draw.integers(0, ROWS, EXAMPLES, np.int32), draw.integers(-2, 3, (EXAMPLES, WIDTH)).astype(np.float32)


def first_values() -> State:
    """Return the values before the first step: the dense weights and the table."""
    draw = np.random.default_rng(-1 % 2**32)
    return {
        "w": draw.integers(-9, 10, WIDTH).astype(np.float32),
        "table": draw.integers(-9, 10, (ROWS, WIDTH)).astype(np.float32),
    }


def states() -> Iterator[State]:
    """Yield the values after 0, 1, 2... steps, without dflow."""
    state = first_values()
    momentum = {name: np.zeros_like(value) for name, value in state.items()}
    step = 0
    while True:
        yield {name: value.copy() for name, value in state.items()}
        ids, x = examples(step)
        looked_up, seen = state["table"][ids], x @ state["w"]
        gradients = {"w": np.mod(looked_up.sum(1) + seen, 7) @ x, "table": np.zeros_like(state["table"])}
        np.add.at(gradients["table"], ids, x * (np.mod(seen, 5) + 1)[:, None])
        for name in state:
            momentum[name] = np.floor(momentum[name] / 2) + gradients[name]
            state[name] = state[name] - np.floor(momentum[name] / DIVISOR)
        step += 1
