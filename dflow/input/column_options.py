"""How columns become arrays: the values for missing ones, and categories as codes or as names.

A column's key is its name; in nested data the tuple of the names that lead to it, and () for data that is one column.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflow.tracing.errors import InputError
from dflow.tracing.near_names import did_you_mean
from dflow.tracing.source import caller

#: In place of a value for missing ones, if none is stated.
NO_VALUE = object()
#: The two forms of categories, as the option names them.
CODES, NAMES = "codes", "names"

Path = tuple[Any, ...]


@dataclass(frozen=True)
class ColumnOptions:
    """The options of `dflow.data.batches` for columns.

    missing         values for missing ones: a dict by column, or one value for data that is one column
    categories      "codes", "names", or a dict of names by column: the column becomes the positions of its values there
    keeps_missing   whether columns with missing values stay masked arrays, with NaN and NaT as they are
    keeps_ragged    whether lists of several lengths stay a `RaggedColumn`; else they are an error
    """

    missing: Any = None
    categories: Any = CODES
    keeps_missing: bool = False
    keeps_ragged: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.categories, Mapping) and self.categories not in (CODES, NAMES):
            raise InputError(
                f"batches: categories: expected 'codes', 'names' or a dict of names by column, got {self.categories!r}",
                "leave it out for codes, or give the categories of other batches: categories=training.categories",
                at=caller(),
            )

    def fill(self, path: Path) -> Any:
        """Return the value for missing ones in a column, `NO_VALUE` if none is stated."""
        if isinstance(self.missing, Mapping):
            return self.missing.get(key_of(path), NO_VALUE)
        return self.missing if self.missing is not None and not path else NO_VALUE

    def names(self, path: Path) -> Any:
        """Return the names whose positions are the codes of a column, or the form of its categories."""
        return self.categories.get(key_of(path), CODES) if isinstance(self.categories, Mapping) else self.categories

    def check_absent(self, expected: str, remedy: str) -> None:
        """Raise InputError for options of columns, where the data takes none."""
        if self.missing is not None or isinstance(self.categories, Mapping):
            option = "missing" if self.missing is not None else "categories"
            raise InputError(f"batches: {option}: expected {expected}", remedy, at=caller())

    def check_names(self, paths: Iterable[Path]) -> None:
        """Raise InputError for an option of a column that the data does not have."""
        known = [key_of(path) for path in paths]
        if self.missing is not None and not isinstance(self.missing, Mapping) and known != [()]:
            raise InputError(
                f"batches: missing: expected a dict of values by column, got {self.missing!r}",
                f"name the columns: missing={{{known[0]!r}: {self.missing!r}}}",
                at=caller(),
            )
        for option in ("missing", "categories"):
            stated = getattr(self, option)
            for key in stated if isinstance(stated, Mapping) else ():
                if key not in known:
                    columns = f"the columns are {', '.join(map(repr, known[:20]))}"
                    raise InputError(
                        f"batches: {option}: expected names of columns, got {key!r}",
                        did_you_mean(str(key), map(str, known), columns),
                        at=caller(),
                    )


def key_of(path: Path) -> Any:
    """Return the key of a column in the options."""
    return path[0] if len(path) == 1 else path


def filled(values: Any, fill: Any) -> Any:
    """Return the values with `fill` in place of masked values, NaN and NaT."""
    missing = missing_of(values)
    values = np.ma.getdata(values)
    if missing.any():
        values = values.copy()
        values[missing] = fill
    return values


def missing_of(values: Any) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return whether each value is missing: masked, NaN or NaT."""
    missing = np.ma.getmaskarray(values)
    plain = np.ma.getdata(values)
    return missing if plain.dtype.kind in "OSUbiu" else missing | (plain != plain)


def checked_fill(fill: Any, dtype: Any) -> Any:
    """Return a value for the missing ones of a column of this dtype. Raises TypeError unless it fits."""
    given = np.asarray(fill)
    if given.ndim == 0 and dtype.kind not in "OmM":
        is_whole = dtype.kind in "iu" and given.dtype.kind in "iu"
        is_bool = dtype.kind == "b" and given.dtype.kind == "b"
        is_real = dtype.kind not in "biu" and given.dtype.kind in "fiuc"
        if is_bool or is_real or (is_whole and np.iinfo(dtype).min <= int(given) <= np.iinfo(dtype).max):
            return given.astype(dtype)[()]
    if given.ndim == 0 and dtype.kind in "mM":
        return given.astype(dtype)[()]
    if dtype.kind == "O" and isinstance(fill, str | bytes | int | float):
        return fill
    raise TypeError(f"expected a value of {'strings' if dtype.kind == 'O' else dtype}, got {fill!r}")
