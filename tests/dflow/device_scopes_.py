"""Device scopes in one process; run by `test_several_devices.py`, which starts a process with eight devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.lowering.queues.channel import StepId
from dflow.lowering.steps.compile_plan import run_of
from dflow.lowering.steps.executable import Executable
from dflow.lowering.steps.plan import Call
from dflow.state_backends import LOCAL
from tests.dflow.on_devices import X, calls, on, plan_of, variable
from tests.lowering.flat_programs import flat_program


@pytest.mark.parametrize("name", ["cpu:3", "/device:CPU:3", "CPU:3", jax.devices()[3]], ids=str)
def test_ops_in_a_scope_run_on_its_device(name: Any) -> None:
    @dflow.jit
    def f(x: Any) -> Any:
        with dflow.device(name):
            return x + 1

    for _ in range(2):
        y = f(X)
        assert on(y) == "cpu:3"
        np.testing.assert_array_equal(y, X + 1)


def test_a_scope_around_the_call_counts_too() -> None:
    f = dflow.jit(lambda x: x + 1)
    assert on(f(jnp.asarray(X))) == "cpu:0"
    with dflow.device("cpu:2"):
        assert on(f(jnp.asarray(X))) == "cpu:2"
        assert on(jnp.zeros(3)) == "cpu:2"
    assert on(f(jnp.asarray(X))) == "cpu:0"


def test_the_inner_scope_wins() -> None:
    v = variable("cpu:4")
    w = dflow.Variable(1.0)

    @dflow.jit
    def f(x: Any) -> Any:
        with dflow.device("cpu:1"):
            with dflow.device("cpu:2"):
                a = x + 1
            b = x + 2
            with dflow.colocate_with(v):
                c = x + 3
            with dflow.colocate_with(w):
                d = x + 4
        return a, b, c, d

    assert [on(y) for y in f(X)] == ["cpu:2", "cpu:1", "cpu:4", "cpu:0"]


def test_variables_live_where_the_scope_says() -> None:
    v = variable("cpu:5", X)
    with dflow.colocate_with(v):
        near = dflow.Variable(lambda: jnp.zeros(3))
    with dflow.device("cpu:1"):
        beside = dflow.Variable(1.0, near=v)
    assert [on(each.read()) for each in (v, near, beside)] == ["cpu:5"] * 3
    assert {each.device for each in (v, near, beside)} == {"/device:cpu:5"}
    v.assign(jax.device_put(X * 2, jax.devices()[2]))
    v.assign_add(jax.device_put(X, jax.devices()[2]))
    v.scatter_add(jax.device_put(np.array([1]), jax.devices()[2]), jax.device_put(X[:1], jax.devices()[2]))
    assert on(v.read()) == on(v.gather(jnp.array([0]))) == "cpu:5"
    np.testing.assert_array_equal(v, 3 * X + np.stack([0 * X[0], X[0]]))


def test_a_variable_of_an_array_that_was_put_somewhere_lives_there() -> None:
    v = dflow.Variable(jax.device_put(X, jax.devices()[6]))
    assert v.device == "/device:cpu:6"
    assert on(dflow.jit(lambda: v.read() * 2)()) == "cpu:6"


def test_what_uses_one_device_is_one_call_on_it() -> None:
    v, w = variable("cpu:3", X), variable("cpu:3", np.ones((3, 2)))

    def step(x: Any) -> Any:
        v.assign_add(x)
        return (v @ w).sum() * 2

    plan = plan_of(step, X)
    assert calls(plan.items) == ["cpu:3"]
    assert len(plan.items) == 1
    f = dflow.jit(step)
    assert on(f(X)) == "cpu:3"
    assert on(v.read()) == "cpu:3"


def test_an_op_without_a_scope_goes_where_most_of_its_bytes_are() -> None:
    small, large = variable("cpu:1", np.ones((2, 3))), variable("cpu:2", np.ones((3, 50)))

    @dflow.jit
    def f() -> Any:
        product = small @ large
        return product, small * 2, large.read().sum() + small.read().sum()

    product, doubled, total = f()
    assert (on(product), on(doubled), on(total)) == ("cpu:2", "cpu:1", "cpu:2")
    assert float(total) == 156.0


def test_gradients_run_where_their_forward_ops_do() -> None:
    v, w = variable("cpu:1", X), variable("cpu:2", np.ones((3, 2)))

    def loss() -> Any:
        with dflow.device("cpu:1"):
            y = jnp.sin(v.read())
        with dflow.device("cpu:2"):
            return (y @ w).sum()

    plan = plan_of(dflow.grad(loss, [v, w]))
    assert set(calls(plan.items)) == {"cpu:1", "cpu:2"}
    of_v, of_w = dflow.jit(dflow.grad(loss, [v, w]))()
    assert (on(of_v), on(of_w)) == ("cpu:1", "cpu:2")
    np.testing.assert_allclose(of_v, 2 * np.cos(X), rtol=1e-6)
    np.testing.assert_allclose(of_w, np.sin(X).sum(0)[:, None] * np.ones((1, 2)), rtol=1e-6)


@pytest.mark.parametrize("scoped", [True, False])
def test_a_model_over_two_devices_trains_as_on_one(scoped: bool) -> None:
    shapes = {"a": (3, 8), "b": (8, 8), "c": (8, 1)}
    places = {"a": "cpu:1", "b": "cpu:2", "c": "cpu:2"}
    rng = np.random.default_rng(0)
    start = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    y = X.sum(1, keepdims=True)

    def losses(model: dict[str, dflow.Variable], scopes: bool) -> list[float]:
        optimizer = dflow.Optimizer(optax.adam(1e-2), model)
        for slot in jax.tree.leaves(optimizer.slots, is_leaf=dflow.is_variable):
            owner = [name for name in model if slot.name.endswith(model[name].name)]
            assert slot.device == (model[owner[0]].device if owner else None)

        def loss(x: Any) -> Any:
            h = x
            for name in shapes:
                if scopes:
                    with dflow.device(places[name]):
                        h = jnp.tanh(h @ model[name])
                else:
                    h = jnp.tanh(h @ model[name])
            return jnp.mean((h - y) ** 2)

        @dflow.jit
        def step(x: Any) -> Any:
            value, gradients = dflow.value_and_grad(loss, model)(x)
            optimizer.apply(gradients)
            return value

        return [float(step(X)) for _ in range(4)]

    there = {name: variable(places[name], start[name], name) for name in shapes}
    here = {name: dflow.Variable(start[name], name=f"{name}_here") for name in shapes}
    np.testing.assert_allclose(losses(there, scoped), losses(here, False), rtol=1e-5)
    assert {name: on(there[name].read()) for name in shapes} == places


class Unready:
    """A result whose value must not be waited for."""

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("waited for")

    block_until_ready = __array__


def test_all_devices_are_given_their_work_before_any_is_waited_for() -> None:
    def f(x: Any) -> Any:
        results = []
        for device in ("cpu:1", "cpu:2", "cpu:3"):
            with dflow.device(device):
                results.append(x + 1)
        return results

    plan, begun = plan_of(f, X), []

    def program(device: str) -> Any:
        def run(*args: Any) -> list[Any]:
            begun.append(device)
            return [Unready()]

        return flat_program(run)

    programs = [program(item.device) for item in plan.items if isinstance(item, Call)]
    outcomes: list[Any] = []
    run_of(
        Executable(plan, programs),
        LOCAL.store,
        None,
        StepId("", 0),
        [X],
        outcomes.append,
        lambda work: work(),  # type: ignore[arg-type]
    ).start()
    assert begun == ["cpu:1", "cpu:2", "cpu:3"]
    assert [type(result) for result in outcomes[0]] == [Unready] * 3


def two_layers() -> tuple[Callable[[Any], Any], list[dflow.Variable], list[Any]]:
    values = [np.full((3, 3), 0.5, np.float32), np.eye(3, dtype=np.float32)]
    v, w = variable("cpu:1", values[0]), variable("cpu:2", values[1])

    @dflow.jit
    def f(x: Any) -> Any:
        with dflow.device("cpu:1"):
            h = jnp.sin(x @ v)
        with dflow.device("cpu:2"):
            w.assign_add(jnp.ones((3, 3)))
            return h @ w

    return f, [v, w], values


def pure(x: Any, v: Any, w: Any) -> Any:
    return jnp.sin(x @ v) @ (w + 1)


def test_eager_runs_of_several_devices() -> None:
    f, [v, w], values = two_layers()
    with dflow.eager():
        np.testing.assert_allclose(f(X), pure(X, *values), rtol=1e-5)
    np.testing.assert_array_equal(w, values[1] + 1)
    assert [on(v.read()), on(w.read())] == ["cpu:1", "cpu:2"]


def test_a_gradient_outside_of_any_function() -> None:
    f, [v, w], values = two_layers()
    value, gradients = dflow.value_and_grad(lambda: f(X).sum(), [v, w])()
    np.testing.assert_allclose(value, pure(X, *values).sum(), rtol=1e-5)
    wanted = jax.grad(lambda v, w: pure(X, v, w).sum(), (0, 1))(*values)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5), gradients, list(wanted))
    w.assign_sub(gradients[1])
    np.testing.assert_allclose(w, values[1] + 1 - wanted[1], rtol=1e-5)
    assert on(w.read()) == "cpu:2"


def test_plain_transforms_of_a_function_of_several_devices() -> None:
    f, [_, w], values = two_layers()
    np.testing.assert_allclose(
        jax.grad(lambda x: f(x).sum())(X), jax.grad(lambda x: pure(x, *values).sum())(X), rtol=1e-5
    )
    np.testing.assert_array_equal(w, values[1] + 1)
    assert on(w.read()) == "cpu:2"


def test_a_device_that_is_not_there_is_refused_at_the_scope() -> None:
    match = (
        r"there is no device cpu:8 in this process; the devices there are: cpu:0 to cpu:7\n"
        r"  at .*device_scopes_.py:\d+\n  set XLA_FLAGS=--xla_force_host_platform_device_count=9 before"
    )
    with pytest.raises(dflow.DeviceError, match=match), dflow.device("cpu:8"):
        pass
    with (
        pytest.raises(dflow.DeviceError, match=r"no device cuda:0 in this process[\s\S]*name one"),
        dflow.device("cuda:0"),
    ):
        pass
    nowhere: Any = 1.0
    with pytest.raises(dflow.DeviceError, match="was given a float, which lives"), dflow.colocate_with(nowhere):
        pass


def test_what_is_fed_is_put_on_the_device_that_is_given() -> None:
    queue = dflow.FIFOQueue(4, jax.ShapeDtypeStruct((), jnp.int32), name="fed")
    dflow.data.feed(range(3), queue, device=jax.devices()[5])
    assert on(queue.dequeue()) == "cpu:5"
