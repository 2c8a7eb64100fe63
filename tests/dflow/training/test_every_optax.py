"""Each family of optax under `dflow.Optimizer` and alone: the same bits after 20 steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import dflow
from dflow.tracing.errors import GraphTypeError

STEPS = 20


@dataclass(frozen=True)
class Case:
    """A transformation. `extra` has the names of its update's arguments other than gradients, state and parameters.

    With `by_example` the update takes a gradient for each example.
    """

    make: Callable[[], Any]
    extra: tuple[str, ...] = ()
    by_example: bool = False


SEARCH = ("value", "grad", "value_fn")


def _is_kernel(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, tree)


def _labels(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: "kernel" if leaf.ndim > 1 else "bias", tree)


_BY_LABEL = {"kernel": optax.adam(1e-2), "bias": optax.sgd(0.1)}
_RATE = 1e-2

#: One transformation of each family, with a learning rate alone: adam for families with moments (adamw, nadam and so
#: on), sgd for those with a factor or a sign, rmsprop and adagrad for those with running and with summed squares.
_RATED = ("adam", "sgd", "rmsprop", "adagrad", "lion", "lamb", "sm3", "novograd", "optimistic_gradient_descent")
_RATED_CONTRIB = ("muon", "prodigy", "dog", "schedule_free_adamw", "madgrad")
#: Without arguments.
_PLAIN = ("scale_by_lbfgs", "centralize", "zero_nans")


def _scaled(transformation: Any) -> Any:
    """The transformation with a step that is small enough to keep the loss finite."""
    return optax.chain(transformation, optax.scale(-_RATE))


CASES: dict[str, Case] = {
    **{name: Case(lambda name=name: getattr(optax, name)(_RATE)) for name in _RATED},
    **{f"contrib.{name}": Case(lambda name=name: getattr(contrib, name)(_RATE)) for name in _RATED_CONTRIB},
    **{name: Case(lambda name=name: _scaled(getattr(optax, name)())) for name in _PLAIN},
    "contrib.cocob": Case(lambda: _scaled(contrib.cocob())),
    "adam with moments of bfloat16": Case(lambda: optax.adam(_RATE, mu_dtype="bfloat16")),
    "adafactor": Case(lambda: optax.adafactor(_RATE, min_dim_size_to_factor=2)),
    "add_noise": Case(lambda: _scaled(optax.add_noise(0.01, 0.55, key=1))),
    "apply_every": Case(lambda: _scaled(optax.apply_every(3))),
    "apply_if_finite": Case(lambda: optax.apply_if_finite(optax.adam(_RATE), 3)),
    "chain": Case(lambda: optax.chain(optax.clip(0.5), optax.adam(optax.linear_schedule(0.1, 0.01, 10)))),
    "clip_by_global_norm": Case(lambda: _scaled(optax.clip_by_global_norm(0.1))),
    "conditionally_transform": Case(
        lambda: _scaled(optax.conditionally_transform(optax.scale_by_adam(), lambda step, value: value > 1.0, True)),
        ("value",),
    ),
    "flatten": Case(lambda: optax.flatten(optax.adam(_RATE))),
    "freeze": Case(lambda: optax.chain(optax.adam(_RATE), optax.freeze(False))),
    "inject_hyperparams": Case(lambda: optax.inject_hyperparams(optax.adam)(optax.exponential_decay(_RATE, 5, 0.5))),
    "lbfgs": Case(optax.lbfgs, SEARCH),
    "masked": Case(lambda: optax.masked(optax.adam(_RATE), _is_kernel)),
    "multi_transform": Case(lambda: optax.multi_transform(_BY_LABEL, _labels)),
    "named_chain": Case(lambda: optax.named_chain(("clip", optax.clip(0.5)), ("adam", optax.adam(_RATE)))),
    "noisy_sgd": Case(lambda: optax.noisy_sgd(_RATE, key=1)),
    "polyak_sgd": Case(optax.polyak_sgd, ("value",)),
    "scale_by_backtracking_linesearch": Case(
        lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15, store_grad=True)), SEARCH
    ),
    "scale_by_zoom_linesearch": Case(lambda: optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(15)), SEARCH),
    "selective_transform": Case(lambda: optax.selective_transform(optax.adam(_RATE), freeze_mask=_is_kernel)),
    "snapshot": Case(lambda: optax.chain(optax.snapshot("norm", optax.tree.norm), optax.sgd(_RATE))),
    "stateless_with_tree_map": Case(lambda: optax.stateless_with_tree_map(lambda g, p: -_RATE * g - 1e-3 * p)),
    "trace": Case(lambda: _scaled(optax.trace(0.9, nesterov=True))),
    "MultiSteps": Case(lambda: optax.MultiSteps(optax.adam(_RATE), every_k_schedule=2)),
    "contrib.differentially_private_aggregate": Case(
        lambda: _scaled(contrib.differentially_private_aggregate(0.5, 0.1, key=1)), by_example=True
    ),
    "contrib.dpsgd": Case(lambda: contrib.dpsgd(0.1, 0.5, 0.1, seed=1), by_example=True),
    "contrib.galore": Case(lambda: contrib.galore(_RATE, rank=2)),
    "contrib.dadapt_adamw": Case(lambda: contrib.dadapt_adamw(estim_lr0=_RATE)),
    "contrib.mechanize": Case(lambda: contrib.mechanize(optax.adam(_RATE), s_init=0.1)),
    "contrib.momo": Case(contrib.momo, ("value",)),
    "contrib.reduce_on_plateau": Case(
        lambda: optax.chain(optax.sgd(0.5), contrib.reduce_on_plateau(0.5, patience=1, rtol=0.05)), ("value",)
    ),
    "contrib.sam": Case(lambda: contrib.sam(optax.sgd(0.1), optax.chain(contrib.normalize(), optax.sgd(0.05)))),
    "contrib.sam, opaque": Case(
        lambda: contrib.sam(
            optax.sgd(0.1), optax.chain(contrib.normalize(), optax.sgd(0.05)), sync_period=3, opaque_mode=True
        ),
        ("grad_fn",),
    ),
    "contrib.schedule_free": Case(lambda: contrib.schedule_free(optax.adam(_RATE, b1=0.0), _RATE)),
    "contrib.sophia": Case(lambda: contrib.sophia(_RATE), ("obj_fn",)),
    "contrib.hutchinson_estimator_diag_hessian": Case(
        lambda: _scaled(contrib.hutchinson_estimator_diag_hessian()), ("obj_fn",)
    ),
    "contrib.split_real_and_imaginary": Case(lambda: contrib.split_real_and_imaginary(optax.adam(_RATE))),
}


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
