"""`dflow compile`: make a module of IREE, for phones and other devices without Python, from an export."""

from __future__ import annotations

import argparse
from pathlib import Path

from dflow.cli.command import Command


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="DIR", help="the directory that dflow.export(...).save wrote")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="the module to write, such as model.vmfb"
    )
    parser.add_argument("--function", metavar="NAME", help="the function to compile (default: the only one)")
    parser.add_argument(
        "--triple",
        metavar="TRIPLE",
        help="LLVM's name of the target, such as aarch64-linux-android34 (default: this machine, where the module is "
        "then run, and its results compared with dflow's)",
    )
    parser.add_argument("--cpu", default="generic", help="LLVM's name of the processor (default: generic)")


def _compile(options: argparse.Namespace) -> None:
    from dflow.exporting.iree_module import compile_module
    from dflow.exporting.loader import load

    module = compile_module(load(options.path), options.function, triple=options.triple, cpu=options.cpu)
    options.out.write_bytes(module.content)
    print(f"{options.out}: {len(module.content):,} bytes\n{module}")
    if options.triple is None:
        print(f"run here, its results differ from dflow's by at most {module.difference():.3g}")


COMPILE = Command(
    "compile",
    "make a module of IREE from an export, for devices without Python",
    _options,
    _compile,
    more=", with the weights inside.",
)
