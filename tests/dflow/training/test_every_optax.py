"""Each family of optax under `dflow.Optimizer` and alone: the same bits after 20 steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.tracing.errors import GraphTypeError
from tests.dflow.training.optax_cases import CASES, Case

STEPS = 20

#: XLA sums over all parameters in another order in these compiled programs, as it does in plain JAX with donated
#: arguments. The operations are equal, as the runs op by op show.
SUMMED_OTHERWISE = ("contrib.dadapt_adamw", "contrib.mechanize")


def parameters() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 2)
    hidden = {"kernel": jax.random.normal(keys[0], (4, 6)), "bias": jnp.zeros(6)}
    return {"hidden": hidden, "out": jax.random.normal(keys[1], (6, 3))}


def loss_of(params: Any, x: Any, y: Any) -> Any:
    hidden = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return ((hidden @ params["out"] - y) ** 2).mean()


def batches() -> list[Any]:
    drawn = np.random.default_rng(0)
    return [(drawn.normal(size=(8, 4)), drawn.normal(size=(8, 3))) for _ in range(STEPS)]


def extra_of(case: Case, value: Any, gradients: Any, x: Any, y: Any) -> dict[str, Any]:
    def objective(params: Any) -> Any:
        return loss_of(params, x, y)

    every = {
        "value": value,
        "grad": gradients,
        "value_fn": objective,
        "obj_fn": objective,
        "grad_fn": lambda params, _: jax.grad(objective)(params),
    }
    return {name: every[name] for name in case.extra}


def with_optax(case: Case) -> Any:
    """Return the parameters, state and losses of optax alone."""
    transformation, params = case.make(), parameters()
    state, losses = transformation.init(params), []

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        value, gradients = jax.value_and_grad(loss_of)(params, x, y)
        if case.by_example:
            gradients = jax.vmap(lambda x, y: jax.grad(loss_of)(params, x, y))(x, y)
        extra = extra_of(case, value, gradients, x, y)
        updates, state = transformation.update(gradients, state, params, **extra)
        return optax.apply_updates(params, updates), state, value

    for x, y in batches():
        params, state, value = step(params, state, x, y)
        losses.append(value)
    return params, state, losses


def with_dflow(case: Case) -> Any:
    """Return the same for `dflow.Optimizer`."""
    model = dflow.variables(parameters())
    optimizer = dflow.Optimizer(case.make(), model)

    @dflow.jit
    def step(x: Any, y: Any) -> Any:
        def loss(x: Any, y: Any) -> Any:
            return loss_of(dflow.read(model), x, y)

        value, gradients = dflow.value_and_grad(loss, model)(x, y)
        if case.by_example:
            gradients = jax.vmap(dflow.grad(loss, model))(x, y)
        optimizer.apply(gradients, **extra_of(case, value, gradients, x, y))
        return value

    losses = [step(x, y) for x, y in batches()]
    return dflow.read(model), dflow.read(optimizer.slots), losses


def numbers(tree: Any) -> list[Any]:
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    keys = jax.dtypes.prng_key
    return [np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, keys) else leaf) for leaf in leaves]


def assert_same_bits(got: Any, wanted: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, other in zip(numbers(got), numbers(wanted), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:step was compiled 50 times:dflow.RetraceWarning")  # one step a case
@pytest.mark.parametrize("name", CASES)
def test_training_has_the_bits_of_optax(name: str) -> None:
    wanted, got = with_optax(CASES[name]), with_dflow(CASES[name])
    assert np.isfinite(wanted[2]).all()
    if name not in SUMMED_OTHERWISE:
        assert_same_bits(got, wanted)
        return
    for one, other in zip(numbers(got), numbers(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-6)


@pytest.mark.once
@pytest.mark.parametrize("name", SUMMED_OTHERWISE)
def test_op_by_op_the_bits_are_those_of_optax_everywhere(name: str) -> None:
    transformation, params, model = CASES[name].make(), parameters(), dflow.variables(parameters())
    state, optimizer = transformation.init(params), dflow.Optimizer(CASES[name].make(), model)
    for x, y in batches()[:5]:
        updates, state = transformation.update(jax.grad(loss_of)(params, x, y), state, params)
        optimizer.apply(jax.grad(loss_of)(dflow.read(model), x, y))
        params = optax.apply_updates(params, updates)
    assert_same_bits((dflow.read(model), dflow.read(optimizer.slots)), (params, state))


def test_a_state_that_changes_its_structure_is_refused() -> None:
    monitored = optax.chain(optax.monitor({"norm": optax.tree.norm}), optax.sgd(0.1))
    optimizer = dflow.Optimizer(monitored, dflow.variables(parameters()))
    with pytest.raises(GraphTypeError, match="the transformation's state: expected the structure that init gave it"):
        optimizer.apply(parameters())
    assert_same_bits(dflow.read(optimizer.variables), parameters())
