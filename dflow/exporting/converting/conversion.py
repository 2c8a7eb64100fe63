"""Functions of exports in the formats of other libraries, each compared with dflow's results before it is kept."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflow.exporting.converting.numeric_function import NumericFunction, numeric_function, refused
from dflow.exporting.converting.onnx_model import onnx_runner, write_onnx
from dflow.exporting.converting.tensorflow_model import (
    litert_runner,
    saved_model_runner,
    write_litert,
    write_saved_model,
)
from dflow.exporting.loader import Loaded
from dflow.tracing.errors import DflowError, ExportError

#: Runs a converted model on arrays.
Run = Callable[[Sequence[Any]], list[Any]]
#: The sizes that open ones have in comparisons: the first for each letter, and then the second.
_SIZES = (3, 8)


@dataclass(frozen=True)
class Format:
    """A format: what it is called, what writes a model to a path, and what runs one from there."""

    title: str
    write: Callable[[NumericFunction, Path, Mapping[str, int]], None]
    runner: Callable[[Path, NumericFunction], Run]
    has_open_sizes: bool = True


FORMATS: Mapping[str, Format] = {
    "onnx": Format("a model of ONNX", write_onnx, onnx_runner),
    "litert": Format("a model of LiteRT", write_litert, litert_runner, has_open_sizes=False),
    "saved_model": Format("a SavedModel", write_saved_model, saved_model_runner),
}


@dataclass(frozen=True)
class ConversionReport:
    """A converted function and how its results differ from dflow's; its `str` is a table.

    differences  by output: the largest absolute difference, and that in relation to the largest absolute value. NaN if
                 only one of the two has a NaN at a position
    """

    function: NumericFunction
    differences: Mapping[str, tuple[float, float]]
    size_bytes: int

    def __str__(self) -> str:
        lines = [f"{self.size_bytes:,} bytes", str(self.function)]
        lines += [
            f"{name}: differs from dflow's by at most {most:.3g}, {share:.3g} of the largest value"
            for name, (most, share) in self.differences.items()
        ]
        return "\n".join([*lines, *(f"note: {note}" for note in self.function.notes)])


def convert(
    model: Loaded,
    to: str,
    out: Path,
    function: str | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    inputs: Mapping[str, Any] | None = None,
    tolerance: float = 1e-3,
    overwrite: bool = False,
) -> ConversionReport:
    """Write a function of an export in the format `to`, a name of `FORMATS`, and run the result on this machine.

    function   its name, needed if there are several
    sizes      numbers for open sizes, by letter; LiteRT needs all, the others leave the rest open
    inputs     arrays by the names of the inputs, to compare the results for; by default random ones
    tolerance  the largest difference from dflow's results, in relation to the largest value of an output
    overwrite  whether to replace the file or SavedModel at `out`

    The path appears complete or not at all. Raises ExportError for a function that the format cannot hold, naming the
    op and its line, for inputs that do not fit, and for results beyond the tolerance, and then writes nothing;
    ConfigError without the package that converts.
    """
    format = FORMATS[to]
    numeric = numeric_function(model, function, format.title)
    if unknown := sorted({*(sizes or {})} - {*numeric.letters}):
        raise ExportError(
            f"sizes: expected letters of {numeric}, got {', '.join(unknown)}", "give the open sizes of its inputs"
        )
    _check_free(out, overwrite)
    examples = _examples(numeric, sizes or {}, inputs, format.has_open_sizes)
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = out.with_name(f".{out.name}.{secrets.token_hex(8)}.writing")
    try:
        format.write(numeric, staging, sizes or {})
        run = _runner(format, staging, numeric)
        report = ConversionReport(numeric, _differences(numeric, run, examples), _size(staging))
        _check(report, tolerance)
        if out.is_dir():
            shutil.rmtree(out)
        os.replace(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        staging.unlink(missing_ok=True)
    return report


def _check_free(out: Path, overwrite: bool) -> None:
    """Raise ExportError for a path that may not be replaced: any, or with `overwrite` a folder of something else."""
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise ExportError(f"{out} exists", "give another path, or --overwrite")
    if out.is_dir() and (out.is_symlink() or not (out / "saved_model.pb").is_file()):
        raise ExportError(
            f"{out}: expected a file or a SavedModel to overwrite, got another folder", "give another path"
        )


def _runner(format: Format, path: Path, function: NumericFunction) -> Run:
    """Return a function that runs a model, and raises ExportError for errors of the model's library."""
    model: list[Run] = []

    def run(arrays: Sequence[Any]) -> list[Any]:
        try:
            model[:] = model or [format.runner(path, function)]
            return model[0](arrays)
        except DflowError:
            raise
        except Exception as error:  # the libraries raise errors of many classes
            raise refused(f"{format.title} was written, but cannot run", function, error) from error

    return run


