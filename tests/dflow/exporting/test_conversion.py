"""`dflow convert`: models of ONNX, LiteRT and TensorFlow give dflow's results, or an error and no file.

The packages that convert are installed in separate environments; elsewhere the whole conversions are skipped.
`make test-converters` runs them.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.__main__ import main
from dflow.exporting.converting.conversion import FORMATS, convert
from tests.dflow.exporting.test_program_call import attention, choices, convolutions, loops, numbers

pytestmark = pytest.mark.once
PACKAGES = {"onnx": "jax2onnx", "litert": "tensorflow", "saved_model": "tensorflow"}
THERE = [name for name in FORMATS if importlib.util.find_spec(PACKAGES[name])]
in_each_format = pytest.mark.parametrize(
    "to", [pytest.param(to, marks=pytest.mark.skipif(to not in THERE, reason=PACKAGES[to])) for to in FORMATS]
)
#: LiteRT's models have fixed sizes.
SIZES = {"onnx": {}, "saved_model": {}, "litert": {"b": 2, "t": 5}}
#: jax2onnx needs fixed sizes too for functions with a sort or an indefinite product.
FIXED = {choices: {"b": 4}, numbers: {"b": 4}}
#: Ops of these functions that a format or its runtime lacks.
LACKS = {("litert", choices): "vhlo.sort", ("litert", "words"): "tfl.floor_mod", ("onnx", "words"): "ReduceMin"}


def saved(path: Path, fn: Callable[..., Any], *shapes: str, dtype: Any = jnp.float32, **options: Any) -> Any:
    dflow.export(fn, *(dflow.spec(shape, dtype) for shape in shapes), **options).save(path)
    return dflow.load(path, prefix=f"{path.name}/")


@in_each_format
@pytest.mark.parametrize(
    ("fn", "shape"),
    [(attention, "b, t, 4"), (convolutions, "b, 6, 8"), (loops, "4, 3"), (choices, "b, 4"), (numbers, "b, 4")],
    ids=["attention", "convolutions", "loops", "choices", "numbers"],
)
def test_results_are_those_of_dflow(to: str, fn: Callable[..., Any], shape: str, tmp_path: Path) -> None:
    model = saved(tmp_path / "model", fn, shape)
    sizes = FIXED.get(fn, {}) or {letter: size for letter, size in SIZES[to].items() if letter in shape}
    if (lack := LACKS.get((to, fn))) is not None:
        with pytest.raises(dflow.ExportError, match=lack):
            convert(model, to, tmp_path / "out", sizes=sizes)
        return
    report = convert(model, to, tmp_path / "out", sizes=sizes)
    assert (tmp_path / "out").exists()
    assert all(share < 1e-5 for _, share in report.differences.values())


@in_each_format
@pytest.mark.parametrize("weights", ["int8", "bfloat16"])
def test_smaller_weights_stay_small(to: str, weights: Any, tmp_path: Path) -> None:
    drawn = np.random.default_rng(0).normal(size=(64, 512)).astype("f4")
    w = dflow.Variable(drawn, name=f"conversion/{to}/{weights}/w")
    model = saved(tmp_path / "model", lambda x: jnp.tanh(x @ w), "b, 64", weights=weights)
    report = convert(model, to, tmp_path / "out", sizes={"b": 2} if to == "litert" else {})
    share = {"int8": 0.25, "bfloat16": 0.5}[weights] if to != "litert" else 1  # whose converter makes float32 of them
    assert report.size_bytes < drawn.nbytes * share + 40_000
    assert report.differences["result"][0] < 1e-2


@in_each_format
def test_names_are_two_arrays_of_numbers(to: str, tmp_path: Path) -> None:
    with dflow.container(to):
        table = dflow.Embedding(64, 3, vocabulary=dflow.Vocabulary(), name="conversion_words")
        optimizer = dflow.Optimizer(__import__("optax").sgd(0.1), [table], name="conversion_sgd")

    @dflow.jit
    def train(words: Any) -> Any:
        found = table.find(words)
        _, rows = dflow.value_and_grad(lambda: table(found).sum(), [table])()
        optimizer.apply(rows, found=[found])

    words = np.array(["ann", "bo", "cy"])
    train(words)
    model = saved(tmp_path / "model", table.__call__, "b", dtype=np.str_)
    ids = dflow.wide_ids(words)
    inputs = {"ids_high": np.asarray(ids.high), "ids_low": np.asarray(ids.low)}
    sizes = {} if to == "saved_model" else {"b": 3}
    if (lack := LACKS.get((to, "words"))) is not None:
        with pytest.raises(dflow.ExportError, match=rf"{lack}.*\n  at .*\n  compute it otherwise"):
            convert(model, to, tmp_path / "out", sizes=sizes, inputs=inputs)
        assert os.listdir(tmp_path) == ["model"]
        return
    report = convert(model, to, tmp_path / "out", sizes=sizes, inputs=inputs)
    assert any("ids: str[b] is two arrays here" in note for note in report.function.notes)


@in_each_format
def test_what_cannot_be_converted_is_named_and_nothing_is_written(to: str, tmp_path: Path) -> None:
    def solve(x: Any) -> Any:
        return jnp.linalg.inv(x)

    model = saved(tmp_path / "model", solve, "3, 3", platforms=["cpu"])
    with pytest.raises(dflow.ExportError, match=r"lapack_\w+.*"):
        convert(model, to, tmp_path / "out")
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize(("to", "package"), PACKAGES.items())
def test_without_the_package_the_command_says_how_to_get_it(
    to: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    saved(tmp_path / "model", lambda x: x, "2")
    assert main(["convert", str(tmp_path / "model"), "--to", to, "--out", str(tmp_path / "out")]) == 1
    assert f"pip install 'dflow[{'onnx' if to == 'onnx' else 'litert'}]'" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sizes": {"n": 3}}, r"sizes: expected letters of .*, got n"),
        ({"inputs": {}}, r"inputs: expected arrays x, got none"),
        ({"inputs": {"x": np.ones((2, 3), "f4")}}, r"inputs: expected x: float32\[b,4\], got float32\[2, 3\]"),
        ({"inputs": {"x": np.ones((2, 4), "f8")}}, r"inputs: expected x: float32\[b,4\], got float64\[2, 4\]"),
    ],
)
def test_sizes_and_inputs_that_do_not_fit_are_refused(tmp_path: Path, options: Any, says: str) -> None:
    model = saved(tmp_path / "model", lambda x: x * 2, "b, 4")
    with pytest.raises(dflow.ExportError, match=says):
        convert(model, "onnx", tmp_path / "out", **options)


def test_a_folder_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    model = saved(tmp_path / "model", lambda x: x, "2")
    with pytest.raises(dflow.ExportError, match=r"expected a file or a SavedModel to overwrite, got another folder"):
        convert(model, "onnx", tmp_path / "model", overwrite=True)
    dflow.load(tmp_path / "model", prefix="still there/")


@pytest.mark.parametrize(("fn", "change"), [(jnp.log, lambda value: value + 1), (lambda x: x + 2j, np.conj)])
def test_results_beyond_the_tolerance_are_an_error_and_nothing_is_written(
    fn: Any, change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = dflow.Variable(0, name="conversion/seen")
    model = saved(tmp_path / "model", fn, "b, 4")
    wrong = type(FORMATS["onnx"])(
        "it",
        lambda function, path, sizes: None,
        lambda path, function: lambda arrays: [change(function.results(arrays)[0])],
    )
    monkeypatch.setitem(FORMATS, "wrong", wrong)  # type: ignore[arg-type]
    with pytest.raises(
        dflow.ExportError, match=r"result: expected dflow's results to within 0.001 .*nothing is written"
    ):
        convert(model, "wrong", tmp_path / "out")
    counting = saved(tmp_path / "counting", lambda x: seen.assign_add(1), "b, 4")
    with pytest.raises(dflow.ExportError, match=r"writes conversion/seen, and it has no state"):
        convert(counting, "wrong", tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["counting", "model"]
