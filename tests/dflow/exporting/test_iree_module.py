"""Exports compiled by IREE: run here, their results are dflow's; for ARM, they are ELF files of that machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.__main__ import main
from dflow.exporting.iree_module import compile_module

pytestmark = pytest.mark.once
pytest.importorskip("iree.compiler")
pytest.importorskip("iree.runtime")

#: The number of ARM's 64-bit machine in an ELF header, after the kind of file, which is that of a library.
AARCH64 = b"\x7fELF\x02\x01\x01", b"\x03\x00\xb7\x00"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    w = dflow.Variable(jnp.asarray(np.random.default_rng(0).normal(size=(64, 256)), jnp.float32), name="w")
    seen = dflow.Variable(0, name="seen")

    def classify(batch: Any, *, shift: Any) -> Any:
        return {"p": jax.nn.softmax(batch["x"] @ w + shift), "top": jnp.argmax(batch["x"] @ w, axis=-1)}

    def count(x: Any) -> None:
        seen.assign_add(1)

    rows, number = jax.ShapeDtypeStruct((3, 64), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)
    any_number = dflow.spec("b, 64", jnp.float32)
    folder = tmp_path_factory.mktemp("exports")
    for name, weights in (("whole", None), ("small", "int8")):
        functions = {
            "classify": dflow.export(classify, {"x": rows}, shift=number),
            "count": (count, rows),
            "any": (lambda x: x @ w, any_number),
        }
        dflow.export(functions, weights=weights).save(folder / name)  # type: ignore[arg-type]
    return folder


def test_a_module_gives_what_dflow_gives_and_int8_makes_it_small(exported: Path) -> None:
    sizes = []
    for name in ("whole", "small"):
        module = compile_module(dflow.load(exported / name, prefix=name), "classify")
        text = "main(batch['x']: f32[3,64], shift: f32[]) -> result['p']: f32[3,256], result['top']: i32[3]"
        assert str(module) == text
        assert module.difference() < 1e-5
        sizes.append(len(module.content))
    assert sizes[0] - sizes[1] > 0.7 * 64 * 256 * 4 - 256 * 4


def test_a_result_that_is_nan_here_alone_is_a_difference(tmp_path: Path) -> None:
    vector = jax.ShapeDtypeStruct((4,), jnp.float32)
    dflow.export(lambda x: (jnp.log(-jnp.abs(x) - 1), x * 2), vector).save(tmp_path / "nan")
    module = compile_module(dflow.load(tmp_path / "nan"))
    assert module.difference() < 1e-6  # both are NaN
    for changed in (0, 1):
        found = replace(module, expected=lambda x, changed=changed: [x * (np.nan, 2)[changed], x * np.nan])
        assert np.isnan(found.difference())


def test_integers_of_a_comparison_are_small_and_not_negative(tmp_path: Path) -> None:
    table = jnp.arange(1000.0)
    dflow.export(lambda ids: table[ids], jax.ShapeDtypeStruct((100,), jnp.int32)).save(tmp_path / "ids")
    module, given = compile_module(dflow.load(tmp_path / "ids")), list[Any]()

    def expected(ids: Any) -> Any:
        given.append(ids)
        return module.expected(ids)

    assert replace(module, expected=expected).difference() == 0
    assert given[0].min() >= 0
    assert len({*given[0].tolist()}) > 10


def test_the_command_compiles_for_arm_and_for_this_machine(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model.vmfb"
    words = ["compile", str(exported / "small"), "--function", "classify", "--out", str(out)]
    assert main([*words, "--triple", "aarch64-linux-android34"]) == 0
    content = out.read_bytes()
    start = content.index(AARCH64[0])
    assert content[start + 16 : start + 20] == AARCH64[1]
    assert main(words) == 0
    assert "run here, its results differ from dflow's by at most" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--function", "any"], "x is f32[b,64], and IREE takes no program for any b"),
        (["--function", "count"], "count writes seen, and a module of IREE has no state"),
        ([], "there are 3 functions"),
        (["--function", "classify", "--triple", "none"], "IREE cannot compile classify for none"),
    ],
)
def test_what_has_no_module_is_refused(
    words: list[str], text: str, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", str(exported / "whole"), "--out", str(tmp_path / "m"), *words]) == 1
    assert text in capsys.readouterr().err
    assert not (tmp_path / "m").exists()
