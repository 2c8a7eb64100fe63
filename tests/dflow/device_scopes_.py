"""Functions over several devices of one process; run by `test_several_devices.py` where there are eight of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.lowering.queues.channel import StepId
from dflow.lowering.steps.executable import Executable
from dflow.lowering.steps.execute import Execution
from dflow.lowering.steps.plan import Call, Copy, Item, Plan, Read
from dflow.state_backends import LOCAL
from dflow.tracing.jaxprs.trace import trace
from tests.lowering.flat_programs import flat_program

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def on(array: Any) -> str:
    """The one device that an array lies on."""
    [where] = array.devices()
    return f"cpu:{where.id}"


def variable(device: str, value: Any = 1.0, name: str | None = None) -> dflow.Variable:
    with dflow.device(device):
        return dflow.Variable(jnp.asarray(value, jnp.float32), name=name)


def plan_of(fn: Callable[..., Any], *args: Any) -> Plan:
    """What a call of `fn` does."""
    return LOCAL.lower(trace(fn, args, {}), check=True, observe=None).lowered.plan


def calls(items: tuple[Item, ...]) -> list[str]:
    return [item.device for item in items if isinstance(item, Call)]


# Copies that wait.


def layers(weights: Sequence[dflow.Variable], x: Any) -> Any:
    """Layers on one device of weights on another, with a bit of work elsewhere between them."""
    for weight in weights:
        with dflow.device("cpu:1"):
            x = x @ weight
        with dflow.device("cpu:2"):
            x = jnp.sin(x)
    return x


def by_hand(weights: Sequence[np.ndarray[Any, Any]], x: Any) -> Any:
    for weight in weights:
        x = np.sin(x @ weight)
    return x


def large_weights(count: int) -> list[np.ndarray[Any, Any]]:
    """Weights worth an edge, 1 MiB each."""
    draws = np.random.default_rng(0)
    return [draws.normal(size=(512, 512)).astype(np.float32) / 20 for _ in range(count)]


def test_weights_are_copied_in_time_for_their_layer_and_no_earlier() -> None:
    values = large_weights(12)
    weights = [variable("cpu:3", value) for value in values]
    items = plan_of(lambda x: layers(weights, x), jnp.ones((2, 512))).items
    late = [item for item in items if isinstance(item, Copy) and item.after]
    assert len(late) >= 6
    for copy in late:
        (before,) = (items[number] for number in copy.after)
        assert isinstance(before, Call)
        assert before.device == copy.device == "cpu:1"
    f, x = dflow.jit(lambda x: layers(weights, x)), np.ones((2, 512), np.float32)
    for _ in range(2):
        np.testing.assert_allclose(f(x), by_hand(values, x), rtol=1e-3, atol=1e-4)


def test_weights_that_the_step_writes_are_copied_as_they_were_before() -> None:
    values = large_weights(12)
    weights = [variable("cpu:3", value) for value in values]

    @dflow.jit
    def step(x: Any) -> Any:
        y = layers(weights, x)
        for weight in weights:
            weight.assign(weight * 0.5)
        return y, layers(weights, x)

    x = np.ones((2, 512), np.float32)
    for turn in range(2):
        before, after = ([value * factor for value in values] for factor in (0.5**turn, 0.5 ** (turn + 1)))
        for found, wanted in zip(step(x), (by_hand(before, x), by_hand(after, x)), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(weights[0].read(), values[0] / 4)


def test_in_a_loop_that_waits_for_a_queue_copies_wait_too() -> None:
    values = large_weights(12)
    weights = [variable("cpu:3", value) for value in values]
    queue = dflow.FIFOQueue(4, jax.ShapeDtypeStruct((2, 512), jnp.float32))

    def turn(total: Any, _: None) -> Any:
        return total + layers(weights, queue.dequeue()), None

    def loop() -> Any:
        return jax.lax.scan(turn, jnp.zeros((2, 512)), None, length=3)[0]

    assert any(isinstance(item, Copy) and item.after for item in plan_of(loop).bodies[0].items)
    elements = [np.full((2, 512), number, np.float32) for number in range(3)]
    for element in elements:
        queue.enqueue(element)
    found = dflow.jit(loop)()
    np.testing.assert_allclose(found, sum(by_hand(values, x) for x in elements), rtol=1e-3, atol=1e-3)


def test_variables_that_are_only_copied_elsewhere_are_not_copied_where_they_are() -> None:
    w = variable("cpu:3", np.ones(3))

    def copied() -> Any:
        with dflow.device("cpu:1"):
            return w + 1

    read, copy, call = plan_of(copied).items
    assert isinstance(read, Read)
    assert isinstance(copy, Copy)
    assert isinstance(call, Call)
    np.testing.assert_array_equal(dflow.jit(copied)(), [2, 2, 2])


def test_a_variable_that_is_given_back_is_a_copy_which_may_be_donated() -> None:
    w = variable("cpu:3", np.ones(3))

    @dflow.jit
    def f() -> Any:
        with dflow.device("cpu:1"):
            y = w + 1
        return y, w.read()

    _, value = f()
    value.delete()
    np.testing.assert_array_equal(w.read(), [1, 1, 1])


# Scopes.


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


# What is done where.


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


def test_a_value_is_moved_once_to_each_device_that_takes_it() -> None:
    v = variable("cpu:1", X)

    def f() -> Any:
        value = v.read() * 2
        with dflow.device("cpu:2"):
            a = value + 1, value + 2
        with dflow.device("cpu:3"):
            b = value + 3
        return a, b

    plan = plan_of(f)
    assert [item.device for item in plan.items if isinstance(item, Copy)] == ["cpu:2", "cpu:3"]
    assert calls(plan.items) == ["cpu:1", "cpu:2", "cpu:3"]
    (a, _), b = dflow.jit(f)()
    np.testing.assert_array_equal(a, 2 * X + 1)
    np.testing.assert_array_equal(b, 2 * X + 3)


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


# Arguments and results.


@pytest.mark.parametrize("place", [0, 1, 2, 7])
def test_an_argument_may_lie_anywhere(place: int) -> None:
    v, w = variable("cpu:1", X), variable("cpu:2", X)

    @dflow.jit
    def f(x: Any, z: Any) -> Any:
        v.assign_add(x)
        return v + x, w * x, w - z

    # Over explicit axes its type would name the mesh, which a variable on no mesh refuses.
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    for x in (X, jax.device_put(X, jax.devices()[place]), jax.device_put(X, spread)):
        before = np.asarray(v)
        one, other, third = f(x, x)
        assert (on(one), on(other), on(third)) == ("cpu:1", "cpu:2", "cpu:2")
        np.testing.assert_array_equal(one, before + 2 * X)
        np.testing.assert_array_equal(other, X * X)
        np.testing.assert_array_equal(third, 0 * X)


@pytest.mark.parametrize("place", [None, 3, 5])
def test_a_donated_argument_is_gone(place: int | None) -> None:
    v = variable("cpu:3", X)

    def step(x: Any) -> Any:
        v.assign_add(x)
        return x * 2

    f = dflow.jit(step, donate_argnums=0)
    for _ in range(2):
        x = jnp.asarray(X) if place is None else jax.device_put(X, jax.devices()[place])
        np.testing.assert_array_equal(f(x), 2 * X)
        assert x.is_deleted() == (place == 3)


def test_a_value_read_stays_when_the_variable_is_written() -> None:
    v, w = variable("cpu:1", X), variable("cpu:2", X)

    @dflow.jit
    def f() -> Any:
        before = v.read()
        v.assign(before * 2)
        w.assign(before)
        return before

    kept = [f() for _ in range(3)]
    for times, array in enumerate(kept):
        np.testing.assert_array_equal(array, X * 2**times)
    np.testing.assert_array_equal(w, X * 4)


def test_keys_and_plain_numbers_cross_devices() -> None:
    with dflow.device("cpu:1"):
        key = dflow.Variable(jax.random.key(0))

    @dflow.jit
    def f(scale: Any) -> Any:
        with dflow.device("cpu:2"):
            return jax.random.normal(key.read(), (3,)) * scale

    y = f(2.0)
    assert on(y) == "cpu:2"
    np.testing.assert_array_equal(y, jax.random.normal(jax.random.key(0), (3,)) * 2.0)


def test_a_queue_is_the_hosts_and_passes_values_between_devices() -> None:
    queue = dflow.FIFOQueue(4, [jax.ShapeDtypeStruct((2, 3), jnp.float32)])
    v, w = variable("cpu:1", X), variable("cpu:2", 0 * X)

    @dflow.jit
    def put() -> None:
        queue.enqueue([v.read() * 2])

    @dflow.jit
    def take() -> Any:
        [value] = queue.dequeue()
        w.assign_add(value)
        with dflow.device("cpu:3"):
            return value + 1

    for times in (1, 2):
        put()
        assert on(take()) == "cpu:3"
        np.testing.assert_array_equal(w, 2 * times * X)


# Both at once.


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
    Execution(
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


# Loops and branches.


def loop_scan(v: Any, w: Any, x: Any) -> Any:
    def body(carry: Any, row: Any) -> Any:
        with dflow.device("cpu:1"):
            carry = jnp.sin(carry) + row
            v.assign_add(carry)
        with dflow.device("cpu:2"):
            w.assign_add(carry * 2)
            row = carry - w
        return carry, (row, carry)

    return jax.lax.scan(body, jnp.zeros(3), x)


def loop_while(v: Any, w: Any, x: Any) -> Any:
    def body(state: Any) -> Any:
        count, value = state
        with dflow.device("cpu:1"):
            value = value + v.read()
        with dflow.device("cpu:2"):
            w.assign_add(value)
        return count + 1, value

    return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, x[0]))


def branch(v: Any, w: Any, x: Any) -> Any:
    def one(y: Any) -> Any:
        with dflow.device("cpu:1"):
            return y + v.read()

    def other(y: Any) -> Any:
        with dflow.device("cpu:2"):
            w.assign_add(y)
            return y * w.read()

    return [jax.lax.cond(x[0, 1] > bound, one, other, x[0]) for bound in (0.0, 5.0)]


def nested(v: Any, w: Any, x: Any) -> Any:
    def body(carry: Any, row: Any) -> Any:
        return loop_while(v, w, row[None])[1] + carry, None

    return jax.lax.scan(body, jnp.zeros(3), x, reverse=True)[0]


def differentiated(v: Any, w: Any, x: Any) -> Any:
    def loss() -> Any:
        def body(carry: Any, row: Any) -> Any:
            with dflow.device("cpu:1"):
                carry = jnp.sin(carry * v.read()) + row
            with dflow.device("cpu:2"):
                return carry * w.read(), None

        return jax.lax.scan(body, jnp.ones(3), x)[0].sum()

    return dflow.value_and_grad(loss, [v, w])()


def checkpointed(v: Any, w: Any, x: Any) -> Any:
    @jax.checkpoint
    def layer(y: Any) -> Any:
        with dflow.device("cpu:1"):
            y = jnp.sin(y * v.read())
        with dflow.device("cpu:2"):
            return jnp.cos(y * w.read())

    return dflow.value_and_grad(lambda: layer(jnp.asarray(x[0])).sum(), [v, w])()


@pytest.mark.parametrize("program", [loop_scan, loop_while, branch, nested, differentiated, checkpointed])
def test_bodies_over_two_devices(program: Callable[..., Any]) -> None:
    there = variable("cpu:1", np.full(3, 0.5)), variable("cpu:2", np.full(3, 0.25))
    here = dflow.Variable(jnp.full(3, 0.5)), dflow.Variable(jnp.full(3, 0.25))
    run = dflow.jit(lambda x: program(*there, x))
    for _ in range(2):
        got = run(X)
        with dflow.device("cpu:0"), pytest.MonkeyPatch.context() as patch:
            patch.setattr(dflow, "device", lambda name: dflow.colocate_with(here[0]))
            want = dflow.jit(lambda x: program(*here, x))(X)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)
        for one, other in zip(there, here, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5)
    assert [on(each.read()) for each in there] == ["cpu:1", "cpu:2"]


def test_two_loops_over_devices_meet_in_a_queue() -> None:
    queue = dflow.FIFOQueue(2, jax.ShapeDtypeStruct((3,), jnp.float32))
    made, taken = variable("cpu:1", np.zeros(3)), variable("cpu:2", np.zeros(3))

    @dflow.jit
    def make() -> Any:
        def body(_: Any, value: Any) -> Any:
            with dflow.device("cpu:1"):
                value = value + 1
                queue.enqueue(value)
            with dflow.device("cpu:2"):
                value = value * 1
            made.assign_add(value)
            return value

        return jax.lax.fori_loop(0, 8, body, jnp.zeros(3))

    @dflow.jit
    def take() -> Any:
        def body(_: Any, total: Any) -> Any:
            value = queue.dequeue()
            with dflow.device("cpu:3"):
                total = total + value
            with dflow.device("cpu:2"):
                taken.assign_add(value)
            return total

        return jax.lax.fori_loop(0, 8, body, jnp.zeros(3))

    maker = threading.Thread(target=make)
    maker.start()
    total = take()
    maker.join()
    for one in (total, made, taken):
        np.testing.assert_array_equal(one, np.full(3, 36.0))
    assert (on(total), on(made.read()), on(taken.read())) == ("cpu:3", "cpu:1", "cpu:2")


def test_steps_of_many_threads_over_two_devices_lose_no_update() -> None:
    v, w = variable("cpu:1", np.zeros(3)), variable("cpu:2", np.zeros(3))

    @dflow.jit
    def step(x: Any) -> Any:
        v.assign_add(x)
        w.assign_add(2 * x)
        return v.read() + w.read()

    threads = [threading.Thread(target=lambda: [step(jnp.ones(3)) for _ in range(20)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(v, np.full(3, 80.0))
    np.testing.assert_array_equal(w, np.full(3, 160.0))


def test_a_loop_of_one_device_is_one_op_on_it() -> None:
    def f(x: Any) -> Any:
        def body(carry: Any, row: Any) -> Any:
            with dflow.device("cpu:3"):
                carry = carry + row
            return carry, carry * 2

        return jax.lax.scan(body, jnp.zeros(3), x)

    assert calls(plan_of(f, X).items) == ["cpu:3"]
    total, rows = dflow.jit(f)(X)
    assert (on(total), on(rows)) == ("cpu:3", "cpu:3")


# Without a graph of its own.


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


# What is refused.


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


def test_an_argument_on_another_device_than_a_variable_names_the_variable() -> None:
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    w = dflow.Variable(jnp.ones(8), name="spread", sharding=spread)
    here, there = jnp.ones(8), jax.device_put(jnp.ones(8), jax.devices()[3])
    for step in (w.assign_add, lambda x: x * w.read()):
        run = dflow.jit(step)
        for before in ([], [here]):
            for x in before:
                run(x)
            with pytest.raises(ValueError, match=r"incompatible devices .* variable 'spread' with shape") as caught:
                run(there)
            assert "_dflow" not in str(caught.value)


@pytest.mark.parametrize("given", ["cpu:2", "cpu:3"])
def test_a_donated_argument_is_given_up_only_where_it_is_used(given: str) -> None:
    w = variable("cpu:2", np.ones((16, 4)), name="w")
    number = int(given.partition(":")[2])

    @partial(dflow.jit, donate_argnums=0)
    def f(x: Any) -> Any:
        with dflow.device("cpu:2"):
            return x * 2 + w

    for _ in range(2):
        x = jax.device_put(jnp.ones((16, 4)), jax.devices()[number])
        np.testing.assert_array_equal(f(x), 3.0 * np.ones((16, 4)))
        assert x.is_deleted() == (given == "cpu:2")
