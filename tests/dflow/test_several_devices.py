"""`dflow.jit` with arrays over several devices: equal to `jax.jit`, with and without state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

import dflow
from dflow.tracing.jaxprs.captured import captured
from tests.several_devices import DEADLINE_S, DEVICES, HERE, run_there

#: Other tests that need several devices; one process runs all of them.
OTHERS = [
    "tests/dflow/device_scopes_.py",
    "tests/dflow/device_arguments_.py",
    "tests/dflow/device_copies_.py",
    "tests/dflow/device_loops_.py",
    "tests/dflow/explicit_shardings_.py",
    "tests/dflow/explicit_training_.py",
    "tests/lowering/device_graphs_.py",
    "tests/dflow/graphs/auto_placement_.py",
    "tests/dflow/training/saving_several_devices_.py",
    "tests/dflow/jit_surface/jit_devices_.py",
    "tests/dflow/exporting/export_devices_.py",
    "tests/benchmarks/devices_.py",
    "tests/test_docs.py::test_the_snippets_of_a_page_run_and_print_what_it_says[devices.md]",
]
X = np.arange(64, dtype=np.float32).reshape(16, 4)

if not HERE:

    @pytest.mark.timeout(DEADLINE_S + 30)
    def test_in_a_process_of_several_devices() -> None:
        run_there(__file__, *OTHERS)

else:
    MESH = jax.make_mesh((DEVICES,), ("d",), axis_types=(AxisType.Auto,))
    ROWS, WHOLE = NamedSharding(MESH, PartitionSpec("d")), NamedSharding(MESH, PartitionSpec())
    Given = dict[str, Any]

    def stateless(**options: Any) -> Callable[[Any], Any]:
        return jax.jit(lambda x: {"y": x @ jnp.ones((4, 2)), "x": x}, **options)

    def stateful(**options: Any) -> tuple[Callable[[Any], Any], dflow.Variable]:
        count = dflow.Variable(0.0, name="count")

        def fn(x: Any) -> Any:
            count.assign_add(x.sum())
            return {"y": x @ jnp.ones((4, 2)), "x": x}

        return dflow.jit(fn, **options), count

    def same(ours: Any, theirs: Any) -> None:
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
        for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert one.sharding.is_equivalent_to(other.sharding, one.ndim), (one.sharding, other.sharding)

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"in_shardings": ROWS},
            {"in_shardings": (ROWS,), "out_shardings": WHOLE},
            {"out_shardings": ROWS},
            {"in_shardings": (WHOLE,), "out_shardings": {"y": WHOLE, "x": ROWS}},
        ],
        ids=["none", "in", "in and out", "out", "by leaf"],
    )
    @pytest.mark.parametrize("times", [1, 3])
    def test_shardings_in_and_out(options: Given, times: int) -> None:
        fn, count = stateful(**options)
        for _ in range(times):
            ours = fn(X)
            same(ours, stateless(**options)(X))
            np.testing.assert_array_equal(ours["y"], X @ np.ones((4, 2), np.float32))
        assert float(count) == X.sum() * times

    @pytest.mark.parametrize("last", [False, True])
    def test_shardings_beside_static_arguments_and_none(last: bool) -> None:
        count = dflow.Variable(0.0, name="count")

        def fn(scale: Any, x: Any, n: Any) -> Any:
            count.assign_add(1.0)
            return {"y": x * scale * n, "x": x}

        options: Given = {"in_shardings": (None, ROWS), "out_shardings": {"y": WHOLE, "x": None}}
        f = dflow.jit(fn if last else lambda n, scale, x: fn(scale, x, n), static_argnums=-1 if last else 0, **options)
        got = f(2.0, X, 3) if last else f(3, 2.0, X)
        np.testing.assert_array_equal(got["y"], X * 6)
        np.testing.assert_array_equal(got["x"], X)
        assert got["y"].sharding.is_equivalent_to(WHOLE, 2)
        assert float(count) == 1.0

    def test_arguments_may_lie_elsewhere_at_the_next_call() -> None:
        fn, count = stateful()
        for number, x in enumerate([X, jax.device_put(X, ROWS), X, jax.device_put(X, WHOLE)], 1):
            np.testing.assert_array_equal(fn(x)["y"], X @ np.ones((4, 2), np.float32))
            assert float(count) == X.sum() * number

    def test_a_variable_is_itself_after_an_array_from_another_device() -> None:
        with dflow.device("cpu:1"):
            bias = dflow.Variable(np.zeros(3, np.float32), name="bias")
        with dflow.device("cpu:2"):
            count = dflow.Variable(np.zeros(3, np.float32), name="count")

        @dflow.jit
        def step(total: Any, by: Any) -> Any:
            if isinstance(total, dflow.Variable):
                total.assign_add(by)
            return bias + by

        by = jnp.ones(3)
        for _ in range(2):  # the first call compiles, the second moves the argument to the program's devices
            step(jax.device_put(by, jax.devices()[3]), by)
        np.testing.assert_array_equal(step(count, by), by)
        np.testing.assert_array_equal(count, by)

    def test_a_variable_that_a_step_spreads_first_stays_spread_so() -> None:
        w = dflow.Variable(X, name="w")
        step = dflow.jit(w.assign)
        step(jax.device_put(X, ROWS))
        assert w.read().sharding.is_equivalent_to(ROWS, 2)
        for x in [X, jax.device_put(X, WHOLE), jax.device_put(X, NamedSharding(MESH, PartitionSpec(None, None)))]:
            step(x + 1)
            assert w.read().sharding.is_equivalent_to(ROWS, 2)
            np.testing.assert_array_equal(w, X + 1)

    def by_shards(fn: Any) -> Any:
        return jax.shard_map(fn, mesh=MESH, in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d"))

    def test_variables_inside_shard_map() -> None:
        w, total = dflow.Variable(jnp.full((4, 2), 2.0), name="w"), dflow.Variable(0.0, name="total")

        def shard(a: Any) -> Any:
            y = a @ w
            total.assign_add(jax.lax.psum(y.sum(), "d"))
            return y

        fn, want = dflow.jit(by_shards(shard)), X @ np.full((4, 2), 2.0, np.float32)
        for times in range(1, 4):
            np.testing.assert_array_equal(fn(X), want)
            assert float(total) == want.sum() * times
        assert fn(X).sharding.is_equivalent_to(ROWS, 2)

    def test_gradients_of_variables_through_shard_map() -> None:
        w, steps = dflow.Variable(jnp.full((4, 2), 0.5), name="w"), dflow.Variable(0.0, name="steps")

        def shard(a: Any) -> Any:
            steps.assign_add(1.0)
            return a @ w

        def loss(w: Any) -> Any:
            return ((X @ w) ** 2).mean()

        step = dflow.jit(lambda x: dflow.value_and_grad(lambda: jnp.mean(by_shards(shard)(x) ** 2), [w])())
        value, [gradient] = step(X)
        np.testing.assert_allclose(value, loss(w.read()), rtol=1e-6)
        np.testing.assert_allclose(gradient, jax.grad(loss)(w.read()), rtol=1e-6)
        assert float(steps) == 1.0

    def test_a_write_that_shards_do_not_agree_on_is_refused() -> None:
        w = dflow.Variable(0.0, name="w")

        def shard(a: Any) -> Any:
            w.assign(a.sum())
            return a

        with pytest.raises(
            dflow.DflowError, match=r"'w' is written in a shard_map a value that differs along 'd'[\s\S]*psum"
        ):
            dflow.jit(by_shards(shard))(X)

    def test_a_write_whose_agreement_jax_is_told_not_to_check_is_refused() -> None:
        w = dflow.Variable(0.0, name="w")

        def shard(a: Any) -> Any:
            w.assign(a.sum())
            return a

        spec = PartitionSpec("d")
        unchecked = jax.shard_map(shard, mesh=MESH, in_specs=spec, out_specs=spec, check_vma=False)
        with pytest.raises(dflow.DflowError, match=r"'w' is written .* check_vma=False[\s\S]*leave check_vma on"):
            dflow.jit(unchecked)(X)

    def test_a_function_without_state_inside_shard_map() -> None:
        spec = PartitionSpec("d")
        double = jax.shard_map(dflow.jit(lambda a: a * 2), mesh=MESH, in_specs=spec, out_specs=spec)
        np.testing.assert_array_equal(double(X), X * 2)
        np.testing.assert_array_equal(dflow.jit(double)(X), X * 2)

    def test_a_constraint_inside_a_function_with_state() -> None:
        w = dflow.Variable(jnp.zeros((16, 4)), name="w")
        fn = dflow.jit(lambda x: w.assign_add(jax.lax.with_sharding_constraint(x, ROWS)))
        for times in range(1, 4):
            fn(X)
            np.testing.assert_array_equal(w, X * times)

    def test_a_mesh_in_force_is_part_of_the_trace() -> None:
        w = dflow.Variable(1.0, name="w")
        fn = dflow.jit(lambda x: jax.lax.with_sharding_constraint(x * w, PartitionSpec("d")))
        with jax.set_mesh(MESH):
            assert fn(X).sharding.is_equivalent_to(ROWS, 2)

    @pytest.mark.parametrize("constant", [None, jax.devices()[3], ROWS], ids=["anywhere", "one", "rows"])
    @pytest.mark.parametrize("argument", [None, jax.devices()[3], ROWS], ids=["anywhere", "one", "rows"])
    def test_a_large_closed_over_array_decides_no_place(constant: Any, argument: Any) -> None:
        """An array that JAX embeds as a constant does not decide the device, wherever it is."""
        table = jnp.ones((128, 256)) if constant is None else jax.device_put(jnp.ones((128, 256)), constant)
        x = X if argument is None else jax.device_put(X, argument)
        ours, theirs = (jit(lambda x: x + table[0, 0]) for jit in (dflow.jit, jax.jit))
        for _ in range(2):
            same(ours(x), theirs(x))

    BOTH = NamedSharding(jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Auto,) * 2), PartitionSpec("d", "m"))

    @pytest.mark.parametrize("sharding", [ROWS, WHOLE, BOTH], ids=["rows", "whole", "both"])
    def test_a_variable_that_is_made_in_its_parts(sharding: Any) -> None:
        other = dflow.Variable(2.0, name="other")
        for initial in (X, lambda: jnp.asarray(X), lambda: X, lambda: other * X / 2):
            w = dflow.Variable(initial, sharding=sharding, name="w", dtype=jnp.float32)
            assert w.read().sharding.is_equivalent_to(sharding, 2)
            np.testing.assert_array_equal(w, X)

    def test_what_is_made_in_its_parts_is_never_whole() -> None:
        are_traced = []

        def initial() -> Any:
            value = jnp.zeros((16, 4))
            are_traced.append(isinstance(value, jax.core.Tracer))
            return value + 1

        dflow.Variable(initial, sharding=ROWS, name="w")
        assert are_traced
        assert all(are_traced)  # from the trace XLA compiles the part of each device

    def test_a_sharded_variable_and_device_scopes_do_not_go_together() -> None:
        w = dflow.Variable(lambda: jnp.zeros((16, 4)), sharding=ROWS, name="w")

        @dflow.jit
        def f(x: Any) -> Any:
            with dflow.device("cpu:1"):
                return x + w

        fact = r"'w' is spread over 8 devices, but is used in a function that names devices for parts of it: "
        line = r"\n  at \S*test_several.*:\d+"
        with pytest.raises(
            dflow.DeviceError, match=rf"{fact}%\w+ has the scope cpu:1{line}{line}\n  leave dflow.device out"
        ):
            f(X)
        with dflow.device("cpu:2"):
            other = dflow.Variable(1.0, name="other")
        with pytest.raises(dflow.DeviceError, match=f"{fact}variable 'other' is on cpu:2{line}"):
            dflow.jit(lambda: w * other)()
        for options in ({"near": w}, {}):
            match = "'v' has a sharding and " + ("near" if options else "a device scope")
            with dflow.device("cpu:1"), pytest.raises(dflow.DeviceError, match=match):
                dflow.Variable(X, sharding=ROWS, name="v", **options)

    @pytest.mark.parametrize("place", [WHOLE, ROWS, SingleDeviceSharding(jax.devices()[3])], ids=["whole", "rows", "3"])
    def test_a_closed_over_array_stays_where_it_was_and_may_be_donated(place: Any) -> None:
        table = jax.device_put(np.ones((1 << 13, 4), np.float32), place)
        held = captured(table)
        assert (held.sharding, held.committed) == (table.sharding, True)
        jax.block_until_ready(jax.jit(lambda x: x * 0, donate_argnums=0)(table))
        np.testing.assert_array_equal(held, np.ones((1 << 13, 4)))

    def test_what_is_compiled_ahead_takes_arguments_from_any_device() -> None:
        count = dflow.Variable(0.0, name="count")

        @functools.partial(dflow.jit, static_argnums=0, static_argnames="by")
        def fn(power: int, x: Any, *, by: int) -> Any:
            count.assign_add(x.sum())
            return x**power * by

        compiled = fn.lower(1, jax.ShapeDtypeStruct(X.shape, X.dtype), by=2).compile()
        for place in (None, jax.devices()[0], jax.devices()[3]):
            np.testing.assert_array_equal(compiled(jax.device_put(X, place)), 2 * X)
