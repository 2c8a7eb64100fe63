"""A checkpoint that a program wrote by Orbax, read by Orbax's own library.

An array's name is its keys and indices in the checkpoint's tree, joined by `/`. A number of Python, which has no dtype,
gets the dtype that JAX gives it. Empty containers and None are no arrays. A folder with a link, or a key that leads out
of it, is refused. The format has no checksums of values, and Orbax opens what its files name, so a checkpoint
should be of a trusted source.

The library is imported when the first checkpoint is opened: it takes a second, and dflow's own checkpoints do without.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from dflow.lowering.files.array_manifest import MANIFEST, is_inside
from dflow.lowering.files.orbax_layout import METADATA
from dflow.lowering.files.regular_file import refuse_links_within, remedy_of
from dflow.lowering.files.saved_arrays import SavedArrays
from dflow.lowering.files.whole_arrays import placed
from dflow.tracing.errors import CheckpointError, DamagedCheckpoint
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.path_names import path_name

#: Largest part of an error of Orbax that is repeated, in characters.
_MOST = 300


def is_orbax(location: Path) -> bool:
    """Return whether a folder was written by Orbax: it is marked as such, and dflow's own files are not in it."""
    return (location / METADATA).is_file() and not any((location / name).exists() for name in (MANIFEST, "zarr.json"))


@dataclass(frozen=True)
class OrbaxCheckpoint(SavedArrays):
    """An opened checkpoint; `_tree` has what Orbax knows of each array, in the checkpoint's tree."""

    path: Path
    _tree: Any

    def each(self, shardings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """See `SavedArrays`.

        All pass through the memory of this process. Raises DamagedCheckpoint, which names the array, for one that
        Orbax cannot read; CheckpointError for a number of Python that is too large.
        """
        for name, value in self._read([*shardings]).items():
            sharding = shardings[name]
            yield name, value if sharding is None else placed(jnp.array(value), sharding)

    def is_replaced(self) -> bool:
        try:
            return _id(self.path) != self.id
        except OSError:
            return True

    def _read(self, names: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
        try:
            found = self._restored(names)
        except Exception as error:  # the library raises errors of many classes
            if len(names) == 1:
                raise DamagedCheckpoint(
                    f"array {names[0]!r} ({self.types[names[0]]}) in {self.path} is damaged or missing: {_fact(error)}",
                    "take an older checkpoint, or read the others without this one",
                ) from error
            # One by one, to find the damaged array.
            return {name: value for each in names for name, value in self._read([each]).items()}
        return {name: self._checked(name, value) for name, value in found.items()}

    def _restored(self, names: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
        """Read arrays by the library."""
        import orbax.checkpoint as ocp

        wanted = {*names}
        item = jax.tree_util.tree_map_with_path(
            lambda path, _: 0 if path_name(path) in wanted else ocp.PLACEHOLDER, self._tree
        )
        arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), self._tree)
        with closing(ocp.PyTreeCheckpointHandler()) as reader:
            tree = reader.restore(self.path, args=ocp.args.PyTreeRestore(item=item, restore_args=arguments))
        return {name: np.asarray(value) for name, value in _by_name(tree) if name in wanted}

    def _checked(self, name: str, value: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the value as its type, which for a number of Python may be narrower than what is stored."""
        type = self.types[name]
        if value.dtype == type.dtype:
            return value
        with np.errstate(over="ignore"):
            number = value.astype(type.dtype)
        is_integer = np.issubdtype(type.dtype, np.integer)
        if number != value if is_integer else np.isfinite(number) != np.isfinite(value):
            raise CheckpointError(
                f"array {name!r} in {self.path}: expected a number that {type} holds, got {value}",
                'call jax.config.update("jax_enable_x64", True), or write the checkpoint with an array of that dtype',
            )
        return number


def read_orbax(location: Path) -> OrbaxCheckpoint:
    """Open a checkpoint of Orbax.

    Raises DamagedCheckpoint if Orbax cannot read its metadata; CheckpointError without the library, or if something in
    it is neither a number nor an array, or two arrays have one name.
    """
    try:
        import orbax.checkpoint as ocp
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{location} is a checkpoint of Orbax: expected the package orbax-checkpoint, got: {error}",
            "pip install 'dflow[orbax]'",
        ) from error
    try:
        refuse_links_within(location)
        id = _id(location)
        with closing(ocp.PyTreeCheckpointHandler()) as reader:
            tree = reader.metadata(location).tree
    except Exception as error:  # the library raises errors of many classes
        raise DamagedCheckpoint(
            f"{location}: expected a checkpoint of Orbax, got: {_fact(error)}", remedy_of(error, "take another copy")
        ) from error
    named = _by_name(tree)
    if strange := [name for name, _ in named if not is_inside(name)]:
        raise DamagedCheckpoint(
            f"{location}: expected arrays inside the folder, got the name {strange[0]!r}", "take another copy"
        )
    for name, count in Counter(name for name, _ in named).items():
        if count > 1:
            raise CheckpointError(
                f"{location}: expected one array of the name {name!r}, got {count}",
                "write the checkpoint with keys that contain no '/'",
            )
    return OrbaxCheckpoint(location, id, {name: _type(location, name, leaf) for name, leaf in named}, {}, tree)


def _fact(error: Exception) -> str:
    return (str(error) or type(error).__name__).split(" [tensorstore_spec")[0][:_MOST]


def _by_name(tree: Any) -> list[tuple[str, Any]]:
    return [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _type(location: Path, name: str, leaf: Any) -> ArrayType:
    """Return the type of an array from Orbax's metadata of it."""
    from orbax.checkpoint.metadata import ScalarMetadata

    try:
        dtype, shape = np.dtype(leaf.dtype), tuple(leaf.shape)
    except (AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{location}: expected arrays and numbers, got a {type(leaf).__name__} at {name!r}",
            "write the checkpoint without it",
        ) from error
    return ArrayType(jax.dtypes.canonicalize_dtype(dtype) if isinstance(leaf, ScalarMetadata) else dtype, shape)


def _id(location: Path) -> str:
    file = location / METADATA
    return f"{file.stat().st_mtime_ns}-{zlib.crc32(file.read_bytes())}"
