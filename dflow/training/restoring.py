"""`dflow.restore`: read a program's state back, and report how it and the variables differ.

Invariant: a restore changes all of a process's variables or none.
"""

from __future__ import annotations

import io
import itertools
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

import msgspec
from rich.console import Console
from rich.table import Table

from dflow.lowering.files.array_differences import nearest, order_between, orders_of
from dflow.lowering.files.array_manifest import damaged
from dflow.lowering.files.locations import open_arrays
from dflow.lowering.files.object_path import Location
from dflow.lowering.files.saved_arrays import SavedArrays, transposed
from dflow.lowering.state_backend import StateBackend
from dflow.lowering.values.conversion import can_convert
from dflow.tracing.errors import CheckpointError
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.near_names import suggests_keywords
from dflow.tracing.primitives.namesakes import use_beside_namesakes
from dflow.tracing.source import at, caller
from dflow.training.group_saving import group_of, restored_together
from dflow.training.named_arrays import NamedArray, Names, arrays_by_backend, named_variables, variables_of
from dflow.training.saving import given_location

#: Most attempts of a restore; each retry is because the checkpoint was replaced during the read.
_ATTEMPTS = 5
#: Most lines of a table in a message.
_LINES = 60
#: Most arrays that a remedy for transposed ones names.
_EXAMPLES = 3

#: The kinds of difference between a checkpoint and variables.
DIFFERENCES = ("missing", "unexpected", "changed")


@dataclass(frozen=True)
class RestoreReport:
    """Result of `restore`, by the names of the arrays in the checkpoint; its `str` is a table.

    restored    arrays whose values are now in the variables
    missing     arrays of variables that the checkpoint does not have, with the variable's type
    unexpected  arrays of the checkpoint without a variable, with their type
    changed     arrays of another shape, dtype or algorithm than the variable: the checkpoint's type and the variable's
    converted   arrays of another dtype, as in `changed`, which `cast` converted
    """

    restored: tuple[str, ...]
    missing: Mapping[str, str]
    unexpected: Mapping[str, str]
    changed: Mapping[str, tuple[str, str]]
    converted: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def refused(self, ignored: Iterable[str]) -> list[str]:
        """Return the kinds of difference found, without the ignored ones."""
        return [way for way in DIFFERENCES if getattr(self, way) and way not in set(ignored)]

    def __str__(self) -> str:
        rows = [
            *(("missing", name, "-", type) for name, type in self.missing.items()),
            *(("unexpected", name, type, "-") for name, type in self.unexpected.items()),
            *(("changed", name, saved, held) for name, (saved, held) in self.changed.items()),
            *(("converted", name, saved, held) for name, (saved, held) in self.converted.items()),
        ]
        if not rows:
            return f"{len(self.restored)} arrays restored, and no others"
        table = Table("", "array", "in the checkpoint", "in the variables")
        near = [self._nearest(*row) for row in rows[:_LINES]]
        if any(near):
            table.add_column("the nearest name")
        for row, name in zip(rows, near, strict=False):
            table.add_row(*row, *([name] if any(near) else []))
        text = io.StringIO()
        longest = max(len(name) for _, name, *_ in rows) + max(map(len, near))
        Console(file=text, width=max(80, longest + 90), color_system=None, markup=False).print(table)
        more = f"... and {len(rows) - _LINES} more\n" if len(rows) > _LINES else ""
        lines = "\n".join(line.rstrip() for line in text.getvalue().splitlines())
        return f"{lines}\n{more}{len(self.restored)} arrays fit"

    def _nearest(self, difference: str, name: str, saved: str, held: str) -> str:
        """Return the array of the other side that a missing or unexpected one may be, with its type; or nothing."""
        others = {"missing": self.unexpected, "unexpected": self.missing}.get(difference, {})
        found = nearest(name, held if difference == "missing" else saved, others)
        return "" if found is None else f"{found}: {others[found]}"


