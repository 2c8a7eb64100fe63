"""`dflow convert`: write a function of an export as a model of ONNX, LiteRT or TensorFlow."""

from __future__ import annotations

import argparse
from pathlib import Path

from dflow.cli.command import Command, checked

#: Names of the formats of `dflow/exporting/converting/conversion.py`, which imports JAX.
FORMATS = ("onnx", "litert", "saved_model")


def _sizes(text: str) -> dict[str, int]:
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(letter and number.isdecimal() for letter, _, number in pairs):
        raise ValueError(f"expected sizes such as b=1 or b=1,n=16, got {text!r}")
    return {letter: int(number) for letter, _, number in pairs}


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="DIR", help="the directory that dflow.export(...).save wrote")
    parser.add_argument("--to", required=True, choices=FORMATS, help="the format to write")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="PATH", help="the file, or the folder of a SavedModel"
    )
    parser.add_argument("--function", metavar="NAME", help="the function to convert (default: the only one)")
    parser.add_argument(
        "--sizes",
        type=checked(_sizes),
        default={},
        metavar="b=1,...",
        help="numbers for open sizes; LiteRT needs all of them",
    )
    parser.add_argument(
        "--inputs", type=Path, metavar="FILE.npz", help="arrays to compare the results for (default: random ones)"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-3,
        metavar="SHARE",
        help="largest difference from dflow's results, in relation to the largest value (default: 0.001)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the file or SavedModel at the path")


def _convert(options: argparse.Namespace) -> None:
    import numpy as np

    from dflow.exporting.converting.conversion import convert
    from dflow.exporting.loader import load

    report = convert(
        load(options.path),
        options.to,
        options.out,
        options.function,
        sizes=options.sizes,
        inputs=None if options.inputs is None else dict(np.load(options.inputs, allow_pickle=False)),
        tolerance=options.tolerance,
        overwrite=options.overwrite,
    )
    print(f"{options.out}: {report}")


CONVERT = Command(
    "convert",
    "write a function of an export for ONNX Runtime, LiteRT or TensorFlow",
    _options,
    _convert,
    more=", run it, and compare the results.",
)
