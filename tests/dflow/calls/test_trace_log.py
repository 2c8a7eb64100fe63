"""Each trace is logged with the changed argument, its line, and the time of the trace."""

from __future__ import annotations

import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.calls.trace_log import _SAME, _STRATEGY, WARN_AFTER, RetraceWarning, TraceLog


def test_the_argument_that_changed_is_named() -> None:
    f = dflow.jit(lambda x, batch, mode, n=1: (x, batch["image"] * n), static_argnames="mode")
    image = {"image": jnp.ones(2)}
    f(jnp.ones(4), image, "train")
    f(jnp.ones(5), image, "train")
    f(jnp.ones(5), {"image": jnp.ones(2, jnp.int32)}, "train")
    f(jnp.ones(5), image, "test")
    f(jnp.ones(4), image, "train", n=2)  # most similar to the first
    assert [record.changes for record in f.trace_log().records] == [
        ("first trace",),
        ("x: f32[4] -> f32[5]",),
        ("batch/image: f32[2] -> i32[2]",),
        ("mode: 'train' -> 'test'",),
        ("n: absent -> ~i32[]",),
    ]


@pytest.mark.parametrize("has_state", [False, True])
def test_the_line_and_the_cost_are_logged(has_state: bool) -> None:
    v = dflow.Variable(1.0)
    f = dflow.jit(lambda x: x + v if has_state else x + 1)
    f(1.0)
    [record] = f.trace_log().records
    assert record.call is not None
    assert record.call.file == __file__
    assert record.total_ms is not None
    assert record.total_ms >= record.trace_ms > 0
    assert re.match(
        r"trace 1 at .*test_trace_log.py:\d+: [\d.]+ ms, [\d.]+ ms in all\n  first trace", str(f.trace_log())
    )


def test_warm_calls_are_not_logged() -> None:
    v = dflow.Variable(1.0)
    f = dflow.jit(lambda x: x + v)
    for x in (1.0, np.float32(1), 2.0, np.float32(2)):
        f(x)
    assert len(f.trace_log()) == 2


def test_a_setting_that_changed_is_said_to() -> None:
    v = dflow.Variable(jnp.ones((2, 2)))
    f = dflow.jit(lambda x: x @ v)
    f(jnp.ones(2))
    f.clear_cache()
    f(jnp.ones(2))
    assert f.trace_log()[1].changes[0].startswith("no argument changed: a setting of JAX")


def test_a_large_closed_over_array_becomes_an_input_and_is_reported() -> None:
    table = jnp.ones((128, 256))
    f = dflow.jit(lambda i: table[i])
    assert f(3).shape == (256,)
    assert f(4).shape == (256,)
    assert f.trace_log()[0].captured == ("f32[128,256]",)
    assert "closed over f32[128,256], which became an input" in str(f.trace_log())
    assert "const_0: f32[128,256]" in str(dflow.graph(f, 3)).splitlines()[0]


def test_repeated_traces_warn_once_with_the_remedy() -> None:
    f = dflow.jit(lambda x: x.sum())
    for size in range(1, WARN_AFTER):
        f(jnp.ones(size))
    with pytest.warns(RetraceWarning) as caught:
        f(jnp.ones(WARN_AFTER))
    text = str(caught[0].message)
    assert "was traced 6 times, the last time because of x: f32[5] -> f32[6] (called at" in text
    assert "pad or bucket arguments" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f(jnp.ones(WARN_AFTER + 1))


def test_a_trace_within_another_has_no_total() -> None:
    inner = dflow.jit(lambda x: x + 1)

    @dflow.jit
    def outer(x: Any) -> Any:
        return inner(x)

    outer(1.0)
    assert inner.trace_log()[0].total_ms is None
    assert "within another trace" in str(inner.trace_log())


def test_a_function_not_traced_says_so() -> None:
    @dflow.jit
    def never(x: Any) -> Any:
        return x

    assert str(never.trace_log()) == "never has not been traced"


