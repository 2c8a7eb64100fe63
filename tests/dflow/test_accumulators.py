"""`dflow.ConditionalAccumulator`: eager, at any place in traced code, and from several threads."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dflow
from dflow.state_backends import LOCAL
from dflow.tracing.errors import AccumulatorError, DeadlineExceeded, GraphTypeError, PlainJitError

WAIT_S = 60.0


def test_take_gives_the_mean_of_what_is_there_and_begins_anew() -> None:
    held = dflow.ConditionalAccumulator({"w": jnp.zeros(2), "b": 0.0}, name="g")
    for number in (1.0, 2.0, 6.0):
        assert held.apply({"w": jnp.full(2, number), "b": number}, step=0)
    assert (held.count(), held.step) == (3, 0)
    taken = held.take(2)
    assert jax.tree.map(lambda x: np.asarray(x).tolist(), taken) == {"w": [3.0, 3.0], "b": 3.0}
    assert (held.count(), held.step, held.dropped()) == (0, 1, 0)
    assert repr(held) == "<ConditionalAccumulator 'g': accumulator<f32[], f32[2]>, mean>"


@pytest.mark.parametrize("size", [4, 1 << 16])
def test_a_gradient_is_copied_even_from_a_view_that_cannot_be_written(size: int) -> None:
    held, gradient = dflow.ConditionalAccumulator(jnp.zeros(size)), np.ones(size, np.float32)
    view = gradient[:]
    view.flags.writeable = False
    held.apply(view, 0)
    gradient[:] = 100
    np.testing.assert_array_equal(held.take(1), 1)


def test_the_sum_is_given_when_asked_for_and_integers_keep_their_dtype() -> None:
    held = dflow.ConditionalAccumulator(jax.ShapeDtypeStruct((2,), jnp.int32), reduction="sum")
    held.apply(np.array([1, 2], np.int32))
    held.apply(np.array([10, 20], np.int32))
    taken = held.take(1)
    assert (taken.tolist(), taken.dtype) == ([11, 22], jnp.int32)


def test_variables_say_what_gradients_are_taken_and_may_be_given() -> None:
    w = dflow.Variable(jnp.arange(3.0), name="w")
    held = dflow.ConditionalAccumulator([w])
    held.apply([w])
    w.assign(jnp.zeros(3))
    assert held.take(1)[0].tolist() == [0.0, 1.0, 2.0]


def test_a_take_that_waits_too_long_says_how_many_were_there_and_leaves_them() -> None:
    held = dflow.ConditionalAccumulator(jnp.zeros(()), name="g")
    held.set_step(3)
    for step in (3, 3, 1):
        held.apply(1.0, step)
    message = (
        r"accumulator 'g' could not give 3 gradients within 0 s; at step 3 it holds 2, and dropped 1 that were stale\n"
        r"  at .*test_accumulators\.py:\d+\n  are all workers alive"
    )
    with pytest.raises(DeadlineExceeded, match=message):
        held.take(3, timeout_s=0)
    held.apply(4.0, 3)
    assert float(held.take(3, timeout_s=0)) == 2.0


@pytest.mark.parametrize("traced", [False, True])
def test_kept_gradients_are_summed_by_their_tickets_and_the_others_dropped(traced: bool) -> None:
    table = dflow.RowGradient(jax.ShapeDtypeStruct((4,), jnp.int32), jax.ShapeDtypeStruct((4,), jnp.float32), (9,))
    held = dflow.ConditionalAccumulator({"w": jnp.zeros(2), "t": table}, name="g")
    compiled: Any = dflow.jit if traced else lambda function: function
    keep = compiled(lambda x, i, step: held.keep({"w": x, "t": dflow.RowGradient(i, 1.0 * i, (9,))}, step))
    take = compiled(held.take_kept)
    tickets = [keep(jnp.full(2, float(i)), jnp.array([i, 8]), 3) for i in range(1, 5)]
    assert [int(ticket) for ticket in tickets] == [1, 2, 3, 4]
    taken = take(jnp.array([2, 4, 0, 0]))
    assert taken["w"].tolist() == [3.0, 3.0]
    assert taken["t"].indices.tolist() == [2, 4, 8, 0]
    assert taken["t"].rows.tolist() == [1.0, 2.0, 8.0, 0.0]
    assert (held.step, held.count(), held.dropped()) == (4, 0, 2)
    assert int(keep(jnp.ones(2), jnp.array([1, 8]), 3)) == 0
    assert int(keep(jnp.ones(2), jnp.array([1, 8]), 4)) == 5
    for wrong in ([1], [5, 5], [5, 3], [0], [0, 5]):
        with pytest.raises(AccumulatorError, match="accumulator 'g': take_kept: expected different tickets of kept"):
            take(jnp.array(wrong))
    assert take(jnp.array([5]))["w"].tolist() == [1.0, 1.0]
    with pytest.raises(AccumulatorError, match=r"'g': tickets are f32\[1\], not integers"):
        held.take_kept(jnp.ones(1))


def test_one_row_may_be_given_by_a_scalar_index() -> None:
    spec = dflow.RowGradient(jax.ShapeDtypeStruct((3,), jnp.int32), jax.ShapeDtypeStruct((3, 0), jnp.float32), (9, 0))
    scalar = dflow.RowGradient(jax.ShapeDtypeStruct((3,), jnp.int32), jax.ShapeDtypeStruct((3,), jnp.float32), (9,))
    held = dflow.ConditionalAccumulator([spec, scalar], name="g", reduction="sum")
    apply = dflow.jit(
        lambda i: held.apply([dflow.RowGradient(i, jnp.zeros(0), (9, 0)), dflow.RowGradient(i, np.float32(2), (9,))])
    )
    for index in (7, 3, 7):
        apply(index)
    empty, taken = held.take(3)
    assert (empty.indices.tolist(), empty.rows.shape) == ([3, 7, 0], (3, 0))
    assert (taken.indices.tolist(), taken.rows.tolist()) == ([3, 7, 0], [2.0, 4.0, 0.0])


def test_too_many_rows_of_kept_gradients_are_refused_and_stay() -> None:
    table = dflow.RowGradient(jax.ShapeDtypeStruct((2,), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.float32), (9,))
    held = dflow.ConditionalAccumulator([table], name="g")
    for i in range(3):
        held.keep([dflow.RowGradient(jnp.array([i]), jnp.ones(1), (9,))])
    with pytest.raises(AccumulatorError, match="'g' would hold 3 different rows, but a take gives 2 rows of f32"):
        held.take_kept(jnp.array([1, 2, 3]))
    assert held.take_kept(jnp.array([1, 3]))[0].indices.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("gradient", "message"),
    [
        (
            {"w": np.ones(2, np.float32)},
            r"accumulator 'g' takes gradients structured as .*'b'.*, but was given .*\n  at ",
        ),
        (
            {"w": np.ones(3, np.float32), "b": 1.0},
            r"'g' takes f32\[2\] at 'w', but was given f32\[3\]\n  at .*test_acc",
        ),
        ({"w": np.ones(2, np.float32), "b": np.int32(1)}, r"'g' takes f32\[\] at 'b', but was given i32\[\]"),
    ],
)
def test_a_gradient_that_does_not_fit_is_refused(gradient: Any, message: str) -> None:
    held = dflow.ConditionalAccumulator({"w": jnp.zeros(2), "b": 0.0}, name="g")
    with pytest.raises(GraphTypeError, match=message):
        held.apply(gradient)
    assert held.count() == 0


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(AccumulatorError, match=r"the reduction is 'max'; the legal ones are 'mean' and 'sum'"):
        dflow.ConditionalAccumulator(0.0, reduction="max")
    with pytest.raises(AccumulatorError, match=r"the mean of i32\[\] has fractions\n(.|\n)*reduction='sum'"):
        dflow.ConditionalAccumulator(0)
    with pytest.raises(AccumulatorError, match=r"'g': take needs at least 1 gradient, not 0"):
        dflow.ConditionalAccumulator(0.0, name="g").take(0)


# In traced code.


def scalars(*values: float, name: str = "g", **options: Any) -> dflow.ConditionalAccumulator:
    """An accumulator of numbers that contains some, all of step 0."""
    held = dflow.ConditionalAccumulator(jnp.zeros(()), name=name, **options)
    for value in values:
        held.apply(value)
    return held


@pytest.mark.parametrize(
    "place",
    [
        lambda held: jax.lax.scan(lambda c, x: (c + held.apply(x, held.step), None), 0, jnp.array([1.0, 2, 6]))[0],
        lambda held: jax.lax.fori_loop(0, 3, lambda i, c: c + held.apply(jnp.array([1.0, 2, 6])[i]), 0),
        lambda held: jax.lax.while_loop(lambda _: held.count() < 3, lambda c: c + held.apply(3.0), 0),
        lambda held: jax.lax.cond(held.step > 4, lambda: 0, lambda: sum(held.apply(x) + 0 for x in (1.0, 2.0, 6.0))),
        lambda held: jax.jit(lambda x: sum(held.apply(x + i) + 0 for i in range(-1, 2)))(3.0),
        lambda held: sum(held.apply(x, 9) + 0 for x in (1.0, 2.0, 6.0)),
    ],
)
def test_gradients_are_applied_and_taken_wherever_the_ops_stand(place: Callable[[Any], Any]) -> None:
    first, held = scalars(name="first"), scalars()

    @dflow.jit
    def step(x: Any) -> Any:
        held.apply(x)
        first_taken = held.take(1)
        held.set_step(0)
        fresh = place(held)
        counts = held.count(), held.dropped()
        return first_taken, fresh, counts, held.take(3) * x, held.step

    with pytest.warns(UserWarning, match=r"accumulator 'g' goes back from step 1 to 0(.|\n)*test_accumulators\.py"):
        taken, fresh, counts, mean, now = step(2.0)
    assert [float(taken), int(fresh), *map(int, counts), float(mean), int(now)] == [2, 3, 3, 0, 6, 1]
    assert (held.count(), first.count()) == (0, 0)


def test_a_stale_gradient_is_dropped_in_program_order() -> None:
    held = scalars()

    @dflow.jit
    def step(x: Any) -> Any:
        before = held.step
        fresh = held.apply(x, before)
        mean = held.take(1)
        stale = held.apply(x * 100, before)
        held.apply(x + 1, before + 1)
        return fresh, mean, stale, held.take(1), held.dropped()

    assert [float(value) for value in step(3.0)] == [1, 3, 0, 4, 1]
    assert [float(value) for value in step(4.0)] == [1, 4, 0, 5, 2]
    assert (held.step, held.dropped()) == (4, 2)


def test_a_take_in_traced_code_waits_without_a_thread_and_others_go_on() -> None:
    held, taken = scalars(), dflow.FIFOQueue(8, jax.ShapeDtypeStruct((), jnp.float32), name="taken")

    @dflow.jit
    def chief() -> Any:
        def turn(_: Any, total: Any) -> Any:
            total = total + held.take(4, timeout_s=WAIT_S)
            taken.enqueue(total)
            return total

        return jax.lax.fori_loop(0, 5, turn, 0.0)

    @dflow.jit
    def worker(x: Any) -> Any:
        return jax.lax.fori_loop(0, 2, lambda _, c: c + held.apply(x, 99), 0)

    with ThreadPoolExecutor(4) as pool:
        waiting = pool.submit(chief)
        for step in range(1, 6):
            applied = [pool.submit(worker, 2.0) for _ in range(2)]
            assert [int(one.result(WAIT_S)) for one in applied] == [2, 2]
            # A take removes all gradients, so the next ones are applied after it.
            assert float(taken.dequeue(timeout_s=WAIT_S)) == 2 * step
        assert float(waiting.result(WAIT_S)) == 10
    assert held.step == 5


def test_a_wait_for_gradients_has_a_deadline_and_ends_with_its_step() -> None:
    held, closed = scalars(1.0), dflow.FIFOQueue(1, jax.ShapeDtypeStruct((), jnp.float32), name="closed")
    message = r"accumulator 'g' could not give 2 gradients within 0\.01 s; at step 0 it holds 1(.|\n)*accumulators\.py"
    with pytest.raises(DeadlineExceeded, match=message):
        dflow.jit(lambda: held.take(2, timeout_s=0.01))()
    closed.close()
    with pytest.raises(dflow.QueueClosed, match="queue 'closed' is closed"):
        dflow.jit(lambda: (held.take(2), closed.dequeue()))()
    held.apply(3.0)
    # No take waits any more, so both gradients are still in the accumulator.
    assert (held.count(), float(held.take(2, timeout_s=0))) == (2, 2.0)


def test_what_jax_would_do_to_an_accumulator_op_is_refused() -> None:
    held = scalars(1.0)
    batched = [held.apply, lambda x: x + held.take(1), jax.jit(held.apply), lambda x: held.count() + x]
    message = (
        r"accumulator 'g' is used under vmap(.|\n)*test_accumulators\.py(.|\n)*apply one gradient, such as the mean"
    )
    for function in batched:
        with pytest.raises(AccumulatorError, match=message):
            dflow.jit(jax.vmap(function))(jnp.ones(3))
        with pytest.raises(AccumulatorError, match=message):
            jax.vmap(function)(jnp.ones(3))
    with pytest.raises(
        AccumulatorError, match=r"'g' is given a value by apply that depends on what jax.grad(.|\n)*which"
    ):
        jax.grad(lambda x: (held.apply(x), x)[1])(1.0)
    with pytest.raises(AccumulatorError, match=r"inside a loop that is differentiated(.|\n)*take before the loop"):
        dflow.jit(dflow.grad(lambda x: jax.lax.fori_loop(0, 2, lambda _, c: c + x * held.take(1), 0.0)))(1.0)
    with pytest.raises(PlainJitError, match="accumulator 'g' is used in a function that JAX compiles without dflow"):
        jax.jit(lambda: held.take(1))()
    with pytest.raises(AccumulatorError, match=r"take needs at least 1 gradient, not (.|\n)*known when the program is"):
        dflow.jit(held.take)(1)
    with pytest.raises(AccumulatorError, match="accumulator 'g' is created inside traced code"):
        dflow.jit(lambda: scalars())()  # noqa: PLW0108
    assert held.count() == 1


def test_it_may_be_an_argument_and_is_gone_with_its_last_user() -> None:
    held = scalars(1.0)
    key = held.key
    assert float(dflow.jit(lambda accumulator: accumulator.take(1))(held)) == 1
    assert LOCAL.store.resource(key)
    del held
    jax.clear_caches()
    gc.collect()
    with pytest.raises(dflow.DflowError, match="no resource 'g#accumulator"):
        LOCAL.store.resource(key)


def test_a_reset_ends_a_step_that_waits() -> None:
    with dflow.container("accumulated"):
        held = scalars()
    began = dflow.FIFOQueue(1, jax.ShapeDtypeStruct((), jnp.float32))

    @dflow.jit
    def step() -> Any:
        began.enqueue(1.0)
        return jax.lax.fori_loop(0, 2, lambda _, c: c + held.take(1, timeout_s=WAIT_S), 0.0)

    message = (
        r"'accumulated/g' is gone: container 'accumulated' was reset at test_acc(.|\n)*test_acc(.|\n)*make it again"
    )
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(step)
        began.dequeue(timeout_s=WAIT_S)
        dflow.reset_container("accumulated")
        with pytest.raises(AccumulatorError, match=message):
            waiting.result(WAIT_S)
    for use in (held.count, lambda: held.step, lambda: held.set_step(3), lambda: held.apply(1.0), step):
        with pytest.raises(AccumulatorError, match=message):
            use()


# Row-sparse.

WIDTH, HEIGHT = 2, 6


def rows_spec(count: int, dtype: Any = jnp.float32) -> dflow.RowGradient:
    """A part of a spec: `count` rows of a table with six."""
    indices, rows = jax.ShapeDtypeStruct((count,), jnp.int32), jax.ShapeDtypeStruct((count, WIDTH), dtype)
    return dflow.RowGradient(indices, rows, (HEIGHT, WIDTH))


def row_gradient(indices: Sequence[int], value: float, dtype: Any = jnp.float32) -> dflow.RowGradient:
    rows = (jnp.arange(len(indices) * WIDTH).reshape(-1, WIDTH) + value).astype(dtype)
    return dflow.RowGradient(jnp.asarray(indices, jnp.int32), rows, (HEIGHT, WIDTH))


@given(
    st.lists(st.lists(st.integers(0, HEIGHT - 1), max_size=4), min_size=1, max_size=4), st.sampled_from(["mean", "sum"])
)
def test_what_is_taken_of_row_gradients_is_that_of_their_dense_forms(applied: list[list[int]], reduction: str) -> None:
    sparse = dflow.ConditionalAccumulator([rows_spec(HEIGHT)], reduction=reduction)
    dense = dflow.ConditionalAccumulator([jax.ShapeDtypeStruct((HEIGHT, WIDTH), jnp.float32)], reduction=reduction)
    for number, indices in enumerate(applied):
        gradient = row_gradient(indices, float(number))
        assert sparse.apply([gradient])
        assert dense.apply([gradient])
    (rows,) = sparse.take(1)
    touched = sorted({index for indices in applied for index in indices})
    assert rows.indices.tolist() == touched + [0] * (HEIGHT - len(touched))
    np.testing.assert_allclose(rows.dense(), dense.take(1)[0], rtol=1e-6)


def test_more_rows_than_a_take_gives_are_refused_and_leave_the_sum() -> None:
    held = dflow.ConditionalAccumulator({"w": 0.0, "table": rows_spec(2, jnp.bfloat16)}, name="g", reduction="sum")
    held.apply({"w": 1.0, "table": row_gradient([4, 2, 4], 0.0, jnp.bfloat16)})
    message = (
        r"'g' would hold 3 different rows, but a take gives 2 rows of bf16\[6,2\]\n  at .*\n  give its spec more rows"
    )
    with pytest.raises(AccumulatorError, match=message):
        held.apply({"w": 5.0, "table": row_gradient([1, 2], 1.0, jnp.bfloat16)})
    assert held.count() == 1
    taken = held.take(1)
    assert (float(taken["w"]), taken["table"].indices.tolist()) == (1.0, [2, 4])
    assert (taken["table"].rows[:, 0].tolist(), taken["table"].dtype) == ([2.0, 4.0], jnp.bfloat16)


def test_rows_of_another_table_and_dense_gradients_are_refused() -> None:
    held = dflow.ConditionalAccumulator([rows_spec(2)], name="g")
    with pytest.raises(GraphTypeError, match=r"'g' takes rows of f32\[6,2\] at '0', but was given f32\[6,2\]\n  at "):
        held.apply([jnp.zeros((HEIGHT, WIDTH))])
    with pytest.raises(GraphTypeError, match=r"'g' takes rows of f32\[6,2\] at '0', but was given rows of i32\[6,2\]"):
        held.apply([row_gradient([1], 0, jnp.int32)])


def test_a_step_that_is_no_integer_is_refused() -> None:
    held, steps = scalars(), dflow.Variable(3)
    with pytest.raises(AccumulatorError, match=r"accumulator 'g': a step is ~f32\[\], not an integer\n  at "):
        held.apply(1.0, 1.5)
    held.set_step(steps)
    assert not held.apply(1.0, steps - 1)
    with pytest.raises(AccumulatorError, match="'g' would sum gradients without arrays"):
        dflow.ConditionalAccumulator({}, name="g")
