"""`dflow.Optimizer`: structures, slots, names and errors; settings of transformations; stochastic rounding."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dflow
from dflow.testing import memory_cluster
from dflow.tracing.errors import GraphTypeError, VariableError
from dflow.tracing.rows.axis_slice import AxisSlice
from dflow.tracing.rows.random_rounding import rounded_at_random, widened
from dflow.tracing.rows.row_values import HIGH, LOW
from dflow.tracing.rows.slices import ArrayPart
from dflow.training.optimizer import derived_name
from dflow.training.optimizer_settings import settings_of
from tests.effort import examples

HERE = Path(__file__).name


def test_nested_containers_keep_their_structure_and_are_named_by_their_paths() -> None:
    tree = {"a": [jnp.zeros(1), (jnp.ones(2), None)], "b": {"c": lambda: jnp.full(3, 2.0)}, "d": 1.5}
    model = dflow.variables(tree, prefix="net/")
    values = dflow.read(model)
    assert jax.tree.structure(values) == jax.tree.structure(tree)
    names = [leaf.name for leaf in jax.tree.leaves(model, is_leaf=lambda leaf: isinstance(leaf, dflow.Variable))]
    assert names == ["net/a/0", "net/a/1/0", "net/b/c", "net/d"]
    np.testing.assert_array_equal(values["b"]["c"], [2, 2, 2])
    assert dflow.read({"x": 3, "v": model["d"]}) == {"x": 3, "v": 1.5}


@pytest.mark.parametrize("shape", ["one", "list", "tuple"])
def test_variables_in_any_structure(shape: str) -> None:
    first, second = dflow.Variable(jnp.ones(2)), dflow.Variable(jnp.ones(3))
    variables: Any = {"one": first, "list": [first, second], "tuple": (first, [second])}[shape]
    optimizer = dflow.Optimizer(optax.sgd(0.5), variables)

    @dflow.jit
    def step() -> None:
        optimizer.apply(dflow.grad(lambda: first.read().sum() + 2 * second.read().sum(), variables)())

    step()
    np.testing.assert_array_equal(first, [0.5, 0.5])
    np.testing.assert_array_equal(second, np.ones(3) if shape == "one" else np.zeros(3))


def test_slots_are_variables_named_for_what_they_belong_to() -> None:
    model = dflow.variables({"dense": {"kernel": jnp.ones((2, 3))}}, prefix="m/")
    optimizer = dflow.Optimizer(optax.adam(1e-3), model, name="adam")
    assert optimizer.slots[0].mu["dense"]["kernel"].name == "adam/0/mu/m/dense/kernel"
    assert optimizer.slots[0].count.name == "adam/0/count"
    assert dflow.Optimizer(optax.sgd(0.1), model).name != dflow.Optimizer(optax.sgd(0.1), model).name
    model = dflow.variables({"kernel": jnp.ones(2), "deep": {"kernel": jnp.ones(3)}}, prefix="paths/")
    mu = dflow.Optimizer(optax.adam(1e-3), model, name="paths").slots[0].mu
    assert (mu["kernel"].name, mu["deep"]["kernel"].name) == ("paths/0/mu/paths/kernel", "paths/0/mu/paths/deep/kernel")


def test_the_name_of_a_slot_begins_with_its_container_once() -> None:
    with dflow.container("run1"):
        w = dflow.Variable(jnp.zeros(2), name="w")
        inside = dflow.Optimizer(optax.adam(0.1), [w], name="adam")
        with dflow.container("again"):
            further = dflow.Optimizer(optax.adam(0.1), [w], name="adam")
    outside = dflow.Optimizer(optax.adam(0.1), [w], name="adam")
    names = [optimizer.slots[0].mu[0].name for optimizer in (inside, further, outside)]
    assert names == ["run1/adam/0/mu/w", "run1/again/adam/0/mu/run1/w", "adam/0/mu/run1/w"]


def test_slots_that_begin_as_a_copy_of_the_parameters() -> None:
    lookahead = optax.ema(0.5)
    copies = optax.GradientTransformation(
        lambda params: jax.tree.map(lambda p: p * 2, params), lambda updates, state, params=None: (updates, state)
    )
    weights = dflow.Variable(lambda: jnp.arange(3.0), name="weights")
    weights.assign_add(jnp.ones(3))
    optimizer = dflow.Optimizer(optax.chain(lookahead, copies), weights)
    np.testing.assert_array_equal(jax.tree.leaves(dflow.read(optimizer.slots))[-1], [2, 4, 6])
    np.testing.assert_array_equal(weights, [1, 2, 3])


# Wrong arguments, with the user's line.


def assert_names_line(error: BaseException, words: str) -> None:
    [line] = [line for line in str(error).splitlines() if line.startswith("  at ")]
    assert HERE in line
    assert words in Path(__file__).read_text().splitlines()[int(line.rpartition(":")[2]) - 1]


def test_what_is_no_variable_is_refused() -> None:
    v = dflow.Variable(jnp.ones(2))
    with pytest.raises(VariableError, match="an optimizer needs variables, but was given ArrayImpl, float") as caught:
        dflow.Optimizer(optax.sgd(0.1), [v, jnp.ones(3), 2.0])
    assert_names_line(caught.value, "dflow.Optimizer(optax.sgd(0.1), [v, jnp.ones(3), 2.0])")
    assert "make variables of a model's parameters with dflow.variables(params)" in str(caught.value)
    with pytest.raises(VariableError, match=r"variable 'n', which holds i32\[\] and has no gradient"):
        dflow.Optimizer(optax.sgd(0.1), [v, dflow.Variable(1, name="n")])
    with pytest.raises(VariableError, match="an optimizer needs variables, but was given none"):
        dflow.Optimizer(optax.sgd(0.1), {})


@pytest.mark.parametrize(
    ("gradients", "text"),
    [
        ({"a": jnp.ones(2)}, "the gradients have the structure .* but the variables"),
        ({"a": jnp.ones(2), "b": jnp.ones(3), "c": jnp.ones(1)}, "the gradients have the structure"),
        ([jnp.ones(2), jnp.ones(3)], "the gradients have the structure"),
        ({"a": jnp.ones(2), "z": jnp.ones(3)}, "the gradients have the structure"),
        ({"a": jnp.ones(2), "b": jnp.ones(1)}, r"the gradient of variable 'b' has the shape \(1,\), .* \(3,\)"),
    ],
    ids=["one missing", "one too many", "another container", "another name", "another shape"],
)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_gradients_that_do_not_fit_are_refused(gradients: Any, text: str, traced: bool) -> None:
    model = {"a": dflow.Variable(jnp.ones(2), name="a"), "b": dflow.Variable(jnp.ones(3), name="b")}
    optimizer = dflow.Optimizer(optax.adam(0.1), model)

    def step(given: Any) -> None:
        optimizer.apply(given)

    with pytest.raises(GraphTypeError, match=text) as caught:
        (dflow.jit(step) if traced else step)(gradients)
    assert_names_line(caught.value, "optimizer.apply(given)")
    np.testing.assert_array_equal(model["a"], [1, 1])


@pytest.mark.parametrize("name", ["update", "step", "minimize"])
def test_a_name_of_another_framework_says_apply(name: str) -> None:
    optimizer = dflow.Optimizer(optax.sgd(0.1), dflow.Variable(1.0, name="w"))
    with pytest.raises(AttributeError, match=rf"has no attribute '{name}'\n  at .*\n  write optimizer\.apply\("):
        getattr(optimizer, name)
    with pytest.raises(AttributeError, match=r"has no attribute 'elsewhere'$"):
        optimizer.elsewhere  # noqa: B018


def test_parameters_may_be_in_a_class_that_checks_them() -> None:
    @jax.tree_util.register_pytree_node_class
    class Layer:
        def __init__(self, weight: Any) -> None:
            assert weight.ndim == 2
            self.weight = weight

        def tree_flatten(self) -> tuple[Any, None]:
            return (self.weight,), None

        @classmethod
        def tree_unflatten(cls, _: None, children: Any) -> Layer:
            return cls(*children)

    layer = Layer(dflow.Variable(jnp.ones((2, 2)), name="checked"))
    opt = dflow.Optimizer(optax.adam(0.1), layer)
    opt.apply(dflow.grad(lambda: jnp.sum(layer.weight**2), layer)())
    np.testing.assert_allclose(layer.weight.read(), 0.9 * jnp.ones((2, 2)), rtol=1e-5)


# Names that every process derives from the variables.


def variables_of(*names: str) -> list[dflow.Variable]:
    return [dflow.Variable(jnp.zeros(2), name=name) for name in names]


def test_every_process_derives_the_same_name() -> None:
    made = dflow.Optimizer(optax.adam(0.1), variables_of("b", "a"))
    assert made.slots[0].mu[1].name == "optimizer_c4a78e5b/0/mu/a"


@settings(max_examples=examples(20), deadline=None)
@given(st.lists(st.sampled_from("abcd"), min_size=1, unique=True), st.lists(st.sampled_from("abcd"), min_size=1))
def test_names_are_equal_for_equal_variables_alone(one: list[str], other: list[str]) -> None:
    assert (derived_name(variables_of(*one)) == derived_name(variables_of(*other))) is (one == other)


def test_a_second_optimizer_of_the_same_variables_has_a_name_of_its_own() -> None:
    variables = variables_of("w", "b")
    made = [dflow.Optimizer(optax.adam(0.1), variables) for _ in range(3)]
    assert [optimizer.name.removeprefix(made[0].name) for optimizer in made] == ["", "_1", "_2"]
    assert dflow.Optimizer(optax.adam(0.1), variables_of("w", "b")).name == made[0].name


RATE = 0.5


def decaying(rate: float) -> Any:
    """Return a schedule with a number in a closure, one in its code, and one of this file."""
    return lambda count: rate * 0.25**count * RATE


#: By name: a transformation with a setting, and a text for its value.
CASES: dict[str, tuple[Callable[[float], Any], str]] = {
    "sgd": (optax.sgd, "scale.step_size: -0.125"),
    "adam": (lambda value: optax.adam(1.0, b1=value), "scale_by_adam.b1: 0.125"),
    "schedule": (lambda value: optax.sgd(optax.cosine_decay_schedule(value, 9)), "schedule.init_value: 0.125"),
    "function": (lambda value: optax.sgd(decaying(value)), "learning_rate.rate: 0.125"),
    "chain": (lambda value: optax.chain(optax.clip_by_global_norm(value), optax.sgd(1.0)), "max_norm: 0.125"),
    "groups": (
        lambda value: optax.multi_transform({"a": optax.sgd(value), "b": optax.set_to_zero()}, {"w": "a"}),
        "scale.step_size: -0.125",
    ),
    "accumulated": (lambda value: optax.MultiSteps(optax.sgd(value), 2), "scale.step_size: -0.125"),
    "array": (lambda value: optax.scale_by_schedule(lambda count: np.full(3, value)[count]), "value: 0.125"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_setting_is_found_by_its_name(name: str) -> None:
    make, text = CASES[name]
    found = settings_of(make(0.125))
    assert any(one.endswith(text) for one in found), found
    assert settings_of(make(0.125)) == found
    assert settings_of(make(0.25)) != found
    assert not any(" at 0x" in one for one in found)


def test_numbers_in_the_code_of_the_user_count() -> None:
    found = settings_of(optax.sgd(decaying(1.0)))
    assert [one.rpartition(": ")[2] for one in found if "code" in one or ".RATE" in one] == ["0.25", "0.5"]


@pytest.mark.once
def test_each_number_becomes_a_neighbour_and_the_mean_is_the_number() -> None:
    values = np.random.default_rng(0).normal(size=(2000, 8)).astype(np.float32)
    rounded = jax.vmap(lambda seed: rounded_at_random(jnp.asarray(values), seed))(jnp.arange(200, dtype=jnp.uint32))
    error = np.asarray(rounded, np.float32) - values
    step = np.abs(values) * 2**-7
    assert (np.abs(error) <= step).all()
    assert (np.abs(error.mean(0)) < 6 * step / 2 / np.sqrt(200)).all()
    # Those of neighbouring numbers, rows and updates are independent.
    for axis in range(3):
        one, other = np.delete(error, 0, axis), np.delete(error, -1, axis)
        assert abs((one * other).mean()) < 0.01 * (error**2).mean()
    exact = jnp.append(rounded[0].ravel(), jnp.array([jnp.inf, -jnp.inf, 0, -0.0], jnp.bfloat16))
    np.testing.assert_array_equal(rounded_at_random(exact.astype(jnp.float32), jnp.uint32(3)), exact)
    assert jnp.isnan(rounded_at_random(jnp.float32(jnp.nan), jnp.uint32(3)))
    part = ArrayPart(values.shape, AxisSlice(0, 1, 1000, 2))
    half = rounded_at_random(jnp.asarray(values[1::2]), jnp.uint32(7), part)
    np.testing.assert_array_equal(half, rounded[7][1::2])


@pytest.mark.once
def test_numbers_of_24_bits_are_a_bfloat16_one_and_8_bits() -> None:
    exact = jnp.array([1.0, -1.0, 1 + 2.0**-15, -1 + 2.0**-16, 2 - 2.0**-15, 2.0**127, 0, -0.0], jnp.float32)
    edges = jnp.append(exact, jnp.array([jnp.inf, -jnp.inf]))
    high, low = (rounded_at_random(edges, jnp.uint32(3), None, part) for part in (HIGH, LOW))
    np.testing.assert_array_equal(widened(high, low), edges)
    np.testing.assert_array_equal(high, edges.astype(jnp.bfloat16))
    values = jnp.asarray(np.random.default_rng(0).normal(size=(1000, 3)).astype(np.float32))
    found = [widened(*(rounded_at_random(values, jnp.uint32(n), None, part) for part in (HIGH, LOW))) for n in (1, 2)]
    for error in (np.asarray((one - values) / jnp.abs(values)) for one in found):
        assert np.abs(error).max() < 2.0**-15
        assert abs(error.mean()) < 2.0**-20
    assert (found[0] != found[1]).any()


def made(rounded: bool = True, **options: Any) -> tuple[Any, Any, Any]:
    ones, bits = jax.nn.initializers.ones, options.pop("extra_bits", False)
    table = dflow.Embedding(30, 4, dtype=jnp.bfloat16, initializer=ones, name="table", **options)
    rounding = {"stochastic_rounding": rounded, "extra_bits": bits}
    optimizer = dflow.Optimizer(optax.adagrad(1e-3), [table], name="adagrad", **rounding)

    @dflow.jit
    def step(ids: Any, scale: Any) -> None:
        optimizer.apply(dflow.grad(lambda: (table(ids) * scale).sum().astype(jnp.float32), [table])())

    return table, optimizer, step


@pytest.mark.once
def test_many_tiny_updates_arrive() -> None:
    for rounded in (True, False):
        table, _, step = made(rounded)
        for _ in range(300):
            step(jnp.array([1, 2, 3, 3]), jnp.bfloat16(1))
        moved = np.asarray(table.read()[1:4], np.float32).mean() - 1
        expected = -sum(1e-3 * g / np.sqrt(0.1 + g * g * n) for n in range(1, 301) for g in (1, 1, 2)) / 3
        assert abs(moved - expected) < 0.2 * abs(expected) if rounded else moved == 0
        np.testing.assert_array_equal(table.read()[4:], jnp.ones((26, 4), jnp.bfloat16))


@pytest.mark.once
@pytest.mark.parametrize(("shards", "bits"), [(1, False), (3, False), (3, True)])
def test_a_resumed_run_has_the_same_bits_on_any_shards(shards: int, bits: bool, tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    steps = [(draw.permutation(30)[:5].astype(np.int32), jnp.bfloat16(draw.normal())) for _ in range(12)]

    def run(container: str, shards: int, first: int, last: int) -> Any:
        with dflow.container(container):
            table, optimizer, step = made(shards=shards, extra_bits=bits)
        state = {"table": table, "optimizer": optimizer}
        if first:
            dflow.restore(tmp_path / "saved", state, names=lambda name: name.replace(container, "first"))
        for one in steps[first:last]:
            step(*one)
        if container == "first":
            dflow.save(tmp_path / "saved", state)
        return table.read()

    run("first", 2, 0, 6)
    np.testing.assert_array_equal(run("second", shards, 6, 12), run("whole", 1, 0, 12))


@pytest.mark.once
@pytest.mark.parametrize("bits", [False, True])
def test_tasks_and_updates_of_every_row_have_the_same_bits(bits: bool) -> None:
    ids = np.arange(0, 30, 7, dtype=np.int32)
    with dflow.container("rows"):
        rows, _, step = made(extra_bits=bits)
    with dflow.container("dense"):
        dense, optimizer, _ = made(extra_bits=bits)
    for _ in range(4):
        step(ids, jnp.bfloat16(1))
        optimizer.apply([jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype).at[ids].set(1), dense)])
    np.testing.assert_array_equal(rows.read(), dense.read())
    with memory_cluster(ps=2, workers=1) as cluster, closing(cluster.worker()) as worker:
        with worker.parameter_servers():
            table, _, step = made(extra_bits=bits)
        for _ in range(4):
            step(ids, jnp.bfloat16(1))
        np.testing.assert_array_equal(table.read(), rows.read())


@pytest.mark.once
def test_only_the_rows_of_a_lookup_are_rounded() -> None:
    """A program for rounding at random has no other arrays as large as the table than one for rounding to the nearest.

    On a CPU, XLA converts a whole table of bfloat16 to write a row of it.
    """

    def temporary(rounded: bool, bits: bool = False) -> int:
        vocabulary, name = dflow.Vocabulary(), f"of {rounded} {bits}"
        table = dflow.Embedding(300_000, 4, dtype=jnp.bfloat16, vocabulary=vocabulary, name=name)
        optimizer = dflow.Optimizer(optax.adagrad(1e-3), [table], stochastic_rounding=rounded, extra_bits=bits)

        @dflow.jit
        def step(ids: dflow.WideIds) -> None:
            found = table.find(ids)
            optimizer.apply(dflow.grad(lambda: table(found).sum().astype(jnp.float32), [table])(), found=found)

        memory = step.lower(dflow.wide_ids(np.arange(8))).compile().memory_analysis()
        return int(memory.temp_size_in_bytes)

    assert temporary(True) < temporary(False) + 300_000
    assert temporary(True, True) < temporary(False) + 300_000


@pytest.mark.once
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_other_dtypes_are_refused(dtype: Any) -> None:
    variable = dflow.Variable(jnp.zeros(3, dtype), name="v")
    with pytest.raises(dflow.VariableError, match=f"stochastic_rounding: expected .* got 'v' of {variable.dtype}"):
        dflow.Optimizer(optax.sgd(0.1), [variable], stochastic_rounding=True)
