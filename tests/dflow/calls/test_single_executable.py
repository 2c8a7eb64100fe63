"""Steps that are one XLA call: other accesses see the values that a step keeps between its calls."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import io_callback

import dflow
from dflow.calls.plans import UNKNOWN, CallPlan, Plans
from dflow.tracing.primitives.namesakes import StepResources
from tests.effort import examples

THREADS, CALLS = 4, 50

# Each case compiles its functions again.
pytestmark = pytest.mark.filterwarnings("ignore::dflow.RetraceWarning")


def adder(*variables: dflow.Variable, **options: Any) -> Callable[..., Any]:
    def add(x: Any) -> Any:
        for variable in variables:
            variable.assign_add(jnp.broadcast_to(x, variable.shape))
        return sum(variable.read() for variable in variables)

    return dflow.jit(add, **options)


@pytest.mark.device
@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.sampled_from(["a", "b", "ab", "read a", "read b", "set a", "scatter b", "retype", "eager"])))
def test_steps_and_others_in_any_order_see_each_others_writes(doings: list[str]) -> None:
    a, b = dflow.Variable(jnp.zeros(3), name="a"), dflow.Variable(jnp.zeros(3), name="b")
    only_a, only_b, both = adder(a), adder(b), adder(b, a)
    model = {"a": np.zeros(3, np.float32), "b": np.zeros(3, np.float32)}
    for number, doing in enumerate(doings, 1):
        if doing in ("a", "b", "ab"):
            for name in doing:
                model[name] = model[name] + number
            given = {"a": only_a, "b": only_b, "ab": both}[doing](float(number))
            np.testing.assert_array_equal(given, sum(model[name] for name in doing))
        elif doing == "set a":
            model["a"] = np.full(3, number, np.float32)
            a.assign(jnp.full(3, float(number)))
        elif doing == "scatter b":
            model["b"] = model["b"] + np.eye(3, dtype=np.float32)[number % 3]
            b.scatter_add([number % 3], jnp.ones(1))
        elif doing == "retype":
            model["a"] = model["a"] + number
            only_a(np.full(3, number, np.float32))
        elif doing == "eager":
            model["b"] = model["b"] + number
            with dflow.eager():
                only_b(float(number))
        else:
            np.testing.assert_array_equal({"a": a, "b": b}[doing[-1]].read(), model[doing[-1]])
    np.testing.assert_array_equal(a.read(), model["a"])
    np.testing.assert_array_equal(b.read(), model["b"])


def test_results_have_buffers_of_their_own() -> None:
    v, w = dflow.Variable(jnp.zeros(64), name="v"), dflow.Variable(jnp.ones(64), name="w")

    @dflow.jit
    def step(x: Any) -> Any:
        v.assign(x)
        return w.read(), x

    x = jnp.full(64, 5.0)
    kept, same = step(x)
    seen = {array.unsafe_buffer_pointer() for array in (kept, same, x)}
    assert len(seen) == 3
    v.assign_add(jnp.ones(64))
    w.assign_add(jnp.ones(64))
    adder(v, w)(1.0)
    assert (kept.tolist()[0], same.tolist()[0], x.tolist()[0]) == (1, 5, 5)


def test_static_and_donated_arguments_keep_their_places() -> None:
    v = dflow.Variable(jnp.zeros(3), name="v")

    def step(x: Any, by: int, y: Any, *, scale: int = 1) -> Any:
        v.assign_add(jnp.full(3, x * by * scale))
        return y + 1

    at_end = dflow.jit(lambda x, by: v.assign_add(x * by), static_argnums=-1)
    fn = dflow.jit(step, static_argnums=1, static_argnames="scale", donate_argnames="y")
    for _ in range(2):
        y = jnp.zeros(3)
        assert fn(1.0, 2, y, scale=3).tolist() == [1, 1, 1]
        assert y.is_deleted()
        fn(1.0, by=2, y=jnp.zeros(3), scale=3)
        at_end(jnp.ones(3), 5)
    assert v.read().tolist() == [2 * 6 * 2 + 10] * 3


def test_variables_live_on_when_the_function_is_gone() -> None:
    v = dflow.Variable(jnp.zeros(3), name="v")
    step = adder(v)
    step(1.0)
    del step
    gc.collect()
    assert v.read().tolist() == [1, 1, 1]


def test_plans_are_gone_with_the_function_though_a_variable_that_was_passed_lives() -> None:
    def made() -> Callable[..., Any]:
        table = jnp.ones((3, 79))
        return dflow.jit(lambda variable, x: variable.assign_add(table[:, 0] * x))

    v, step = dflow.Variable(jnp.zeros(3), name="v"), made()
    step(v, 1.0)
    del step
    gc.collect()
    assert not [array for array in jax.live_arrays() if array.shape == (3, 79)]
    assert v.read().tolist() == [1, 1, 1]


def test_plans_are_gone_with_a_variable_that_was_passed() -> None:
    step = dflow.jit(lambda variable, x: variable.assign_add(jnp.full(variable.shape, x)))
    for number in range(3):
        v = dflow.Variable(jnp.zeros((7, 78)), name=f"v{number}")
        step(v, 1.0)
        step(v, 1.0)
        assert v.read().sum() == 2 * 7 * 78
    del v
    gc.collect()
    assert not [array for array in jax.live_arrays() if array.shape == (7, 78)]


def test_a_function_may_have_state_for_some_types_only() -> None:
    v = dflow.Variable(0, name="v")

    @dflow.jit
    def step(x: Any) -> Any:
        if x.ndim:
            v.assign_add(1)
        return x * 2

    for _ in range(2):
        assert step(jnp.ones(2)).tolist() == [2, 2]
        assert step(jnp.float32(3)) == 6
    assert v.read() == 2


def refuse(x: Any) -> Any:
    raise OSError(f"no file {float(np.sum(x)):g}")


def in_a_callback(x: Any) -> Any:
    return jax.pure_callback(refuse, jax.typeof(x), x)


def in_an_ordered_callback(x: Any) -> Any:
    return io_callback(refuse, jax.typeof(x), x, ordered=True)


def in_a_callback_of_a_loop(x: Any) -> Any:
    return jax.lax.fori_loop(0, 3, lambda _, value: jax.jit(in_a_callback)(value), x)


@pytest.mark.parametrize("value", [in_a_callback, in_an_ordered_callback, in_a_callback_of_a_loop])
@pytest.mark.parametrize("parts", [False, True], ids=["whole", "parts"])
def test_a_step_whose_callback_raises_leaves_the_variables_it_writes(value: Callable[[Any], Any], parts: bool) -> None:
    v, u = dflow.Variable(jnp.zeros(3), name="v"), dflow.Variable(jnp.zeros(3), name="u")
    queue = dflow.FIFOQueue(1, jax.ShapeDtypeStruct((3,), jnp.float32))

    @dflow.jit
    def step(x: Any) -> None:
        if parts:
            queue.enqueue(x)
            x = queue.dequeue()
        u.assign_add(x)
        v.assign_add(value(x) + u)

    for number in (1, 2):
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"no file {3 * number}") as raised:
            step(jnp.full(3, float(number)))
        assert raised.value.__context__ is None
        jax.effects_barrier()
        assert v.read().tolist() == u.read().tolist() == [0, 0, 0]


class Resource:
    """An argument of a function; its finalizer calls `meet`."""

    def __init__(self, meet: Callable[[], Any] = lambda: None) -> None:
        self._meet = meet

    def __del__(self) -> None:
        self._meet()


class MeetingKey:
    """A key of a call's types whose hash runs garbage collection, as may happen while a plan is stored."""

    def __init__(self, collect: Callable[[], Any]) -> None:
        self._collect = [collect]

    def __hash__(self) -> int:
        while self._collect:
            self._collect.pop()()
        return 1


