"""Uses of state in one process: control flow, transformations, derivatives, eager runs, threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dflow
from tests.composition.kind import NUMBERS, Batch, Held, Outcome, Pair, Reference, Use, stacked

Step = Callable[[Batch], Any]


def one_by_one(pair: Pair, around: Callable[[Held], Step], of_reference: Any = None) -> Outcome:
    """Call a step for each batch, and compare its results and the content."""
    held, reference = pair.make(), pair.kind.reference()
    step, expected = around(held), of_reference or (lambda reference, given: reference.step(given))
    outcome: Outcome = []
    for number, given in zip(NUMBERS, pair.batches(), strict=True):
        outcome.append((f"result {number}", step(given), expected(reference, given)))
    return [*outcome, ("content", held.state(), reference.state())]


def in_a_step(around: Callable[[Step], Step]) -> Callable[[Pair], Outcome]:
    """Use a step within a function of `dflow.jit`."""
    return lambda pair: one_by_one(pair, lambda held: dflow.jit(around(held.step)))


def all_together(pair: Pair, around: Callable[[Step], Step]) -> Outcome:
    """Give all batches to one call, which does a step for each; compare the results in order, and the content."""
    held, reference = pair.make(), pair.kind.reference()
    results = dflow.jit(around(held.step))(stacked(pair.batches()))
    expected = [reference.step(given) for given in pair.batches()]
    return [("results", results, np.array(expected)), ("content", held.state(), reference.state())]


def eagerly(pair: Pair) -> Outcome:
    """Call the step outside of `dflow.jit`."""
    return one_by_one(pair, lambda held: held.step)


def op_by_op(pair: Pair) -> Outcome:
    """Call a compiled function in `dflow.eager`."""

    def around(held: Held) -> Step:
        compiled = dflow.jit(held.step)

        def step(given: Batch) -> Any:
            with dflow.eager():
                return compiled(given)

        return step

    return one_by_one(pair, around)


def in_cond(pair: Pair) -> Outcome:
    """Do the step in a branch, in every second call."""

    def around(held: Held) -> Step:
        step = dflow.jit(lambda go, given: jax.lax.cond(go, held.step, lambda _: jnp.float32(-1), given))
        return lambda given: step(given["round"][0] % 2 == 0, given)

    def expected(reference: Reference, given: Batch) -> float:
        return reference.step(given) if given["round"][0] % 2 == 0 else -1.0

    return one_by_one(pair, around, expected)


def in_switch(step: Step) -> Step:
    """Do the step in each of three branches."""
    return lambda given: jax.lax.switch(given["round"][0], [step, step, step], given)


def in_scan(step: Step) -> Step:
    return lambda given: jax.lax.scan(lambda carry, one: (carry, step(one)), 0, given)[1]


def in_map(step: Step) -> Step:
    return lambda given: jax.lax.map(step, given)


def in_fori(step: Step) -> Step:
    def looped(given: Batch) -> Any:
        leaves = jax.tree.map(jnp.asarray, given)

        def body(number: Any, results: Any) -> Any:
            return results.at[number].set(step(jax.tree.map(lambda leaf: leaf[number], leaves)))

        return jax.lax.fori_loop(0, len(NUMBERS), body, jnp.zeros(len(NUMBERS)))

    return looped


def in_while(step: Step) -> Step:
    def looped(given: Batch) -> Any:
        leaves = jax.tree.map(jnp.asarray, given)

        def body(carry: Any) -> Any:
            number, results = carry
            return number + 1, results.at[number].set(step(jax.tree.map(lambda leaf: leaf[number], leaves)))

        return jax.lax.while_loop(lambda carry: carry[0] < len(NUMBERS), body, (0, jnp.zeros(len(NUMBERS))))[1]

    return looped


def in_vmap(pair: Pair) -> Outcome:
    """Map the step over the batches: a sum of writes equals one after another, whose results differ."""
    held, reference = pair.make(), pair.kind.reference()
    dflow.jit(jax.vmap(held.step))(stacked(pair.batches()))
    for given in pair.batches():
        reference.step(given)
    return [("content", held.state(), reference.state())]


def reading_in_vmap(pair: Pair) -> Outcome:
    """Map a function that reads the state over the batches."""
    held, reference = pair.make(), pair.kind.reference()
    results = dflow.jit(jax.vmap(held.look or held.step))(stacked(pair.batches()))
    expected = [pair.kind.reference().step(given) for given in pair.batches()]
    return [("results", results, np.array(expected)), ("content", held.state(), reference.state())]


def in_custom_vjp(step: Step) -> Step:
    """Do the step in a function with a custom backward rule."""

    def ruled(given: Batch) -> Any:
        @jax.custom_vjp
        def scaled(x: Any) -> Any:
            return step({**given, "x": x}) + 0 * x.sum()

        scaled.defvjp(lambda x: (scaled(x), None), lambda _, ct: (ct * jnp.ones_like(given["x"]),))
        value, gradient = dflow.value_and_grad(scaled, argnums=0)(given["x"])
        return value + 0 * gradient.sum()

    return ruled


def in_custom_jvp(step: Step) -> Step:
    """Do the step in a function with a custom forward rule."""

    def ruled(given: Batch) -> Any:
        @jax.custom_jvp
        def scaled(x: Any) -> Any:
            return step({**given, "x": x}) + 0 * x.sum()

        scaled.defjvp(lambda primals, tangents: (scaled(*primals), tangents[0].sum()))
        return dflow.value_and_grad(scaled, argnums=0)(given["x"])[0]

    return ruled


def differentiated(how: str) -> Callable[[Pair], Outcome]:
    """Differentiate `result * sum(x)` with respect to x: the gradient is the result, and the step happens once."""

    def around(held: Held) -> Step:
        def compiled(given: Batch) -> Any:
            x = jnp.asarray(given["x"])

            def loss(x: Any) -> Any:
                return jax.lax.stop_gradient(held.step({**given, "x": x})) * x.sum()

            if how == "grad":
                return dflow.grad(loss, argnums=0)(x)[0]
            if how == "jvp":
                return dflow.jvp(loss, (x,), (jnp.ones_like(x) / len(x),))[1]
            _, pull = dflow.vjp(loss, x)
            return pull(jnp.float32(1))[0]

        return dflow.jit(compiled)

    return lambda pair: one_by_one(pair, around)


def twice_differentiated(pair: Pair) -> Outcome:
    """Differentiate the gradient of `result * sum(x ** 2)`: the second derivative is twice the result."""

    def around(held: Held) -> Step:
        def compiled(given: Batch) -> Any:
            def loss(x: Any) -> Any:
                return jax.lax.stop_gradient(held.step({**given, "x": x})) * (x**2).sum()

            return dflow.grad(lambda x: dflow.grad(loss, argnums=0)(x).sum(), argnums=0)(jnp.asarray(given["x"]))[0] / 2

        return dflow.jit(compiled)

    return one_by_one(pair, around)


def in_microbatches(pair: Pair) -> Outcome:
    """Add up the gradients of three microbatches in a scan, and apply their mean once."""
    held, reference = pair.make(), pair.kind.reference()
    if held.gradients is None:
        return all_together(pair, in_scan)
    gradients, apply = held.gradients, held.apply
    assert apply

    @dflow.jit
    def step(given: Batch) -> None:
        def body(total: Any, one: Any) -> Any:
            found, extra = gradients(one)
            return jax.tree.map(jnp.add, total, found), extra

        shapes = jax.eval_shape(lambda one: gradients(one)[0], jax.tree.map(lambda leaf: leaf[0], given))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        total, extra = jax.lax.scan(body, zeros, given)
        apply(jax.tree.map(lambda leaf: leaf / len(NUMBERS), total), extra)

    step(stacked(pair.batches()))
    reference.train(pair.joined(NUMBERS))
    return [("content", held.state(), reference.state())]


def in_threads(pair: Pair) -> Outcome:
    """Call one compiled step from two threads at the same time."""
    held, reference = pair.make(), pair.kind.reference()
    step, given = dflow.jit(held.step), pair.batches((1,))[0]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: [step(given) for _ in range(3)], range(2)))
    for _ in range(6):
        reference.step(given)
    return [("content", held.state(), reference.state())]


def with_x64(pair: Pair) -> Outcome:
    """Make and use the state where JAX keeps 64 bits."""
    with jax.enable_x64(True):
        return one_by_one(pair, lambda held: dflow.jit(held.step))


def as_graph(pair: Pair) -> Outcome:
    """Trace the step into a graph, print it, and parse the text: nothing runs."""
    held, reference = pair.make(), pair.kind.reference()
    view = dflow.graph(held.step, pair.batches()[0])
    parsed = dflow.GraphView.parse(str(view))
    return [("text", len(str(parsed)), len(str(view))), ("content", held.state(), reference.state())]


USES = [
    Use(name, "in one process", run)
    for name, run in {
        "compiled": in_a_step(lambda step: step),
        "eager": eagerly,
        "dflow.eager": op_by_op,
        "cond": in_cond,
        "switch": in_a_step(in_switch),
        "scan": lambda pair: all_together(pair, in_scan),
        "map": lambda pair: all_together(pair, in_map),
        "fori_loop": lambda pair: all_together(pair, in_fori),
        "while_loop": lambda pair: all_together(pair, in_while),
        "nested jit": in_a_step(jax.jit),
        "checkpoint": in_a_step(jax.checkpoint),
        "vmap of a step": in_vmap,
        "vmap of a read": reading_in_vmap,
        "custom_vjp": in_a_step(in_custom_vjp),
        "custom_jvp": in_a_step(in_custom_jvp),
        "grad": differentiated("grad"),
        "jvp": differentiated("jvp"),
        "vjp": differentiated("vjp"),
        "second derivative": twice_differentiated,
        "microbatches": in_microbatches,
        "threads": in_threads,
        "x64": with_x64,
        "graph": as_graph,
    }.items()
]
