"""Does a table of bfloat16 learn as one of float32, if an optimizer rounds at random?

A rating is the product of the rows of a user and an item, of 8 numbers each, with noise; a click has the probability of
its sigmoid. A model of the same form learns either. *loss* is that of pairs that the model was not trained with: for
ratings the mean square, where the noise alone gives 0.01, for clicks the cross entropy. *first* is the loss before
training, *best* that of the true rows, *lowest* and *highest* the extremes of the rounds after training. *nearest* and
*random* are the rounding of tables, and slots, of bfloat16; *24 bits* keeps 8 further bits of tables. All begin with
the same values, and have the same batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dflow
from benchmarks._paired import options, publish

USERS, ITEMS, DIM, BATCH = 1000, 500, 8, 256
NOISE = 0.1
STEPS = 20_000
#: By kind: the dtype of tables, and options of the optimizer.
KINDS: dict[str, tuple[Any, dict[str, bool]]] = {
    "float32": (jnp.float32, {}),
    "bfloat16, nearest": (jnp.bfloat16, {}),
    "bfloat16, random": (jnp.bfloat16, {"stochastic_rounding": True}),
    "bfloat16, random, 24 bits": (jnp.bfloat16, {"stochastic_rounding": True, "extra_bits": True}),
}
#: By the kind of answers: transformations.
RULES: dict[tuple[str, str], Callable[[], Any]] = {
    ("ratings", "adagrad(0.5)"): lambda: optax.adagrad(0.5),
    ("ratings", "sgd, from 0.1 to 0"): lambda: optax.sgd(optax.linear_schedule(0.1, 0.0, STEPS)),
    ("clicks", "adagrad(0.1)"): lambda: optax.adagrad(0.1),
    ("clicks", "sgd, from 0.1 to 0"): lambda: optax.sgd(optax.linear_schedule(0.1, 0.0, STEPS)),
}


def main() -> None:
    given = options(__doc__, rounds=3)
    rows = [row(rule, kind, given.rounds) for rule in RULES for kind in KINDS]
    publish("rounding", rows, as_json=given.json)


def row(rule: tuple[str, str], kind: str, rounds: int) -> dict[str, Any]:
    losses = np.array([trained(rule, kind, seed) for seed in range(rounds)])
    best, first, *rest = losses.mean(0)
    found = {"answers": rule[0], "transformation": rule[1], "tables": kind, "best": best, "first": first}
    found |= {f"loss after {steps}": loss for steps, loss in zip(marks(), rest, strict=True)}
    return found | {"lowest": losses[:, -1].min(), "highest": losses[:, -1].max()}


def marks() -> tuple[int, ...]:
    return STEPS // 10, STEPS // 2, STEPS


def expected_loss(answers: str, guess: Any, true: Any) -> Any:
    """The loss of a guess, of the answers that have the true value in the mean."""
    if answers == "ratings":
        return (guess - true) ** 2 + NOISE**2
    return optax.sigmoid_binary_cross_entropy(guess, jax.nn.sigmoid(true))


def loss_of(answers: str, guess: Any, answer: Any) -> Any:
    return (guess - answer) ** 2 / 2 if answers == "ratings" else optax.sigmoid_binary_cross_entropy(guess, answer)


def trained(rule: tuple[str, str], kind: str, seed: int) -> list[float]:
    """Return the losses of the true rows, before training, and at the marks."""
    answers, _ = rule
    draw = np.random.default_rng(seed)
    true = [draw.normal(size=(count, DIM)).astype(np.float32) for count in (USERS, ITEMS)]
    scale = DIM**-0.5
    dtype, rounding = KINDS[kind]
    initial = [0.5 * draw.normal(size=part.shape).astype(np.float32) for part in true]
    users, items = tables = [dflow.Variable(jnp.asarray(part, dtype)) for part in initial]
    optimizer = dflow.Optimizer(RULES[rule](), tables, **rounding)

    def guesses(user: Any, item: Any) -> Any:
        parts = users.gather(user).astype(jnp.float32), items.gather(item).astype(jnp.float32)
        return (parts[0] * parts[1]).sum(-1) * scale

    @dflow.jit
    def step(user: Any, item: Any, answer: Any) -> None:
        optimizer.apply(dflow.grad(lambda: loss_of(answers, guesses(user, item), answer).sum(), tables)())

    @dflow.jit
    def measured(user: Any, item: Any, true: Any) -> Any:
        return expected_loss(answers, guesses(user, item), true).mean()

    def batch(count: int) -> tuple[Any, Any, Any]:
        user, item = (draw.integers(0, size, count).astype(np.int32) for size in (USERS, ITEMS))
        return user, item, (true[0][user] * true[1][item]).sum(-1) * scale

    held = batch(20_000)
    losses = [float(jnp.mean(expected_loss(answers, held[2], held[2]))), float(measured(*held))]
    for number in range(1, STEPS + 1):
        user, item, value = batch(BATCH)
        noise = NOISE * draw.normal(size=BATCH)
        clicks = draw.random(BATCH) < 1 / (1 + np.exp(-value))
        step(user, item, (value + noise if answers == "ratings" else clicks).astype(np.float32))
        if number in marks():
            losses.append(float(measured(*held)))
    return losses


if __name__ == "__main__":
    main()
