"""How Orbax finds the arrays of a folder: a file `_METADATA`, which lists the keys that lead to each array.

Orbax reads each array from a folder named by its keys, joined by dots. A folder of arrays is a dict of one level for
it, from path to array. In the tree layout the parts of a name are the keys of nested dicts, as in the checkpoints of
Flax programs. A dict cannot be an array too: beside an array `table`, the array `table/ids` has the key `table.ids`.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dflow.lowering.files.array_manifest import MANIFEST
from dflow.lowering.files.zarr import stored_dtype, stored_type
from dflow.tracing.errors import CheckpointError
from dflow.tracing.ir.types import ArrayType

#: How the path of a checkpoint in the tree layout ends.
SUFFIX = ".orbax"
#: The file that marks a checkpoint of Orbax.
METADATA = "_METADATA"
#: Names of the files of zarr, Orbax and dflow.
RESERVED = {MANIFEST, "zarr.json", METADATA, "_CHECKPOINT_METADATA", "_sharding", "array_metadatas", "descriptor"}

_KEY = re.compile(r"[A-Za-z0-9_-](?:[A-Za-z0-9_. -]*[A-Za-z0-9_-])?")
#: Greatest length of the name of a folder on every file system.
_LONGEST = 255


def tree_paths(names: Iterable[str]) -> dict[str, str]:
    """Return the path of each array in the tree layout. Raises CheckpointError for names that have none."""
    paths: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in names:
        path = name.replace("/", ".")
        if not all(map(_KEY.fullmatch, name.split("/"))) or path in RESERVED or len(path) > _LONGEST:
            raise CheckpointError(
                f"array {name!r}: expected keys of letters, digits, '_', '-', '.' and inner spaces, joined by '/', of "
                f"{_LONGEST} characters in all, got another name",
                "give it another name by names=, or save to a path that does not end in '.orbax'",
            )
        if (other := taken.setdefault(path.casefold(), name)) != name:
            raise CheckpointError(
                f"arrays {other!r} and {name!r}: expected names that differ by more than dots, slashes and case",
                "give one of them another name by names=, or save to a path that does not end in '.orbax'",
            )
        paths[name] = path
    return paths


def _keys(name: str, names: Container[str]) -> list[str]:
    """Return the keys that lead to an array among arrays of these names, in the tree layout."""
    parts = name.split("/")
    ends = (end for end in range(1, len(parts)) if "/".join(parts[:end]) in names)
    first = next(ends, len(parts))
    return [*parts[: first - 1], ".".join(parts[first - 1 :])]


def check_types(types: Mapping[str, ArrayType]) -> None:
    """Raise CheckpointError for an array whose dtype Orbax does not read."""
    for name, type in types.items():
        if jnp.issubdtype(type.dtype, jax.dtypes.extended) or stored_dtype(type.dtype) != type.dtype:
            raise CheckpointError(
                f"array {name!r}: expected a dtype that Orbax reads, got {type}",
                "save it to a path that does not end in '.orbax', or convert it to numbers",
            )


def orbax_metadata(types: Mapping[str, ArrayType], paths: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of `_METADATA` for arrays at these paths, in either layout."""
    keys = {name: _keys(name, paths) if path == name.replace("/", ".") else [path] for name, path in paths.items()}
    return {
        "tree_metadata": {
            str(tuple(keys[name])): {
                "key_metadata": [{"key": key, "key_type": 2} for key in keys[name]],
                "value_metadata": {
                    # For a jax.Array Orbax would require its devices.
                    "value_type": "np.ndarray",
                    "skip_deserialize": False,
                    "write_shape": list(stored_type(type)[1]),
                },
            }
            for name, type in types.items()
        },
        "use_ocdbt": False,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
