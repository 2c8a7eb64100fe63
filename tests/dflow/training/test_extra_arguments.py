"""Extra arguments of `Optimizer.apply`: accepted by the update, or refused with the user's line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import dflow
from dflow.testing import memory_cluster
from dflow.tracing.errors import GraphTypeError

HERE = Path(__file__).name
STEPS = 5


def assert_names_line(error: BaseException, words: str) -> None:
    [line] = [line for line in str(error).splitlines() if line.startswith("  at ")]
    assert HERE in line
    assert words in Path(__file__).read_text().splitlines()[int(line.rpartition(":")[2]) - 1]


def opaque_sam() -> Any:
    return contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True)


NEEDED: dict[str, tuple[Callable[[], Any], str]] = {
    "polyak_sgd": (optax.polyak_sgd, "value"),
    "reduce_on_plateau": (lambda: optax.chain(optax.sgd(0.1), contrib.reduce_on_plateau()), "value"),
    "lbfgs": (optax.lbfgs, "'value', 'grad', and 'value_fn'"),
    "sam": (opaque_sam, "grad_fn"),
    "sophia": (lambda: contrib.sophia(0.1), "obj_fn"),
    "multi_steps": (lambda: optax.MultiSteps(optax.polyak_sgd(), 2), "value"),
}


@pytest.mark.parametrize("name", NEEDED)
@pytest.mark.parametrize(("given", "traced"), [({}, False), ({"valu": 1.0}, True)], ids=["none", "another"])
def test_an_argument_that_is_needed_and_not_given_is_named(name: str, given: dict[str, Any], traced: bool) -> None:
    make, needed = NEEDED[name]
    weights = dflow.Variable(jnp.ones(3))
    optimizer = dflow.Optimizer(make(), weights)

    def step() -> None:
        optimizer.apply(jnp.ones(3), **given)

    words = rf"apply: expected the extra arguments that the transformation needs, got {'valu' if given else 'none'}: "
    if name == "sam" and given:  # its update takes no others, so Python raises the error
        words, needed = "apply: expected extra arguments that the transformation uses, got 'valu'", ""
    with pytest.raises(GraphTypeError, match=rf"{words}.*{needed}") as caught:
        (dflow.jit(step) if traced else step)()
    assert_names_line(caught.value, "optimizer.apply(jnp.ones(3), **given)")
    np.testing.assert_array_equal(weights, jnp.ones(3))


def needs_two(_: Any, __: Any) -> Any:
    return jnp.float32(0.0)


_OWN_FAULTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "within": (lambda p: needs_two(p) + 1, r"needs_two\(\) missing 1 required positional argument"),
    "itself": (needs_two, r"needs_two\(\) missing 1 required positional argument"),
    "a keyword": (lambda p: jnp.sum(p, axes=0), "unexpected keyword argument 'axes'"),
}


@pytest.mark.parametrize("case", _OWN_FAULTS)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_an_error_of_the_users_own_function_is_not_taken_for_an_argument_of_apply(case: str, traced: bool) -> None:
    value_fn, words = _OWN_FAULTS[case]
    point = dflow.Variable(jnp.ones(3))
    optimizer = dflow.Optimizer(optax.lbfgs(), point)

    def step() -> None:
        optimizer.apply(jnp.ones(3), value=jnp.float32(1.0), grad=jnp.ones(3), value_fn=value_fn)

    with pytest.raises(TypeError, match=words) as caught:
        (dflow.jit(step) if traced else step)()
    assert not isinstance(caught.value, GraphTypeError)
    assert "apply:" not in str(caught.value)


UNUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "of sgd": (lambda: optax.sgd(0.1), {"value": 1.0}, "value"),
    "of a plain transformation": (lambda: optax.scale(-0.1), {"value": 1.0}, "value"),
    "of a chain": (lambda: optax.chain(optax.sgd(0.1), optax.polyak_sgd()), {"value": 1.0, "valu": 2.0}, "valu"),
    "a function": (lambda: contrib.sam(optax.sgd(0.1), optax.sgd(0.1)), {"grad_fn": lambda p, _: p}, "grad_fn"),
    "a tree": (optax.polyak_sgd, {"value": 1.0, "grad": [jnp.ones(3)]}, "grad"),
}


@pytest.mark.parametrize("name", UNUSED)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_an_argument_that_nothing_uses_is_refused(name: str, traced: bool) -> None:
    make, given, unused = UNUSED[name]
    weights = dflow.Variable(jnp.ones(3))
    optimizer = dflow.Optimizer(make(), weights)

    def step() -> None:
        optimizer.apply(jnp.ones(3), **given)

    words = f"apply: expected extra arguments that the transformation uses, got '{unused}'"
    with pytest.raises(GraphTypeError, match=words) as caught:
        (dflow.jit(step) if traced else step)()
    assert_names_line(caught.value, "optimizer.apply(jnp.ones(3), **given)")
    np.testing.assert_array_equal(weights, jnp.ones(3))


def test_an_argument_that_the_searched_function_does_not_take_is_refused() -> None:
    optimizer = dflow.Optimizer(optax.lbfgs(), dflow.Variable(jnp.ones(3)))
    with pytest.raises(GraphTypeError, match=r"(?s)Unexpected keyword arguments.*\['batch'\]") as caught:
        optimizer.apply(jnp.ones(3), value=1.0, grad=jnp.ones(3), value_fn=jnp.sum, batch=2.0)
    assert_names_line(caught.value, "optimizer.apply(jnp.ones(3), value=1.0")


def test_a_word_a_flag_and_a_variable_reach_the_update_as_they_are() -> None:
    seen = []

    def update(updates: Any, state: Any, params: Any = None, *, phase: str, frozen: bool, rate: Any, **_: Any) -> Any:
        seen.append((phase, frozen))
        return jax.tree.map(lambda g: g * (0.0 if frozen else -rate), updates), state

    transformation = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    weights, rate = dflow.Variable(jnp.ones(2)), dflow.Variable(0.5)
    dflow.Optimizer(transformation, weights).apply(jnp.ones(2), phase="late", frozen=False, rate=rate)
    assert set(seen) == {("late", False)}
    np.testing.assert_array_equal(weights, [0.5, 0.5])


def rosenbrock(params: Any, scale: Any) -> Any:
    x, y = params["x"], params["y"]
    return scale * ((1 - x) ** 2 + 100 * (y - x**2) ** 2).sum()


def minimised(device: Any) -> Any:
    """Return the variables after a few steps of L-BFGS, whose line search calls a function of the step's own data."""
    with device.parameter_servers():
        model = dflow.variables({"x": jnp.zeros(2), "y": jnp.full(2, 2.0)}, prefix="rosenbrock/")
        optimizer = dflow.Optimizer(optax.lbfgs(), model, name="lbfgs")

    @dflow.jit
    def step(scale: Any) -> Any:
        value, gradients = dflow.value_and_grad(lambda: rosenbrock(dflow.read(model), scale), model)()
        optimizer.apply(gradients, value=value, grad=gradients, value_fn=lambda params: rosenbrock(params, scale))
        return value

    losses = [float(step(jnp.float32(1.5))) for _ in range(STEPS)]
    return jax.device_get(dflow.read(model)), losses


def test_a_line_search_on_parameter_tasks_is_that_of_one_process() -> None:
    wanted, losses = minimised(dflow.connect())
    assert losses[-1] < losses[0] / 2
    with memory_cluster(ps=2) as memory:
        worker = memory.worker()
        try:
            got, found = minimised(worker)
        finally:
            worker.close()
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4), got, wanted)
