"""The variables of one store in a folder of arrays: written at one moment, or all read before any is set."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jax

from dflow.lowering.files.array_files import ArrayFiles, own_copy, write_parts
from dflow.lowering.state.store import Store


def write_variables(store: Store, folder: Path, keys: Mapping[str, str], places: Mapping[str, str]) -> None:
    """Write variables, whose keys are given by the names of their arrays, into a folder from `make_places`.

    The values are those of one moment. Raises VariableError for one that is not held, and as `write_parts`.
    """
    values = store.snapshot(keys.values())
    write_parts(folder, {name: values[key] for name, key in keys.items()}, places)


def read_variables(store: Store, files: ArrayFiles, keys: Mapping[str, str]) -> dict[str, jax.Array]:
    """The arrays for variables, by key, each as its variable is sharded now and in memory of its own.

    Raises CheckpointError, which names the array, for one that is missing or damaged.
    """
    shardings = store.shardings(keys.values())
    read = files.each({name: shardings[key] for name, key in keys.items()})
    # Those without a sharding may be in the memory that was read into.
    return {keys[name]: own_copy(value) if shardings[keys[name]] is None else value for name, value in read}
