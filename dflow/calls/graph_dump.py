"""Dumps of the graph of each traced function after each pass, in the directory that `DFLOW_DUMP` names."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

from dflow.config import CONFIG
from dflow.lowering.passes.base import Observer
from dflow.tracing.ir.graph import Graph
from dflow.tracing.syntax.text import text

_numbers = itertools.count()


def dumper(name: str) -> Observer | None:
    """Return a function that writes each graph of the function `name` to a file, or None if dumps are off."""
    if CONFIG.dump is None:
        return None
    folder = CONFIG.dump / f"{next(_numbers):03d}-{name.strip('<>')}"
    folder.mkdir(parents=True, exist_ok=True)
    return functools.partial(_write_dump, folder, itertools.count())


def _write_dump(folder: Path, numbers: Iterator[int], stage: str, graph: Graph) -> None:
    (folder / f"{next(numbers):02d}-{stage}.graph").write_text(text(graph) + "\n")
