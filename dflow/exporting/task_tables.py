"""Tables of an export on the tasks of a cluster, each of which reads its own part from the files of the export."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path

import jax.numpy as jnp

from dflow.distributed.cluster.cluster import Cluster
from dflow.exporting.export_format import MANIFEST, VARIABLES, damaged
from dflow.exporting.export_manifest import ExportManifest
from dflow.lowering.state_backend import indices_of
from dflow.tracing.errors import CheckpointError, ExportError, ParseError
from dflow.tracing.ir.types import ArrayType, parse_type
from dflow.tracing.rows.slices import ArrayPart
from dflow.tracing.state.resources import Variable
from dflow.training.named_arrays import NamedArray
from dflow.training.restoring import restore_named


def tables_of(manifest: ExportManifest) -> set[str]:
    """Return the names of the variables that all functions which use them only look rows up in."""
    found: set[str] = set()
    others: set[str] = set()
    for signature in manifest.signatures.values():
        tables = {*signature.lookups.tables} if signature.lookups and not signature.vjp_order else set()
        found |= tables
        others |= {*signature.variables} - tables
    found -= others
    for divided in manifest.parts().values():
        if not found.issuperset(divided):  # the files have the parts of an array together
            found -= {*divided}
    return found


def at_tasks(
    cluster: Cluster, path: Path, manifest: ExportManifest, names: Collection[str], prefix: str
) -> dict[str, Variable]:
    """Return these variables of an export at `path`, spread over the parameter tasks, with the values of its files.

    Raises ExportError if a task cannot read the files, and TaskLost.
    """
    with cluster.parameter_servers():
        made = {}
        for name in names:
            entry, type = manifest.variables[name], _array_type(path, manifest.variables[name].type)
            zeros = partial(jnp.zeros, type.shape, type.dtype)
            made[name] = Variable(zeros, name=prefix + name, trainable=entry.trainable)
    arrays = {name: NamedArray((held,), name) for name, held in made.items()}
    for array, divided in manifest.parts().items():
        if made.keys() >= divided.keys():
            for name, part in divided.items():
                made[name].part = ArrayPart(tuple(part.shape), part.indices)
                del arrays[name]
            held = sorted((made[name] for name in divided), key=lambda one: indices_of(one).start)
            arrays[array] = NamedArray(tuple(held), array)
    try:
        restore_named(path / VARIABLES, arrays, ["unexpected"])
    except CheckpointError as error:
        raise ExportError(
            f"{path} could not be read by the tasks that are to hold its tables: {error}",
            "give a folder that all tasks see under this path",
        ) from error
    return made


def _array_type(path: Path, text: str) -> ArrayType:
    try:
        type = parse_type(text)
    except ParseError as error:
        raise damaged(path / MANIFEST, str(error)) from None
    if not isinstance(type, ArrayType):
        raise damaged(path / MANIFEST, f"a variable is {text}, which is no array")
    return type
