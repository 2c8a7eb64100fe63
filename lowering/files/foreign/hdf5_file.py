"""Arrays of an HDF5 file, read by h5py: `.weights.h5` of Keras, and the weights within a `.keras` file.

The names are the paths of the datasets, such as `layers/dense/vars/0`. A link to another file, and a dataset whose
values are in another file, are refused. Texts and empty datasets are left out. The format has no checksums by default.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from dflow.lowering.files.foreign.foreign_arrays import ForeignArrays, damaged, id_of_file, missing, starts_with
from dflow.tracing.errors import CheckpointError
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.rows.axis_slice import AxisSlice

#: The weights within a `.keras` file.
KERAS_WEIGHTS = "model.weights.h5"
_KIND = "an HDF5 file"
#: Most levels of groups.
_MOST_DEPTH = 64


@dataclass(frozen=True)
class Hdf5File(ForeignArrays):
    """An opened file, which is closed between two reads."""

    def parts(self, wanted: Sequence[tuple[str, AxisSlice]]) -> Iterator[Any]:
        """Yield parts of arrays in order; no more than they is read."""
        for name, part in wanted:
            yield self.value(name, part.slices)

    def value(self, name: str, slices: tuple[slice, ...] = ()) -> npt.NDArray[Any]:
        try:
            with _opened(self.path) as file:
                dataset, type = file[name], self.types[name]
                value = np.asarray(dataset[slices or ()])
        except Exception as error:  # the library raises errors of many classes
            raise damaged(self.path, f"the dataset {name!r}", error) from error
        if value.dtype.kind == "V":
            value = value.view(type.dtype)
        return value.astype(type.dtype, copy=False)


def read_hdf5(path: Path) -> Hdf5File:
    """Open a file. Raises CheckpointError without h5py; DamagedCheckpoint for a file that it cannot read."""
    try:
        import h5py  # noqa: F401
    except ImportError as error:
        raise missing(path, _KIND, "h5py", error, "pip install 'dflow[checkpoints]'") from error
    try:
        id = id_of_file(path)
        with _opened(path) as file:
            types = dict(_types(path, file, ""))
    except CheckpointError:
        raise
    except Exception as error:  # the library raises errors of many classes
        raise damaged(path, _KIND, error) from error
    return Hdf5File(path, id, types, {})


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    import h5py

    with ExitStack() as stack:
        opened: Any = path
        if starts_with(path, b"PK"):
            archive = stack.enter_context(zipfile.ZipFile(path))
            opened = stack.enter_context(archive.open(KERAS_WEIGHTS))
        yield stack.enter_context(h5py.File(opened, "r"))


def _types(path: Path, group: Any, prefix: str, depth: int = 0) -> Iterator[tuple[str, ArrayType]]:
    import h5py

    if depth > _MOST_DEPTH:
        raise ValueError(f"groups of more than {_MOST_DEPTH} levels")
    for key in group:
        name = prefix + key
        if not isinstance(group.get(key, getlink=True), h5py.HardLink):
            raise ValueError(f"a link at {name!r}")
        inner = group[key]
        if isinstance(inner, h5py.Group):
            yield from _types(path, inner, f"{name}/", depth + 1)
        elif isinstance(inner, h5py.Dataset) and inner.shape is not None:
            if inner.is_virtual or inner.external:
                raise ValueError(f"values of {name!r} in another file")
            if (type := _type(path, name, inner)) is not None:
                yield name, type


def _type(path: Path, name: str, dataset: Any) -> ArrayType | None:
    """Return the type of a dataset, None for texts. Raises CheckpointError for other values than numbers."""
    if dataset.dtype.kind in "OS":
        return None
    if dataset.attrs.get("dtype") == "bfloat16":  # as Keras writes it
        return ArrayType(jnp.dtype("bfloat16"), tuple(dataset.shape))
    if dataset.dtype.kind not in "biufc":
        raise CheckpointError(
            f"{path}: dataset {name!r}: expected numbers, got {dataset.dtype}", "write the file without it"
        )
    return ArrayType(dataset.dtype.newbyteorder("="), tuple(dataset.shape))