def test_a_variable_that_is_another_is_named() -> None:
    f = dflow.jit(lambda model, x: model["w"] + x)
    f({"w": dflow.Variable(1.0, name="a")}, 1.0)
    f({"w": dflow.Variable(jnp.ones(2), name="b")}, 1.0)
    assert f.trace_log()[1].changes == ("model/w: <Variable 'a': f32[]> -> <Variable 'b': f32[2]>",)


@pytest.fixture
def remade(monkeypatch: pytest.MonkeyPatch) -> int:
    """Number of compilations at one line after which the warning comes."""
    monkeypatch.setattr("dflow.calls.trace_log.WARN_AFTER_REMAKING", 4)
    return 4


def test_a_function_that_is_made_anew_each_time_is_warned_about_once(remade: int) -> None:
    v = dflow.Variable(1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2 * remade):
            dflow.jit(lambda x: x + 1)(1.0)
            dflow.jit(lambda x: x + v)(1.0)
    assert [warning.category for warning in caught] == [RetraceWarning] * 2
    for warning in caught:
        assert f"<lambda> was compiled {remade} times for the same arguments" in str(warning.message)
        assert "call dflow.jit once, outside of the loop" in str(warning.message)
        assert warning.filename == __file__


def test_methods_of_many_objects_are_no_function_made_anew(remade: int) -> None:
    class Model:
        @dflow.jit
        def step(self, x: Any) -> Any:
            return x + 1

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(remade + 1):
            Model().step(1.0)


def test_functions_made_for_other_arguments_or_from_other_code_are_not_warned_about(remade: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in range(remade + 1):
            dflow.jit(lambda x: x + 1)(jnp.ones(size))
        fn = dflow.jit(lambda x: x + 1)
        for _ in range(remade + 1):
            fn(1.0)


@pytest.mark.parametrize("state", [False, True])
def test_a_large_array_closed_over_by_a_nested_function_becomes_an_input(state: bool) -> None:
    table, count = jnp.arange(128 * 256.0).reshape(128, 256), dflow.Variable(0)

    @dflow.jit
    def looked_up(i: Any) -> Any:
        return jax.jit(lambda j: table[j])(i) * 2

    @dflow.jit
    def outer(i: Any) -> Any:
        if state:
            count.assign_add(1)
        return looked_up(i) + 1

    np.testing.assert_array_equal(outer(3), table[3] * 2 + 1)
    assert outer.trace_log()[0].captured == ("f32[128,256]",)
    if state:
        assert len(outer.lower(3).as_text()) < 128 * 256


def test_a_short_batch_is_told_once_with_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    @dflow.jit
    def step(x: Any, y: Any, scale: Any) -> Any:
        return (x.sum() + y["a"].sum()) * scale

    def called(rows: int, width: int = 3, more: int = 0) -> list[str]:
        caplog.clear()
        step(np.ones((rows, width), np.float32), {"a": np.ones(rows + more, np.float32)}, 2.0)
        return [record.getMessage() for record in caplog.records]

    assert called(8) == called(7, 2) == called(6, 3, 1) == []
    (told,) = called(4)
    assert re.match(r"step is traced and compiled again for a batch of 4 rows in place of 8 \(called at .*py:", told)
    assert "drop_remainder=True" in told
    assert called(3) == []


def test_a_trace_is_compared_with_those_of_its_kind() -> None:
    """A strategy looks at a step in a separate trace, before it runs the step for the same arguments."""
    log = TraceLog("step")
    for rows in (8, 4):
        for is_within in (True, False):
            log.add({"x": f"f32[{rows}]"}, None, 1.0, is_within=is_within)
    assert [(record.is_within, record.changes) for record in log] == [
        (True, ("first trace",)),
        (False, ("first trace",)),
        (True, ("x: f32[8] -> f32[4]",)),
        (False, ("x: f32[8] -> f32[4]",)),
    ]


def test_a_step_that_another_strategy_runs_says_so() -> None:
    log = TraceLog("step")
    for taker in ("", "a", "a", "b"):
        log.add({"x": "f32[8]"}, None, 1.0, taker=taker)
    assert [one.changes for one in log] == [("first trace",), (_STRATEGY,), (_SAME,), (_STRATEGY,)]
