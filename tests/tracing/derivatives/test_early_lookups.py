"""Lookups inside loops, branches and checkpoints, with gradients by rows; the while loop with a backward pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
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
from dflow.tracing.derivatives import early_lookups
from dflow.tracing.errors import DflowError, GraphTypeError
from dflow.tracing.rows import rows_to_dense
from dflow.tracing.state.resources import Variable
from tests.effort import examples

HERE = Path(__file__).name
COUNT = 97
TABLE = jnp.sin(jnp.arange(2.0 * COUNT)).reshape(COUNT, 2)
IDS = jnp.array([3, 3, 0, -1, 11])


@pytest.fixture
def table() -> Variable:
    return dflow.Variable(TABLE, name="table")


def added(t: Any, ids: Any) -> Any:
    """A loop over lookups, like one over microbatches."""
    return jax.lax.scan(lambda c, i: (c + jnp.sin(t[i] * c).sum(), None), 1.0, ids)[0]


def nested(t: Any, ids: Any) -> Any:
    return jax.lax.scan(lambda c, i: (c * added(t, jnp.stack([i, i + 1])), t[i]), 1.0, ids)[0]


def of_branches(t: Any, ids: Any) -> Any:
    cases = [lambda: jnp.sum(t[ids] ** 2), lambda: jnp.float32(1), lambda: jnp.sum(t[ids[0]] * t[ids[1]])]
    return sum(jax.lax.switch(number, cases) * (number + 1) for number in ids[:3])


BODIES: dict[str, Callable[[Any, Any], Any]] = {
    "scan": added,
    "reversed": lambda t, ids: jax.lax.scan(lambda c, i: (c * 2 + t[i], c[1]), TABLE[0], ids, reverse=True)[1].sum(),
    "switch": of_branches,
    "checkpoint": lambda t, ids: jax.checkpoint(lambda i: jnp.sin(t[i]).sum())(ids),
    "checkpoint of a read": lambda t, ids: jax.checkpoint(lambda v, i: jnp.sin(v[i]).sum())(jnp.asarray(t), ids),
    "scan of scans": nested,
    "vmap": lambda t, ids: jax.vmap(lambda i: added(t, jnp.stack([i, i + 1])))(ids).sum(),
    "filled": lambda t, ids: jax.checkpoint(lambda i: jnp.take(t, i + 90, axis=0, fill_value=2.0).sum() ** 2)(ids),
    "clipped": lambda t, ids: jax.checkpoint(lambda i: jnp.take(t, i + 90, axis=0, mode="clip").sum() ** 2)(ids),
}


@pytest.mark.parametrize("kind", BODIES)
def test_the_gradient_of_lookups_in_a_body_is_rows(kind: str, table: Variable) -> None:
    value, gradient = dflow.value_and_grad(lambda: BODIES[kind](table, IDS), table, rows=True)()
    wanted = jax.value_and_grad(lambda t: BODIES[kind](t, IDS))(TABLE)
    assert dflow.is_row_gradient(gradient)
    np.testing.assert_allclose(value, wanted[0], rtol=1e-5)
    np.testing.assert_allclose(gradient.dense(), wanted[1], rtol=1e-4, atol=1e-5)


PROGRAMS = st.recursive(
    st.sampled_from(["t", "u", "whole", "count"]),
    lambda inner: st.tuples(
        st.sampled_from(["scan", "fori", "cond", "checkpoint", "jit", "feedback"]), st.lists(inner, max_size=3)
    ),
    max_leaves=8,
)


def run(program: Any, state: Any, ids: Any, c: Any) -> Any:
    """Return the value and gradient of a program."""
    match program:
        case "t" | "u" | "whole" | "count":
            return LEAVES[program](state, ids, c)
        case kind, inner:

            def body(ids: Any, c: Any) -> Any:
                for each in inner:
                    c = run(each, state, ids % COUNT, c)
                return jnp.tanh(c)

            return WRAPPED[kind](body, ids, c)


def counted(state: Any, ids: Any, c: Any) -> Any:
    if isinstance(state["count"], Variable):
        state["count"].assign_add(1.0)
    return c


LEAVES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "t": lambda state, ids, c: c + jnp.sin(state["t"][ids] * c).sum(),
    "u": lambda state, ids, c: c * state["u"][ids + 1].mean(),
    "whole": lambda state, ids, c: c + jnp.asarray(state["w"]).sum() * 0.1,
    "count": counted,
}
WRAPPED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "scan": lambda body, ids, c: jax.lax.scan(lambda c, i: (body(i, c), c), c, jnp.stack([ids, ids + 1]))[0],
    "fori": lambda body, ids, c: jax.lax.fori_loop(0, 2, lambda n, c: body(ids + n, c), c),
    "cond": lambda body, ids, c: jax.lax.cond(ids.sum() % 2 == 0, lambda: body(ids, c), lambda: body(ids + 5, -c)),
    "checkpoint": lambda body, ids, c: jax.checkpoint(body)(ids, c),
    "jit": lambda body, ids, c: jax.jit(body)(ids, c),
    "feedback": lambda body, ids, c: body(ids + (c > 0.3), c),
}


@settings(max_examples=examples(12), deadline=None)
@given(st.lists(PROGRAMS, max_size=4))
def test_random_bodies_have_the_gradient_that_jax_gives(programs: list[Any]) -> None:
    arrays = {"t": TABLE, "u": TABLE * 0.5, "w": jnp.ones(3)}
    names = [*arrays]
    state = {**{name: dflow.Variable(value, name=name) for name, value in arrays.items()}, "count": None}
    state["count"] = dflow.Variable(0.0, name="count", trainable=False)

    def loss(state: Any) -> Any:
        c = jnp.float32(0.5)
        for program in programs:
            c = run(program, state, IDS, c)
        return c + 0 * (jnp.asarray(state["w"]).sum() + state["t"][IDS].sum() + state["u"][IDS].sum())

    step = dflow.jit(dflow.value_and_grad(lambda: loss(state), [state[name] for name in names]))
    value, gradients = step()
    wanted = jax.jit(jax.value_and_grad(lambda held: loss({**held, "count": None})))(arrays)
    np.testing.assert_allclose(value, wanted[0], rtol=1e-4, atol=1e-5)
    for name, gradient in zip(names, gradients, strict=True):
        np.testing.assert_allclose(gradient, wanted[1][name], rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("kind", ["switch", "checkpoint", "scan of scans"])
def test_a_step_allocates_nothing_of_the_size_of_its_table(kind: str) -> None:
    large = dflow.Variable(lambda: jnp.ones((50_000, 16)), name="large")
    optimizer = dflow.Optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adagrad(0.1)), [large])

    @dflow.jit
    def step(ids: Any) -> None:
        optimizer.apply(dflow.grad(lambda: BODIES[kind](large, ids), [large])())

    memory = step.lower(IDS).compile().memory_analysis()
    assert memory.temp_size_in_bytes < large.type.size_bytes / 100


def test_what_a_body_writes_is_written_once(table: Variable) -> None:
    count = dflow.Variable(0, name="count", trainable=False)

    def body(c: Any, i: Any) -> tuple[Any, None]:
        count.assign_add(1)
        return c + jnp.sin(table[i + count.read() - 1] * c).sum(), None

    gradient = dflow.grad(lambda: jax.lax.scan(body, 1.0, IDS)[0], table, rows=True)()
    assert count.read() == 5
    np.testing.assert_array_equal(gradient.indices, [3, 4, 2, 2, 15])


def test_a_loop_over_a_table_on_a_task_takes_rows_there_once() -> None:
    with memory_cluster(ps=1, workers=1) as cluster:
        worker = cluster.worker()
        with worker.parameter_servers():
            table = dflow.Variable(lambda: TABLE + 0, name="table")
            optimizer = dflow.Optimizer(optax.adagrad(0.1), [table], name="opt")

        @dflow.jit
        def step(ids: Any) -> None:
            optimizer.apply(dflow.grad(lambda: added(table, ids), [table])())

        step(IDS)
        sent = cluster.tasks["ps:0"].server.traffic() + worker.traffic()
        assert max(edge.size_bytes for edge in sent) == 5 * 2 * 4
        rule = optax.adagrad(0.1)
        updates, _ = rule.update(jax.grad(added)(TABLE, IDS), rule.init(TABLE))
        np.testing.assert_allclose(table.read(), TABLE + updates, rtol=1e-4)
        worker.close()


def decoded(t: Any, ids: Any) -> Any:
    """The indices of each iteration come from the lookup of the previous one."""

    def body(carry: Any, _: Any) -> Any:
        i, total = carry
        row = t[i]
        return ((row.sum() > 0).astype(jnp.int32) + i + 1, total + row.sum() ** 2), None

    return jax.lax.scan(body, (ids[0], 0.0), length=3)[0][1]


def test_a_loop_that_looks_up_what_it_found_has_a_dense_gradient(
    monkeypatch: pytest.MonkeyPatch, table: Variable
) -> None:
    monkeypatch.setattr(early_lookups, "LARGE_BYTES", 1)
    other = dflow.Variable(TABLE, name="other")
    with pytest.warns(
        dflow.DenseGradientWarning, match=r"'table' is looked up inside a scan(.|\n)*look the rows"
    ) as all:
        got = dflow.grad(lambda: decoded(table, IDS) + added(other, IDS), [table, other], rows=True)()
    assert len(all) == 1
    np.testing.assert_allclose(got[0], jax.grad(decoded)(TABLE, IDS), rtol=1e-5)
    np.testing.assert_allclose(got[1].dense(), jax.grad(added)(TABLE, IDS), rtol=1e-4, atol=1e-6)


def test_a_loop_that_finds_as_many_rows_as_there_are_has_a_dense_gradient() -> None:
    few = dflow.Variable(TABLE[:5], name="few")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradient = dflow.grad(lambda: added(few, IDS % 5), few, rows=True)()
    np.testing.assert_allclose(gradient, jax.grad(added)(TABLE[:5], IDS % 5), rtol=1e-5)


def by_branches(t: Any, rare: Any, is_rare: Any) -> Any:
    return jax.lax.cond(is_rare, lambda: added(t, rare), lambda: added(t, IDS))


#: Number of lookups of a rare branch; with the five of the other branch they equal the rows of the table.
MANY = jnp.arange(COUNT - len(IDS))


@pytest.mark.parametrize("is_rare", [True, False])
def test_a_large_table_that_a_rare_branch_looks_up_often_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, table: Variable, is_rare: bool
) -> None:
    def loss(t: Any) -> Any:
        return jax.lax.scan(lambda c, _: (c + by_branches(t, MANY, is_rare), None), 0.0, length=1)[0]

    monkeypatch.setattr(early_lookups, "LARGE_BYTES", 1)
    fact = rf"'table': 97 lookups in 97 rows, with those of every branch of a cond(.|\n)*{HERE}:\d+\n.* inside each"
    with pytest.warns(dflow.DenseGradientWarning, match=fact) as all:
        gradient = dflow.grad(lambda: loss(table), table, rows=True)()
    assert len(all) == 1
    np.testing.assert_allclose(gradient, jax.grad(by_branches)(TABLE, MANY, is_rare), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("other", [IDS, jnp.arange(COUNT // 3)], ids=["few", "a third"])
@pytest.mark.parametrize("rare", [IDS, MANY, jnp.arange(2 * COUNT) % COUNT], ids=["few", "many", "more than there are"])
def test_a_dense_gradient_of_branches_is_warned_of_where_a_branch_looks_up_few_rows(
    monkeypatch: pytest.MonkeyPatch, table: Variable, rare: Any, other: Any
) -> None:
    monkeypatch.setattr(early_lookups, "LARGE_BYTES", 1)
    with warnings.catch_warnings(record=True, action="always") as caught:
        dflow.grad(lambda: jax.lax.cond(False, lambda: 2 * table[rare].sum(), lambda: -table[other].sum()), table)()
    assert len(caught) == (len(rare) + len(other) >= COUNT and other is IDS)


def test_branches_that_each_take_their_own_gradient_update_the_rows_alone(
    monkeypatch: pytest.MonkeyPatch, table: Variable
) -> None:
    """The remedy that the warning names."""
    monkeypatch.setattr(early_lookups, "LARGE_BYTES", 1)
    monkeypatch.setattr(rows_to_dense, "LARGE_BYTES", 1)

    @dflow.jit
    def step(is_rare: Any) -> None:
        def descend(ids: Any) -> None:
            table.assign_sub(dflow.grad(lambda: added(table, ids), table)())

        jax.lax.cond(is_rare, lambda: descend(MANY), lambda: descend(IDS))

    step(False)  # without a warning
    np.testing.assert_allclose(table.read(), TABLE - jax.grad(added)(TABLE, IDS), rtol=1e-4, atol=1e-6)


def test_a_print_in_a_body_happens_once(table: Variable, capfd: pytest.CaptureFixture[str]) -> None:
    def body(c: Any, i: Any) -> tuple[Any, None]:
        jax.debug.print("seen {}", i)
        return c + table[i].sum(), None

    gradient = dflow.jit(dflow.grad(lambda: jax.lax.scan(body, 1.0, IDS)[0], table))()
    jax.effects_barrier()
    assert capfd.readouterr().out.count("seen") == 5
    np.testing.assert_allclose(gradient, jnp.zeros_like(TABLE).at[IDS].add(1.0))


def test_indices_from_a_queue_are_taken_once(monkeypatch: pytest.MonkeyPatch, table: Variable) -> None:
    monkeypatch.setattr(early_lookups, "LARGE_BYTES", 1)
    queue = dflow.FIFOQueue(4, jnp.int32(0))
    queue.enqueue(jnp.int32(4))
    is_full = queue.size() > 0
    taken = dflow.grad(lambda: jax.lax.cond(is_full, lambda: 2 * table[queue.dequeue()].sum(), lambda: 0.0), table)
    with pytest.warns(dflow.DenseGradientWarning, match="'table' is looked up inside a cond"):
        gradient = dflow.jit(taken)()
    np.testing.assert_allclose(gradient, jnp.zeros_like(TABLE).at[4].add(2.0))
    assert queue.size() == 0


@pytest.mark.parametrize("use", ["carried", "given back", "read whole"])
def test_a_table_that_is_used_otherwise_too_has_a_dense_gradient(use: str, table: Variable) -> None:
    uses: dict[str, Callable[[Any], Any]] = {
        "carried": lambda t: jax.lax.scan(lambda c, i: (2 * c, c[i].sum()), jnp.asarray(t), IDS)[1].sum(),
        "given back": lambda t: jax.checkpoint(lambda i: (t[i], jnp.asarray(t)))(IDS)[1].sum(),
        "read whole": lambda t: added(t, IDS) + jnp.sum(jnp.asarray(t) ** 2),
    }
    gradient = dflow.grad(lambda: uses[use](table), table, rows=True)()
    np.testing.assert_allclose(gradient, jax.grad(uses[use])(TABLE), rtol=1e-4, atol=1e-6)


def test_a_branch_that_is_not_taken_computes_no_places() -> None:
    table, called = dflow.Variable(jnp.ones((97, 2)), name="table"), []

    def found(n: Any) -> Any:
        # The loop does not end if n is 0.
        return jax.lax.while_loop(lambda i: (i % 7 != 0) | (n <= 0), lambda i: i + 1, jnp.int32(3))

    def told(n: Any) -> Any:
        return jax.pure_callback(lambda n: (called.append(n), n)[1], jax.ShapeDtypeStruct((), jnp.int32), n)

    def loss(n: Any) -> Any:
        return jax.lax.cond(n > 0, lambda: table[found(n)].sum() + table[told(n)].sum(), lambda: 0.0 * table[1].sum())

    step = dflow.jit(lambda n: dflow.grad(lambda: loss(n), table)())
    assert step(jnp.int32(0)).sum() == 0.0
    assert called == []
    np.testing.assert_array_equal(step(jnp.int32(5)), jnp.zeros((97, 2)).at[jnp.array([5, 7])].set(1.0))


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
@pytest.mark.parametrize("kind", ["scan", "cond"])
def test_indices_that_a_callback_computes_are_computed_once(kind: str, compiled: bool, table: Variable) -> None:
    called: list[int] = []

    def told(n: Any) -> Any:
        return jax.pure_callback(lambda n: (called.append(int(n)), n)[1], jax.ShapeDtypeStruct((), jnp.int32), n)

    def loss() -> Any:
        if kind == "cond":
            return jax.lax.cond(IDS[0] > 0, lambda: jnp.take(table, told(jnp.int32(2)), axis=0).sum(), lambda: 0.0)
        return jax.lax.scan(lambda c, i: (c + table[told(i)].sum(), None), 0.0, jnp.arange(3))[0]

    gradient = dflow.grad(loss, table, rows=True)
    found = (dflow.jit(gradient) if compiled else gradient)()
    jax.effects_barrier()
    assert sorted(called) == sorted(found.indices.tolist()) == ([0, 1, 2] if kind == "scan" else [2])


def body(carry: Any) -> Any:
    turn, x = carry["turn"], carry["x"]
    return {"turn": turn + 1, "x": jnp.sin(x) * x + 0.1 * turn}


def start(x: Any) -> Any:
    return {"turn": jnp.int32(0), "x": x}


def unrolled(turns: int, x: Any) -> Any:
    carry = start(x)
    for _ in range(turns):
        carry = body(carry)
    return carry


X = jnp.array([1.2, 2.5])


@pytest.mark.parametrize("max_iters", [1, 3, 16, 17])
@pytest.mark.parametrize("turns", [0, 1, 16])
def test_it_is_jaxs_loop_forward_and_the_unrolled_loop_backward(turns: int, max_iters: int) -> None:
    def loop(x: Any) -> Any:
        return dflow.while_loop(lambda c: c["turn"] < turns, body, start(x), max_iters=max_iters)

    run = min(turns, max_iters)
    result, by_hand = jax.jit(loop)(X), unrolled(run, X)
    assert result["turn"] == run
    np.testing.assert_allclose(result["x"], by_hand["x"], rtol=1e-5)
    if turns <= max_iters:
        jaxs = jax.lax.while_loop(lambda c: c["turn"] < turns, body, start(X))
        np.testing.assert_allclose(result["x"], jaxs["x"], rtol=1e-6)
    gradient = jax.jit(jax.grad(lambda x: loop(x)["x"].sum()))(X)
    np.testing.assert_allclose(gradient, jax.grad(lambda x: unrolled(run, x)["x"].sum())(X), rtol=1e-4)


def saved_bytes(max_iters: int) -> int:
    """Bytes that the backward pass of a loop keeps from the forward pass."""
    x = jnp.zeros(1000)
    _, pull = jax.vjp(lambda x: dflow.while_loop(lambda y: y[0] < 1, jnp.sin, x, max_iters=max_iters), x)
    return sum(leaf.nbytes for leaf in jax.tree.leaves(pull))


def test_the_memory_grows_with_the_square_root_of_the_bound() -> None:
    assert saved_bytes(10_000) < 3 * saved_bytes(1_600)
    assert saved_bytes(10_000) < 300 * 4_000


@pytest.mark.parametrize("bound", [0, -1, 2.5, True, None])
def test_a_bound_that_is_none_is_refused(bound: Any) -> None:
    with pytest.raises(
        GraphTypeError, match=rf"given max_iters={bound}, not a positive integer\n  at .*test_early_lookups.py"
    ):
        dflow.while_loop(lambda x: x < 1, lambda x: x + 1, 0, max_iters=bound)


@pytest.mark.parametrize("loop", [jax.lax.while_loop, partial(dflow.while_loop, max_iters=3)])
def test_the_condition_of_a_while_loop_may_not_write(loop: Callable[..., Any]) -> None:
    a = dflow.Variable(0.0, name="a")

    def condition(carry: Any) -> Any:
        a.assign_add(1.0)
        return carry < 3

    def fn(x: Any) -> Any:
        return loop(condition, lambda carry: carry + 1, x)

    fact = r"the condition of a while_loop writes variables \(a\)(.|\n)*in its body"
    with pytest.raises(DflowError, match=fact) as caught:
        dflow.jit(fn)(0)
    assert f"test_early_lookups.py:{fn.__code__.co_firstlineno + 1}\n" in str(caught.value)


def test_a_variable_inside_a_function_that_cannot_hold_state_is_refused() -> None:
    a = dflow.Variable(jnp.zeros(2), name="a")

    def fn(x: Any) -> Any:
        return jax.lax.custom_linear_solve(lambda y: y * a.read(), x, lambda f, y: f(y) + a.read(), symmetric=True)

    with pytest.raises(DflowError, match=r"variables \(a\) are used inside .*, which cannot hold state yet"):
        dflow.jit(fn)(jnp.ones(2))
