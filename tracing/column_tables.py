"""Tables of columns by name, such as a DataFrame, and the error for a table where batches are expected.

No library is imported: an object is recognised by the modules and names of its classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflow.tracing.errors import DflowError, InputError
from dflow.tracing.source import caller

#: Classes of pyarrow with columns by name.
_ARROW_TABLES = ("Table", "RecordBatch", "Dataset")


def is_of(value: Any, library: str, *names: str) -> bool:
    """Return whether a value is an object of one of these classes of a library, or of a class derived from them."""
    return any(kind.__name__ in names and library_of(kind) == library for kind in type(value).__mro__)


def library_of(kind: type) -> str:
    """Return the name of the library that a class is of."""
    return kind.__module__.partition(".")[0]


def is_table(value: Any) -> bool:
    """Return whether a value has columns by name."""
    kind = type(value)  # a lazy frame warns when its own attributes are looked at
    is_foreign = hasattr(kind, "__dataframe__") or (hasattr(kind, "columns") and hasattr(kind, "dtypes"))
    return is_foreign or isinstance(value, Mapping) or is_of(value, "pyarrow", *_ARROW_TABLES)


def refuse_table(door: str, data: Any, remedy: str, error: type[DflowError] = InputError) -> None:
    """Raise an error if data is a table, whose iteration would give the names of its columns."""
    if is_table(data):
        raise error(
            f"{door}: expected batches one after another, got a {type(data).__name__}, whose entries are columns",
            remedy,
            at=caller(),
        )
