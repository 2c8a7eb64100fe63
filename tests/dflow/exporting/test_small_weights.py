"""Exports with weights in int8 and bfloat16: their error, their size, and what stays as it is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as drawn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dflow
from dflow.exporting.iree_module import compile_module
from dflow.lowering.files import narrowed_weights
from dflow.lowering.files.narrowed_weights import narrowed
from dflow.testing import memory_cluster
from dflow.tracing.errors import ConfigError, ExportError
from tests.effort import examples

ROWS = dflow.spec("b, 64", jnp.float32)
RANDOM = np.random.default_rng(0)
TABLE = RANDOM.normal(size=(64, 300)).astype(np.float32)
X = RANDOM.normal(size=(5, 64)).astype(np.float32)


class Model:
    """A function with variables of all kinds."""

    def __init__(self) -> None:
        self.w = dflow.Variable(jnp.asarray(RANDOM.normal(size=(64, 32)), jnp.float32), name="w")
        self.bias = dflow.Variable(jnp.ones(32), name="bias")
        self.moving = dflow.Variable(jnp.zeros((2, 32)), name="moving")
        self.ids = dflow.Variable(jnp.arange(6).reshape(2, 3), name="ids")
        self.given_out = dflow.Variable(jnp.ones((3, 3)), name="given_out")

    def __call__(self, x: Any, /, scale: Any, *, sharp: bool, extra: Any) -> Any:
        y = x @ self.w + self.bias
        self.moving.assign_add(jnp.stack([y.sum(0), y.sum(0)]))
        total = (x @ TABLE).sum() + self.ids.sum() + self.given_out.sum()
        return {"y": y * scale["by"] if sharp else y, "rest": (total + extra, self.given_out)}

    def export(self, **options: Any) -> dflow.Exported:
        number = jax.ShapeDtypeStruct((), jnp.float32)
        called = dflow.jit(self.__call__, static_argnames=("sharp",))
        made: dflow.Exported = dflow.export(called, ROWS, {"by": number}, sharp=True, extra=number, **options)
        return made


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize(("form", "share"), [("int8", 0.25), ("bfloat16", 0.5)])
def test_weights_that_are_read_alone_shrink_and_the_rest_stays(form: Any, share: float, tmp_path: Path) -> None:
    model = Model()
    exported = model.export(weights=form)
    stand_ins = {"w/int8", "w/scale"} if form == "int8" else {"w/bfloat16"}
    assert set(exported.variables) == {"bias", "moving", "ids", "given_out", *stand_ins}
    report = exported.accuracy(X, {"by": 2.0}, extra=1.0)
    moved = np.asarray(model.moving.read())
    assert not moved.any()  # a comparison writes nothing
    whole, small = model.export(), exported.save(tmp_path / "small")
    kept = 32 * 4 + 2 * 32 * 4 + 6 * 4 + 9 * 4
    assert report.before_bytes == kept + 64 * 32 * 4
    assert report.after_bytes == kept + int(64 * 32 * 4 * share) + (32 * 4 if form == "int8" else 0)
    saved = size(whole.save(tmp_path / "whole") / "variables") - size(small / "variables")
    assert saved > (1 - share) * 64 * 32 * 4 * 0.7  # the files are compressed, and have headers
    loaded = dflow.load(small, prefix=f"{form}/")
    found = loaded(X, {"by": 2.0}, extra=1.0)
    expected = whole_result = np.asarray((X @ np.asarray(model.w.read()) + 1) * 2)
    np.testing.assert_allclose(found["y"], expected, atol=0.03 * np.abs(whole_result).max())
    largest, mean, scale = report.errors["result['y']"]
    apart = np.abs(np.asarray(found["y"], np.float64) - expected)
    assert (largest, mean, scale) == pytest.approx((apart.max(), apart.mean(), np.abs(expected).max()), rel=1e-3)
    assert 0 < mean < largest
    np.testing.assert_allclose(loaded.variables["moving"].read()[0], np.asarray(found["y"]).sum(0) / 2, rtol=1e-4)
    assert found["rest"][1] is loaded.variables["given_out"]
    assert f"{report.after_bytes:,} in {form}" in str(report)
    assert "result['y']: differs by at most" in str(report)
    # The signature is that of the function, and its large array has its name.
    assert str(exported).splitlines()[2] == str(whole).splitlines()[2]
    assert "  constants: TABLE\n  fixed: sharp = True\n" in str(exported)


def weights() -> st.SearchStrategy[np.ndarray[Any, Any]]:
    shapes = drawn.array_shapes(min_dims=2, max_dims=3, min_side=1, max_side=4)
    return shapes.flatmap(
        lambda shape: drawn.arrays(np.float32, shape, elements=st.floats(-1e6, 1e6, width=32, allow_subnormal=False))
    )


@settings(max_examples=examples(30))
@given(weights(), st.integers(1, 100), st.sampled_from(["row", "channel"]))
def test_each_weight_differs_by_at_most_half_a_step_of_its_scale(value: Any, block_bytes: int, by: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(narrowed_weights, "_BLOCK_BYTES", block_bytes)
        small, scale = (narrowed("w", value, f"{what} by {by}") for what in ("int8", "scale"))  # type: ignore[arg-type]
        half = narrowed("w", value, "bfloat16")
    kept = 0 if by == "row" else value.ndim - 1
    largest = np.abs(value).max(axis=tuple(axis for axis in range(value.ndim) if axis != kept))
    factor, step = (
        np.expand_dims(one, [*range(1, value.ndim)]) if by == "row" else one for one in (scale, largest / 127)
    )
    assert (np.abs(small * factor - value) <= step * 0.5001 + 1e-30).all()
    assert (half == value.astype(ml_dtypes.bfloat16)).all()


def test_functions_of_one_export_share_the_small_weights(tmp_path: Path) -> None:
    w, written = (dflow.Variable(jnp.ones((4, 4)), name=name) for name in ("w", "written"))

    def read(x: Any) -> Any:
        return x @ w + written.read().sum()

    def write(x: Any) -> Any:
        written.assign(x @ w)

    row = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    exported = dflow.export({"read": (read, row), "write": (write, row)}, weights="int8")
    assert set(exported.variables) == {"w/int8", "w/scale", "written"}
    model = dflow.load(exported.save(tmp_path / "both"))
    model.write(np.eye(4, dtype=np.float32))
    np.testing.assert_allclose(model.read(np.eye(4, dtype=np.float32)), np.ones((4, 4)) + 16, rtol=1e-5)
    assert exported.accuracy(np.eye(4, dtype=np.float32), signature="read").errors.keys() == {"result"}


def test_each_export_on_a_cluster_has_the_values_of_its_save(tmp_path: Path) -> None:
    x = np.ones((1, 3), np.float32)
    with memory_cluster(ps=1) as memory:
        cluster = memory.worker()
        with cluster.parameter_servers(), dflow.container("model"):
            w = dflow.Variable(jnp.ones((3, 3)), name="w")
            exports = [dflow.export(lambda x: x @ w, dflow.spec("b, 3", jnp.float32), weights="int8") for _ in range(2)]
            assert [*exports[0].variables] == ["model/w/int8", "model/w/scale"]
        for value, exported in zip((1.0, 5.0), exports, strict=True):
            w.assign(jnp.full((3, 3), value))
            assert float(exported.variables["model/w/scale"].read()[0] * 127) == pytest.approx(value)
            model = dflow.load(exported.save(tmp_path / f"{value}"), prefix=f"{value}/")
            np.testing.assert_allclose(model(x), np.full((1, 3), 3 * value), rtol=1e-5)
            assert exported.accuracy(x).errors["result"][0] < 1e-4
        with pytest.raises(
            dflow.VariableError, match="'model/w/scale' of an export stands for 'model/w', and cannot be"
        ):
            exported.variables["model/w/scale"].assign(jnp.ones(3))
        dflow.save(tmp_path / "c", exported.variables)
        held = dflow.Variable(jnp.zeros(3), name="model/w/scale")
        dflow.restore(tmp_path / "c", held, ignore=["unexpected"])
        np.testing.assert_allclose(held.read() * 127, 5.0, rtol=1e-6)
        w.assign(jnp.full((3, 3), jnp.inf))
        with pytest.raises(
            ExportError, match="array 'model/w/int8': expected finite weights, got a NaN or an infinity"
        ):
            exported.save(tmp_path / "infinite")
        cluster.close()


def test_a_users_variable_may_have_the_name_of_a_small_weight(tmp_path: Path) -> None:
    q, taken = (dflow.Variable(jnp.full(shape, 2.0), name=name) for name, shape in (("q", (3, 3)), ("q/int8", (3,))))
    exported = dflow.export(lambda x: x @ q + taken, dflow.spec("b, 3", jnp.float32), weights="int8")
    assert set(exported.variables) == {"q/int8", "q/int8_", "q/scale"}
    loaded = dflow.load(exported.save(tmp_path / "q"), prefix="loaded/")
    np.testing.assert_allclose(loaded(np.ones((1, 3), np.float32)), np.full((1, 3), 8.0), rtol=1e-5)


def test_the_compiler_of_modules_is_named_when_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = dflow.export(lambda x: x, jax.ShapeDtypeStruct((2,), jnp.float32)).save(tmp_path / "same")
    monkeypatch.setitem(sys.modules, "iree", None)
    with pytest.raises(ConfigError, match=r"(?s)iree.compiler, which is not installed.*pip install 'dflow.iree.'"):
        compile_module(dflow.load(path))


def test_what_cannot_shrink_is_refused(tmp_path: Path) -> None:
    w = dflow.Variable(jnp.ones((4, 4)), name="w")
    row = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    for options, text in (
        ({"weights": "int4"}, "weights: expected one of int8, bfloat16, got 'int4'"),
        (
            {"weights": "int8"},
            "weights='int8': expected a floating-point variable of two dimensions or more .*, got none",
        ),
    ):
        with pytest.raises(ExportError, match=text):
            dflow.export(lambda x: x, row, **options)
    with pytest.raises(ExportError, match="accuracy compares smaller weights, and none were asked for"):
        dflow.export(lambda x: x @ w, row).accuracy(np.ones((4, 4), np.float32))
    w.assign(jnp.full((4, 4), jnp.nan))
    with pytest.raises(ExportError, match="array 'w/bfloat16': expected finite weights, got a NaN or an infinity"):
        dflow.export(lambda x: x @ w, row, weights="bfloat16").save(tmp_path / "m")


@pytest.mark.parametrize(
    ("form", "division"), [("int8", {"shards": 3}), ("int8", {"shards": 2, "by": "columns"}), ("bfloat16", {})]
)
def test_tables_become_smaller_with_a_scale_for_each_row(form: Any, division: Any, tmp_path: Path) -> None:
    def draw(key: Any, shape: Any, dtype: Any) -> Any:  # one scale would not fit rows of such different sizes
        return jax.random.normal(key, shape, dtype) * 10.0 ** jnp.arange(-3, 3).repeat(100)[: shape[0], None]

    table = dflow.Embedding(500, 16, name="table", initializer=draw, **division)
    exported = dflow.export(table, dflow.spec("b", jnp.int32), weights=form, platforms=["cpu"])
    ids = np.array([0, 150, 250, 350, 499], np.int32)
    model = dflow.load(exported.save(tmp_path / "m"), prefix="loaded/")
    expected = np.asarray(table(ids))
    error = np.abs(np.asarray(model(ids)) - expected).max(1) / np.abs(expected).max(1)
    assert 0 < error.max() < 0.005
    report = exported.accuracy(ids)
    assert report.after_bytes < report.before_bytes * (0.54 if form == "int8" else 0.51)
    with pytest.raises(dflow.InputError, match="expected ids from 0 to 499, got 500"):
        model(np.array([500], np.int32))


def test_a_lookup_converts_the_rows_that_it_takes() -> None:
    table = dflow.Embedding(5000, 16, name="table", shards=2)
    text = dflow.export(table, jnp.zeros(3, jnp.int32), weights="int8").mlir_module()
    assert "tensor<2500x16xi8>" in text
    assert "tensor<2500x16xf32>" not in text


def test_the_report_names_what_stays_as_it_is(tmp_path: Path) -> None:
    table = dflow.Embedding(50, 16, name="table")
    trained, bias = dflow.Variable(jnp.ones((16, 2)), name="trained"), dflow.Variable(jnp.ones(2), name="bias")

    def step(ids: Any) -> Any:
        trained.assign_add(jnp.ones((16, 2)))
        return table(ids) @ trained + bias

    ids = np.array([1], np.int32)
    report = dflow.export(step, ids, weights="int8").accuracy(ids)
    assert report.kept == {"trained": "step writes it", "bias": "it has fewer than two dimensions"}
    assert str(report).endswith("as before: trained (step writes it); bias (it has fewer than two dimensions)")
    with pytest.raises(dflow.ExportError, match=r"expected a floating-point .*, got bias \(it has fewer than two"):
        dflow.export(lambda: bias.read() * 2, weights="int8")