@suggests_keywords
def restore(
    path: str | os.PathLike[str],
    variables: Any,
    *,
    strict: bool = True,
    ignore: Collection[str] = (),
    names: Names | None = None,
    cast: bool = False,
    transpose: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> RestoreReport:
    """Set variables to the values that `save` wrote, all at one moment; return a report.

    path    as for `save`. It may also be what another library wrote: a folder of Orbax; a file of PyTorch, Keras or
            HDF5; the prefix of a checkpoint of TensorFlow, a folder with its file `checkpoint`, or a SavedModel.
            docs/saving.md has the arrays' names in each
    variables, names  as for `save`
    strict  whether the checkpoint and the variables must have the same arrays; if False, restore the arrays that match
    ignore  differences to allow although `strict` is True: "missing" (a variable without an array in the checkpoint),
            "unexpected" (an array without a variable), "changed" (a different shape, dtype or generator algorithm)
    cast    whether arrays of another dtype than their variables are converted, such as float16 to float32, with
            rounding; not floating-point numbers to integers, nor complex ones to real ones
    transpose  arrays that are stored with other orders of dimensions than their variables: by a regular expression for
            the variable's whole name, the order as `numpy.transpose` takes it. The `[out, in]` of PyTorch's `nn.Linear`
            becomes `[in, out]` by (1, 0), and the `[out, in, height, width]` of `nn.Conv2d` becomes `[height, width,
            in, out]` by (2, 3, 1, 0)

    Each variable keeps its own sharding. All arrays are read and checked before any variable changes, so an error
    leaves every variable as it was; only TaskLost, on a cluster, may leave those of other tasks restored. Generators
    continue from their saved state. Variables of `AllReduce` are restored by all workers, and compared.

    Raises NoCheckpoint if `path` has none. Raises CheckpointError inside traced code, with a table for differences that
    are not allowed, or if the checkpoint keeps being replaced during the read; DamagedCheckpoint for a damaged
    array or manifest, which it names.
    """
    given: Any = ignore
    if isinstance(given, str) or not set(given) <= set(DIFFERENCES):
        raise CheckpointError(f"restore was given ignore={ignore!r}", f"give it some of {list(DIFFERENCES)}")
    location = given_location(path, "restore")
    named = named_variables(variables, names, "restore")

    def work(before_set: Callable[[], None]) -> RestoreReport:
        ignored = ignore if strict else DIFFERENCES
        return restore_named(location, named, ignored, casts=cast, transpose=transpose, before_set=before_set)

    group = group_of(variables_of(named))
    return work(lambda: None) if group is None else restored_together(group, location, [*variables_of(named)], work)


def restore_named(
    location: Location,
    named: Mapping[str, NamedArray],
    ignore: Collection[str] = (),
    of: Callable[[StateBackend], bool] = lambda backend: True,
    *,
    casts: bool = False,
    transpose: Mapping[str, Sequence[int]] = MappingProxyType({}),
    before_set: Callable[[], None] = lambda: None,
) -> RestoreReport:
    """As `restore`, for the variables of those backends that are `of` it; all are compared with the checkpoint.

    before_set  called when all values are read, before the first is set
    """
    for _ in range(_ATTEMPTS):
        files = open_arrays(location)
        named = {_stored(name, files.types): entry for name, entry in named.items()}
        own_names = {array: entry.name for array, entry in named.items()}
        files = transposed(files, orders_of(transpose, own_names, files.types))
        report = _compared(files, named, casts)
        if refused := report.refused(ignore):
            raise CheckpointError(_differs(files, named, report, refused))
        restored = {name: named[name] for name in report.restored}
        if _restored(files, restored, of, before_set):
            use_beside_namesakes(variables_of(restored))
            for variable in variables_of(restored):
                if of(cast(StateBackend, variable.home)):
                    variable.hooks.restored()
            return report
    raise CheckpointError(
        f"{location} was replaced {_ATTEMPTS} times while it was read",
        "save less often to one path, or to a new path each time",
    )


def _stored(name: str, types: Mapping[str, ArrayType]) -> str:
    """Return the name of an array in a checkpoint with these: one beside another array may have its `.orbax` key."""
    parent, _, last = name.rpartition("/")
    key = f"{parent}.{last}"
    return key if parent in types and name not in types and key in types else name


def _restored(
    files: SavedArrays,
    named: Mapping[str, NamedArray],
    of: Callable[[StateBackend], bool],
    before_set: Callable[[], None],
) -> bool:
    """Read and set the variables. Return False, with nothing set, if the checkpoint was replaced meanwhile."""
    with ExitStack() as stack:
        try:
            settings = [
                stack.enter_context(backend.restoring(files, here))
                for backend, here in arrays_by_backend(named).items()
                if of(backend)
            ]
        except CheckpointError:
            if not files.is_replaced():
                raise
            return False
        if files.is_replaced():
            return False
        before_set()
        for set_all in settings:
            set_all()
    return True


def _compared(files: SavedArrays, named: Mapping[str, NamedArray], cast: bool) -> RestoreReport:
    """Return how a checkpoint and variables agree and differ; with `cast`, other dtypes may be converted."""
    impls = _implementations(files)
    changed: dict[str, tuple[str, str]] = {}
    converted: dict[str, tuple[str, str]] = {}
    for name, entry in named.items():
        saved, held = files.types.get(name), entry.type
        # A plain variable may be restored from a generator of any algorithm.
        impl = impls.get(name, "") if entry.impl else ""
        if saved is not None and (saved != held or impl not in ("", entry.impl)):
            is_cast = cast and not entry.impl and _differs_by_dtype(saved, held)
            (converted if is_cast else changed)[name] = _described(saved, impl), _described(held, entry.impl)
    return RestoreReport(
        restored=tuple(name for name in named if name in files.types and name not in changed),
        missing={name: str(entry.type) for name, entry in named.items() if name not in files.types},
        unexpected={name: str(type) for name, type in files.types.items() if name not in named},
        changed=changed,
        converted=converted,
    )


def _differs_by_dtype(saved: ArrayType, held: ArrayType) -> bool:
    """Whether an array may be converted to the type of a variable."""
    return saved.shape == held.shape and can_convert(saved.dtype, held.dtype)


def _implementations(files: SavedArrays) -> dict[str, str]:
    """Return the algorithm of each saved generator, by array name. Raises CheckpointError for damaged metadata."""
    try:
        return msgspec.convert(files.metadata.get("generators", {}), dict[str, str])
    except msgspec.ValidationError as error:
        raise damaged(files.path, f"generators: {error}") from error


def _described(type: ArrayType, impl: str) -> str:
    return f"{type} of {impl}" if impl else str(type)


def _differs(files: SavedArrays, named: Mapping[str, NamedArray], report: RestoreReport, refused: list[str]) -> str:
    """Return the error for differences of the kinds `refused`, with the remedies."""
    pairs = [(files.types[name], named[name].type) for name in report.changed]
    by_dtype = [saved != held and _differs_by_dtype(saved, held) for saved, held in pairs]
    turned = {
        re.escape(named[name].name): order
        for name in report.changed
        if (order := order_between(files.types[name].shape, named[name].type.shape)) is not None
    }
    return (
        f"{files.path} and the variables differ, and nothing is restored{at(caller())}\n{report}\n"
        f"  to restore the arrays that fit, call dflow.restore with ignore={refused!r}; "
        "where names differ alone, give names="
        f"{'; where dtypes differ alone, give cast=True' if any(by_dtype) else ''}"
        f"{_turned(turned)}"
    )


def _turned(orders: Mapping[str, tuple[int, ...]]) -> str:
    """Return the remedy for arrays whose shapes differ by the order of their dimensions."""
    if not orders:
        return ""
    more = f" and so on for {len(orders) - _EXAMPLES} more" if len(orders) > _EXAMPLES else ""
    shown = dict(itertools.islice(orders.items(), _EXAMPLES))
    return f"; where arrays are transposed, as in files of PyTorch, give transpose={shown}{more}"
