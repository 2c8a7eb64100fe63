"""`dflow.ConditionalAccumulator`, from one thread and from several."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.tracing.errors import AccumulatorError, DeadlineExceeded, GraphTypeError


def test_take_gives_the_mean_of_what_is_there_and_begins_anew() -> None:
    held = dflow.ConditionalAccumulator({"w": jnp.zeros(2), "b": 0.0}, name="g")
    for number in (1.0, 2.0, 6.0):
        assert held.apply({"w": jnp.full(2, number), "b": number}, step=0)
    assert (held.count(), held.step) == (3, 0)
    taken = held.take(2)
    assert jax.tree.map(lambda x: np.asarray(x).tolist(), taken) == {"w": [3.0, 3.0], "b": 3.0}
    assert (held.count(), held.step, held.dropped()) == (0, 1, 0)
    assert repr(held) == "<ConditionalAccumulator 'g': 0 gradients, step 1>"


def test_stale_gradients_are_dropped_and_counted() -> None:
    held = dflow.ConditionalAccumulator(jnp.zeros(()))
    held.apply(1.0, 0)
    assert not held.take(1).weak_type
    held = dflow.ConditionalAccumulator(jnp.zeros(()))
    held.apply(1.0, 0)
    held.take(1)
    assert not held.apply(100.0, 0)
    assert held.apply(4.0, 1)
    assert (held.dropped(), float(held.take(1))) == (1, 4.0)
    held.set_step(10)
    assert not held.apply(1.0, 9)
    assert (held.step, held.dropped()) == (10, 2)


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


def test_a_numpy_gradient_may_be_changed_once_it_was_applied() -> None:
    held = dflow.ConditionalAccumulator(jnp.zeros(1024))
    memory = np.ones(1024 + 64, np.float32)
    # Aligned as JAX needs it to use the memory as its own.
    gradient = memory[-memory.ctypes.data % 64 // 4 :][:1024]
    held.apply(gradient)
    gradient[:] = 7
    assert held.take(1).tolist() == [1.0] * 1024


def test_threads_apply_while_another_waits() -> None:
    held = dflow.ConditionalAccumulator(jnp.zeros(()), reduction="sum")
    with ThreadPoolExecutor(5) as pool:
        waiting = [pool.submit(held.take, 4, timeout_s=60) for _ in range(2)]
        list(pool.map(lambda number: held.apply(float(number), step=9), range(8)))
        taken = [float(future.result()) for future in waiting]
    assert sum(taken) == sum(range(8))
    assert (held.step, held.count()) == (2, 0)


def test_a_take_that_waits_too_long_says_how_many_were_there_and_leaves_them() -> None:
    held = dflow.ConditionalAccumulator(jnp.zeros(()), name="g")
    held.set_step(3)
    for step in (3, 3, 1):
        held.apply(1.0, step)
    message = r"accumulator 'g': 2 of 3 gradients were there after 0 s, at step 3; 1 stale ones were dropped"
    with pytest.raises(DeadlineExceeded, match=message):
        held.take(3, timeout_s=0)
    held.apply(4.0, 3)
    assert float(held.take(3, timeout_s=0)) == 2.0


def test_who_gave_up_does_not_take_from_who_waits() -> None:
    held = dflow.ConditionalAccumulator(jnp.zeros(()))
    with pytest.raises(DeadlineExceeded, match="0 of 5"):
        held.take(5, timeout_s=0)
    held.apply(2.0)
    assert float(held.take(1, timeout_s=0)) == 2.0


def test_setting_the_step_back_warns() -> None:
    held = dflow.ConditionalAccumulator(jnp.zeros(()), name="g")
    held.set_step(4)
    with pytest.warns(UserWarning, match="accumulator 'g' goes back from step 4 to 2"):
        held.set_step(2)
    assert held.apply(1.0, 2)


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
        ({"w": np.ones(2, np.float32), "b": 1}, r"'g' takes f32\[\] at 'b', but was given i32\[\]"),
    ],
)
def test_a_gradient_that_does_not_fit_is_refused(gradient: Any, message: str) -> None:
    held = dflow.ConditionalAccumulator({"w": jnp.zeros(2), "b": 0.0}, name="g")
    with pytest.raises(GraphTypeError, match=message):
        held.apply(gradient)
    assert held.count() == 0


def test_it_is_not_for_traced_code() -> None:
    held = dflow.ConditionalAccumulator(jnp.zeros(()), name="g")
    with pytest.raises(AccumulatorError, match=r"'g': apply is called in traced code(.|\n)*return the gradient"):
        dflow.jit(lambda x: held.apply(x))(1.0)  # noqa: PLW0108
    with pytest.raises(AccumulatorError, match=r"'g': take is called in traced code"):
        jax.jit(lambda: held.take(1))()


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(AccumulatorError, match=r"the reduction is 'max'; the legal ones are 'mean' and 'sum'"):
        dflow.ConditionalAccumulator(0.0, reduction="max")
    with pytest.raises(AccumulatorError, match=r"the mean of i32\[\] has fractions\n(.|\n)*reduction='sum'"):
        dflow.ConditionalAccumulator(0)
    with pytest.raises(AccumulatorError, match=r"'g': take needs at least 1 gradient, not 0"):
        dflow.ConditionalAccumulator(0.0, name="g").take(0)


def test_a_reset_ends_who_waits() -> None:
    with dflow.container("accumulated"):
        held = dflow.ConditionalAccumulator(0.0, name="g")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(held.take, 1, timeout_s=60)
        dflow.reset_container("accumulated")
        message = r"accumulator 'accumulated/g' is gone: container 'accumulated' was reset"
        with pytest.raises(AccumulatorError, match=message):
            waiting.result()
    with pytest.raises(AccumulatorError, match=message):
        held.apply(1.0)