def _examples(
    function: NumericFunction, sizes: Mapping[str, int], inputs: Mapping[str, Any] | None, has_open_sizes: bool
) -> list[list[Any]]:
    """Return the lists of inputs to compare for."""
    if inputs is not None:
        return [_given(function, sizes, inputs)]
    random = np.random.default_rng(0)
    drawn = _SIZES if has_open_sizes and {*function.letters} - {*sizes} else _SIZES[:1]
    return [
        function.drawn(random, {**({} if not has_open_sizes else dict.fromkeys(function.letters, size)), **sizes})
        for size in drawn
    ]


def _given(function: NumericFunction, sizes: Mapping[str, int], inputs: Mapping[str, Any]) -> list[Any]:
    names = [one.name for one in function.inputs]
    if {*inputs} != {*names}:
        raise ExportError(
            f"inputs: expected arrays {', '.join(names)}, got {', '.join(inputs) or 'none'}",
            "name them as the inputs of the function",
        )
    known = dict(sizes)
    for one in function.inputs:
        array = np.asarray(inputs[one.name])
        dims = zip(one.shape, array.shape, strict=len(one.shape) == array.ndim)
        fits = array.dtype == one.dtype and len(one.shape) == array.ndim
        if not fits or any(
            (known.setdefault(dim, size) if isinstance(dim, str) else dim) != size for dim, size in dims
        ):
            raise ExportError(
                f"inputs: expected {one}, got {array.dtype}{[*array.shape]}", "convert it, or give the size by --sizes"
            )
    return [np.asarray(inputs[name]) for name in names]


def _differences(
    function: NumericFunction, run: Run, examples: Sequence[Sequence[Any]]
) -> dict[str, tuple[float, float]]:
    found = {one.name: (0.0, 0.0) for one in function.outputs}
    for arrays in examples:
        for name, expected, got in zip(found, function.results(arrays), run(arrays), strict=True):
            if np.shape(got) != expected.shape:
                raise ExportError(f"{name}: expected the shape {expected.shape}, got {np.shape(got)}")
            wide = np.complex128 if np.iscomplexobj(expected) else np.float64
            most, share = _apart(expected.astype(wide), np.asarray(got).astype(wide))
            found[name] = float(np.maximum(found[name][0], most)), float(np.maximum(found[name][1], share))
    return found


def _apart(expected: Any, got: Any) -> tuple[float, float]:
    """Return the largest difference, and that in relation to the largest finite value; NaN if only one has a NaN."""
    with np.errstate(invalid="ignore"):  # infinity less infinity
        apart = np.where((expected == got) | (np.isnan(expected) & np.isnan(got)), 0.0, np.abs(expected - got))
    most = float(np.max(apart, initial=0.0))
    largest = float(np.max(np.abs(expected[np.isfinite(expected)]), initial=0.0))
    return most, most / largest if largest else most


def _check(report: ConversionReport, tolerance: float) -> None:
    for name, (most, share) in report.differences.items():
        if not share <= tolerance:
            raise ExportError(
                f"{name}: expected dflow's results to within {tolerance:g} of the largest value, got a difference of "
                f"{most:.3g}, which is {share:.3g} of it; nothing is written",
                "give --inputs with realistic arrays, or a larger --tolerance",
            )


def _size(path: Path) -> int:
    return sum(one.stat().st_size for one in ([path] if path.is_file() else path.rglob("*")) if one.is_file())
