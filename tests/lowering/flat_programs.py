"""Programs over flat arguments: the written variables, those only read, and the operands; so are their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dflow.lowering.programs.program import Program


def flat_program(fn: Callable[..., Sequence[Any]], writes: int = 0) -> Program:
    """A program that runs a Python function."""

    def run(written: Sequence[Any], read: Sequence[Any], *operands: Any) -> tuple[list[Any], list[Any]]:
        results = list(fn(*written, *read, *operands))
        return results[:writes], results[writes:]

    return Program(run)


def run_flat(program: Program, writes: int, *args: Any) -> list[Any]:
    """Run a program that reads no variables but those it writes."""
    new, results = program.run(lambda call, args: call([*args[:writes]], [], *args[writes:]), args, lambda: args)
    return [*new, *results]
