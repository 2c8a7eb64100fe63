"""The stages of a function with state before a call: traced, lowered, compiled."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.testing import memory_cluster
from dflow.tracing.errors import PlainJitError

X = np.arange(3, dtype=np.float32)


def counter() -> tuple[Any, dflow.Variable]:
    total = dflow.Variable(jnp.zeros(3), name="total")

    @dflow.jit
    def count(x: Any, *, scale: Any = 1.0) -> Any:
        total.assign_add(x * scale)
        return {"total": total.read()}

    return count, total


def test_what_is_compiled_ahead_runs_as_the_function_does() -> None:
    count, total = counter()
    compiled = count.lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile()
    for times, x in enumerate((X, jnp.asarray(X), X), 1):
        np.testing.assert_array_equal(compiled(x)["total"], times * X)
    np.testing.assert_array_equal(total, 3 * X)
    assert len(count.trace_log()) == 1


def test_each_stage_tells_of_the_arguments_and_results_as_jax_does() -> None:
    count, _ = counter()
    plain = jax.jit(lambda x, *, scale: {"total": x * scale})
    ours, theirs = count.trace(X, scale=2.0), plain.trace(X, scale=2.0)
    for _ in range(3):
        assert (ours.in_tree, ours.out_tree) == (theirs.in_tree, theirs.out_tree)
        assert jax.tree.map(lambda info: (info.shape, info.dtype), ours.out_info) == {"total": ((3,), np.float32)}
        assert str(ours.args_info) == str(theirs.args_info)
        if hasattr(ours, "lower"):
            ours, theirs = ours.lower(), theirs.lower()
        elif hasattr(ours, "compile"):
            ours, theirs = ours.compile(), theirs.compile()


def test_the_program_can_be_read_and_its_cost_asked() -> None:
    count, total = counter()
    lowered = count.lower(X)
    assert lowered.as_text().count("stablehlo.add") == 1
    assert "HloModule" in lowered.as_text("hlo")
    compiled = lowered.compile()
    assert "HloModule" in compiled.as_text()
    assert compiled.cost_analysis()["flops"] >= 3.0
    assert compiled.memory_analysis().alias_size_in_bytes == 12
    np.testing.assert_array_equal(total, 0 * X)


def test_a_function_with_a_queue_is_several_programs() -> None:
    queue = dflow.FIFOQueue(2, jax.ShapeDtypeStruct((3,), jnp.float32), name="q")
    v = dflow.Variable(jnp.zeros(3), name="v")

    @dflow.jit
    def step(x: Any) -> Any:
        queue.enqueue(jnp.sin(x))
        v.assign_add(queue.dequeue())
        return jnp.cos(x)

    lowered = step.lower(X)
    assert {"sine", "cosine", "add"} <= {word.split(".")[-1] for word in lowered.as_text().split() if "." in word}
    compiled = lowered.compile()
    np.testing.assert_allclose(compiled(X), np.cos(X), rtol=1e-6)
    np.testing.assert_allclose(v, np.sin(X), rtol=1e-6)
    assert compiled.cost_analysis()["flops"] > 0
    with pytest.raises(dflow.DflowError, match=r"step is \d programs, which are not all in memory at once"):
        compiled.memory_analysis()


def test_arguments_that_were_not_compiled_for_are_refused() -> None:
    count, total = counter()
    compiled = count.lower(X).compile()
    with pytest.raises(TypeError, match=r"count was compiled for args/0: f32\[3\], and called with f32\[4\]") as caught:
        compiled(jnp.zeros(4))
    assert f"{Path(__file__).name}:" in str(caught.value)
    with pytest.raises(TypeError, match=r"compiled for arguments of the structure .* and called with"):
        compiled(X, scale=2.0)
    np.testing.assert_array_equal(total, 0 * X)


def test_static_and_donated_arguments() -> None:
    v = dflow.Variable(1.0, name="v")
    f = dflow.jit(lambda n, x: x * n + v, static_argnums=0, donate_argnums=1)
    compiled = f.lower(3, jnp.ones(4)).compile()
    given = jnp.ones(4)
    np.testing.assert_array_equal(compiled(given), [4.0] * 4)
    assert given.is_deleted()


@pytest.mark.parametrize(("platform", "op"), [("cpu", "cosine"), ("cuda", "sine"), ("tpu", "tanh")])
def test_a_function_with_state_is_lowered_for_platforms_that_are_not_here(platform: str, op: str) -> None:
    total = dflow.Variable(jnp.ones(3), name="total")

    def by_platform(x: Any) -> None:
        total.assign_add(jax.lax.platform_dependent(x, cpu=jnp.cos, cuda=jnp.sin, tpu=jnp.tanh))

    text = dflow.jit(by_platform).trace(X).lower(lowering_platforms=(platform,)).as_text()
    assert [name for name in ("cosine", "sine", "tanh") if f"stablehlo.{name} " in text] == [op]
    np.testing.assert_array_equal(total, np.ones(3))


def test_jax_export_of_a_function_with_state_names_what_exports_it() -> None:
    count, _ = counter()
    with pytest.raises(PlainJitError) as caught:
        jax.export.export(count)(jax.ShapeDtypeStruct((3,), jnp.float32))
    assert re.sub(r"\n  at .*test_stages.py:\d+", "", str(caught.value)) == (
        "count has state, and jax.export does not know where it is\n"
        "  export it by dflow.export(fn, *specs), which keeps the state beside the program"
    )


def test_a_step_on_a_cluster_is_lowered_by_task() -> None:
    with memory_cluster(ps=2) as memory, closing(memory.worker()) as worker:
        with worker.parameter_servers():
            w = dflow.Variable(lambda: jnp.ones(3), name="w")
            calls = dflow.Variable(0, name="calls")
        here = dflow.Variable(jnp.zeros(3), name="here")

        @dflow.jit
        def step(x: Any) -> Any:
            calls.assign_add(1)
            here.assign_add(x)
            w.assign_add(jnp.sin(x))
            return {"total": here.read().sum()}

        lowered = step.lower(X)
        assert lowered.out_info["total"].shape == ()
        own, first, second = re.split("^// ps:[01]\n", lowered.as_text(), flags=re.MULTILINE)
        assert own.startswith("// worker:0\n")
        assert "stablehlo.sine" in own
        assert "//   Send(" in own
        for part in (first, second):
            assert part.count("module @jit_step") == part.count("stablehlo.add") == 1
        assert lowered.as_text("hlo").count("HloModule") >= 3
        assert lowered.cost_analysis()["flops"] >= 7.0
        assert int(calls.read()) == 0

        compiled = lowered.compile()
        for number in (1, 2):
            np.testing.assert_allclose(compiled(X)["total"], number * X.sum())
            np.testing.assert_allclose(w, 1 + number * np.sin(X), rtol=1e-6)
        assert int(calls.read()) == 2
        for ask in (compiled.as_text, compiled.cost_analysis, compiled.memory_analysis):
            with pytest.raises(PlainJitError, match=r"step runs on several tasks(.|\n)*lower\(...\) gives the text"):
                ask()


def test_what_tasks_compile_for_themselves_is_refused_when_it_is_asked_for() -> None:
    with memory_cluster(ps=1) as memory, closing(memory.worker()) as worker:
        with worker.parameter_servers():
            w = dflow.Variable(lambda: jnp.ones(3), name="w")
        double = dflow.jit(lambda: w.assign_add(w.read()))
        with pytest.raises(dflow.DflowError, match=r"takes no compiler_options\n  at .*test_stages.py"):
            double.lower().compile({"xla_cpu_enable_fast_math": True})
        for_tpu = double.trace().lower(lowering_platforms=("tpu",))
        assert "// ps:0" in for_tpu.as_text()
        with pytest.raises(dflow.DflowError, match=r"was lowered for tpu(.|\n)*without lowering_platforms"):
            for_tpu.compile()