def both_end(first: Callable[[], Any], second: Callable[[], Any]) -> bool:
    threads = [threading.Thread(target=work, daemon=True) for work in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return not any(thread.is_alive() for thread in threads)


def plan_of(*resources: Any) -> CallPlan:
    return CallPlan(weakref.ref(Resource()), resources, StepResources(()), frozenset(), lambda *_: None)


def test_plans_that_keep_alive_what_others_were_made_for_are_forgotten_at_once() -> None:
    one, other, meeting = Plans(), Plans(), threading.Barrier(2, timeout=30)
    passed = {"one": Resource(), "other": Resource()}
    kept = {"one": Resource(meeting.wait), "other": Resource(meeting.wait)}
    one.put("passed", plan_of(kept["one"]), [passed["one"]])
    other.put("kept", plan_of(), [kept["one"]])
    other.put("passed", plan_of(kept["other"]), [passed["other"]])
    one.put("kept", plan_of(), [kept["other"]])
    kept.clear()
    assert both_end(lambda: passed.pop("one"), lambda: passed.pop("other"))
    assert one.is_empty
    assert other.is_empty


def test_garbage_collected_as_a_plan_is_kept_waits_for_no_other_function() -> None:
    one, other, meeting = Plans(), Plans(), threading.Barrier(2, timeout=30)
    passed = {"one": Resource(), "other": Resource()}
    one.put("passed", plan_of(), [passed["one"]])
    other.put("passed", plan_of(), [passed["other"]])

    def collect(name: str) -> None:
        meeting.wait()
        del passed[name]
        meeting.wait()

    for_one, for_other = MeetingKey(lambda: collect("other")), MeetingKey(lambda: collect("one"))
    assert both_end(lambda: one.put(for_one, None), lambda: other.put(for_other, None))
    assert one.get("passed") is other.get("passed") is UNKNOWN
    assert one.get(for_one) is other.get(for_other) is None


def test_calls_of_a_function_without_variables_do_not_wait_for_each_other() -> None:
    table = jnp.arange(float(1 << 15))
    looked_up = dflow.jit(lambda i: table[i])
    assert looked_up(3) == 3
    single = looked_up._plans.single
    assert single is not None
    single._state.results = []  # as during a call on another thread
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(looked_up, 5).result(60) == 5


def test_a_thread_reads_the_variables_of_a_step_while_another_compiles_it() -> None:
    v, seen = dflow.Variable(jnp.zeros(3), name="v"), list[Any]()
    step = adder(v)
    with ThreadPoolExecutor(1) as pool:

        def compiled(event: str, *_: Any, **__: Any) -> None:
            if event.endswith("backend_compile_duration") and not seen:
                seen.append(None)  # no event of the read itself counts
                with suppress(TimeoutError):
                    seen[0] = pool.submit(lambda: v.read().tolist()).result(60)

        jax.monitoring.register_event_duration_secs_listener(compiled)
        try:
            step(1.0)
        finally:
            jax.monitoring.unregister_event_duration_listener(compiled)
    assert (seen, v.read().tolist()) == ([[0, 0, 0]], [1, 1, 1])


def test_a_step_is_one_call_again_once_a_namesake_was_warned_of() -> None:
    first, other = dflow.Variable(0.0, name="w"), dflow.Variable(0.0, name="v")
    add, unrelated = adder(first), adder(other)
    add(1.0), unrelated(1.0)
    single = add._plans.single
    assert single is not None
    second = dflow.Variable(0.0, name="w")
    assert add._plans.single is None
    assert unrelated._plans.single is not None
    with pytest.warns(dflow.DuplicateNameWarning):
        add(1.0)
    assert add._plans.single is single
    assert (float(first), float(second)) == (2.0, 0.0)
