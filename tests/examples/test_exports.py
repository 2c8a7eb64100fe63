"""The examples with a function `exported`: lowered for each platform, with equal bits here and in another process."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import dflow
from dflow.exporting.export_format import read_manifest
from dflow.exporting.exporter import export
from dflow.lowering.programs.portable_tree import build, leaves_of, parts_of_type
from dflow.tracing.ir.types import DTYPES
from tests.examples.loading import load
from tests.examples.run_exports import STEPS, run

# Each example is a separate program, and several use one name for their optimizers.
pytestmark = pytest.mark.filterwarnings("ignore::dflow.DuplicateNameWarning")

RUNNER = Path(__file__).parent / "run_exports.py"
EXAMPLES = ["actor_learner", "digits", "pallas_kernel"]
DEADLINE_S = 110.0


class Example:
    """The exports of an example and its functions. `make`, if the example has it, makes its objects."""

    def __init__(self, name: str) -> None:
        self.functions: dict[str, Callable[..., Any]] = {}
        example = load(name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dflow, "export", self._noted, raising=False)
            self.exported = example.exported(*getattr(example, "make", tuple)())

    def _noted(self, given: Any, *specs: Any, **options: Any) -> dflow.Exported:
        made: dflow.Exported = export(given, *specs, **options)
        several = given if isinstance(given, dict) else {made.signatures[0]: (given, *specs)}
        for name, (fn, *types) in several.items():
            self.functions[name] = functools.partial(_called, dflow.jit(fn), types)
        return made


def _called(fn: Callable[..., Any], types: list[Any], *args: Any) -> Any:
    """Call `fn` with its variables and other fixed arguments, and with arguments for its types."""
    given = iter(args)
    return fn(*(type if all(map(dflow.is_variable, jax.tree.leaves(type))) else next(given) for type in types))


@pytest.fixture(scope="module")
def examples() -> dict[str, Example]:
    """Each of these examples, by name."""
    return {name: Example(name) for name in EXAMPLES}


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_each_example_is_lowered_for_each_platform(name: str, platform: str, examples: Any) -> None:
    if (name, platform) == ("pallas_kernel", "cuda"):
        pytest.skip("Pallas asks for a GPU when it lowers for GPUs")
    for signature in examples[name].exported.signatures:
        assert "func.func public @main" in examples[name].exported.mlir_module(signature, platform=platform)


def arguments(path: Path) -> dict[str, np.ndarray]:
    """Random arguments for each step, of the types that the exported functions take."""
    random = np.random.default_rng(0)
    given: dict[str, np.ndarray] = {}
    for name, signature in read_manifest(path).signatures.items():
        tree = [build(p.tree, iter([0] * len(leaves_of(p.tree, "")))) for p in signature.parameters]
        given[f"tree/{name}"] = np.array(json.dumps(tree))
        types = [type for p in signature.parameters for _, type in leaves_of(p.tree, p.name)]
        for step in range(STEPS):
            for index, type in enumerate(types):
                dtype, dims = parts_of_type(type)
                shape = [int(dim) if dim.isdecimal() else 3 for dim in dims]
                drawn = random.integers(0, 2, shape) if dtype.startswith("i") else random.random(shape)
                given[f"{step}/{name}/{index:03}"] = drawn.astype(DTYPES[dtype])
    return given


def test_each_example_runs_without_its_code_as_it_runs_here(examples: Any, tmp_path: Path) -> None:
    place = tmp_path / "exports"
    expected = {}
    for name, example in examples.items():
        (place / name).mkdir(parents=True)
        path = example.exported.save(place / name / "made")
        given = arguments(path)
        np.savez(place / name / "given.npz", **given)
        expected[name] = run(
            example.functions.__getitem__, example.exported.variables, list(example.exported.signatures), given
        )
    ran = subprocess.run(
        [sys.executable, "-P", str(RUNNER), str(place)],
        cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    for name, results in expected.items():
        got = dict(np.load(place / name / "got.npz"))
        assert got.keys() == results.keys()
        for key, value in results.items():
            assert got[key].dtype == value.dtype, (name, key)
            assert got[key].tobytes() == value.tobytes(), (name, key, got[key], value)
