"""The comparison of a checkpoint with the variables that are to be restored, and the error for their differences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from dflow.lowering.files.array_manifest import damaged
from dflow.lowering.files.saved_arrays import SavedArrays
from dflow.lowering.values.conversion import can_convert
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.source import at, caller
from dflow.training.restore_report import RestoreReport

#: Remedy for arrays of the reverse shape, as PyTorch's linear layers have.
_TURNED = (
    "\n  where an array is transposed, as in files of PyTorch, restore it into a variable of its shape, and assign "
    "that one's transpose: variable.assign(other.T)"
)


class Restored(Protocol):
    """An array to restore: its type, and the algorithm of a generator, or an empty text."""

    @property
    def type(self) -> ArrayType:
        """The type of the array."""
        ...

    @property
    def impl(self) -> str:
        """The algorithm."""
        ...


def compared(files: SavedArrays, named: Mapping[str, Restored], cast: bool) -> RestoreReport:
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


def differs(files: SavedArrays, named: Mapping[str, Restored], report: RestoreReport, refused: list[str]) -> str:
    """Return the error for differences of the kinds `refused`, with the remedies."""
    pairs = [(files.types[name], named[name].type) for name in report.changed]
    by_dtype = [saved != held and _differs_by_dtype(saved, held) for saved, held in pairs]
    turned = [saved.shape != held.shape and saved.shape == held.shape[::-1] for saved, held in pairs]
    return (
        f"{files.path} and the variables differ, and nothing is restored{at(caller())}\n{report}\n"
        f"  to restore the arrays that fit, call dflow.restore with ignore={refused!r}; "
        "where names differ alone, give names="
        f"{'; where dtypes differ alone, give cast=True' if any(by_dtype) else ''}"
        f"{_TURNED if any(turned) else ''}"
    )
