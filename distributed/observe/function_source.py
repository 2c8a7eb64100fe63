"""Where a task finds the functions that its process has compiled; the layers above know them."""

from __future__ import annotations

from typing import Protocol

from dflow.distributed.wire.messages.functions import FunctionGraph, Functions, FunctionTraces
from dflow.tracing.errors import GraphNameError


class FunctionSource(Protocol):
    """The compiled functions of a process. Thread-safe; nothing is made before it is asked for."""

    def functions(self) -> Functions:
        """List the functions, the most recently traced first."""
        ...

    def traces(self, number: int) -> FunctionTraces:
        """List the traces of the function with the id `number`. Raises GraphNameError if there is none."""
        ...

    def graph(self, number: int, trace: int) -> tuple[FunctionGraph, bytes]:
        """Return the graph of a trace (0: the newest) as JSON. Raises GraphNameError if it is not kept."""
        ...


class NoFunctions(FunctionSource):
    """The source of a process that runs no code of the user."""

    def functions(self) -> Functions:
        """Return an empty list."""
        return Functions()

    def traces(self, number: int) -> FunctionTraces:
        """Raise GraphNameError."""
        raise missing_function(number)

    def graph(self, number: int, trace: int) -> tuple[FunctionGraph, bytes]:
        """Raise GraphNameError."""
        raise missing_function(number)


def missing_function(number: int) -> GraphNameError:
    """Return the error for a function that is not there, or is no longer."""
    return GraphNameError(
        f"function {number}: expected one that this process keeps, got a number of none", "list its functions again"
    )
