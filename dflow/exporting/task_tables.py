"""Tables of an export on the tasks of a cluster. Each task reads its own part from the files of the export."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from dflow.distributed.cluster.cluster import Cluster
from dflow.exporting.export_format import MANIFEST, VARIABLES, damaged
from dflow.exporting.export_manifest import ExportManifest
from dflow.lowering.files.array_files import read_arrays
from dflow.lowering.values.stored_value import StoredValue
from dflow.tracing.errors import CheckpointError, DeadlineExceeded, DflowError, ExportError, ParseError, VariableError
from dflow.tracing.ir.types import ArrayType, parse_type
from dflow.tracing.rows.slices import ArrayPart
from dflow.tracing.state.resources import Variable


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


def no_tables(path: Path) -> ExportError:
    """Return the error for an export without tables that tasks could hold."""
    return ExportError(
        f"{path}: expected a table for the tasks to hold: a variable of two dimensions or more that functions only "
        f"look rows up in, got none",
        "leave tables out; or export again, and look for a warning that names the reason",
    )


def beside_tables(path: Path, manifest: ExportManifest) -> set[str]:
    """Return the variables of vocabularies that no function needs if a training job finds the rows of ids.

    Raises ExportError for a function whose exported programs do not compute the ids apart from the rows.
    """
    found, others, tables = set[str](), set[str](), tables_of(manifest)
    for name, signature in manifest.signatures.items():
        lookups = signature.lookups
        own = set() if lookups is None else {each for how in lookups.id_rows.values() for each in how.variables}
        if lookups is not None and own and (lookups.asked is None or lookups.id_rows.keys() - tables):
            raise ExportError(
                f"{path}: expected lookups of ids whose rows a training job can find, got {name}, which looks them up "
                f"in a loop, or whose table or vocabulary is used otherwise too",
                "look the ids up outside of loops, and export again",
            )
        found |= own
        others |= {*signature.variables} - own
    return found - others


def at_tasks(
    cluster: Cluster, path: Path, manifest: ExportManifest, names: Collection[str], prefix: str
) -> dict[str, Variable]:
    """Return these variables of an export at `path`, spread over the parameter tasks, with the values of its files.

    Variables that an earlier call has made with the same prefix, of the same files, are shared with it. Raises
    ExportError if a task cannot read the files, and TaskLost; then it leaves no variable behind.
    """
    made: dict[str, Variable] = {}
    try:
        files = read_arrays(path / VARIABLES)
        with cluster.parameter_servers():
            for name in names:
                entry = manifest.variables[name]
                part, type = entry.part, array_type(path, entry.type)
                array, indices = (name, None) if part is None else (part.array, part.indices)
                value = StoredValue(path.resolve() / VARIABLES, files.id, array, indices, type)
                # The files' id tells the variables from those of another export that was at this path.
                made[name] = Variable(value, name=f"{prefix}{files.id[:8]}/{name}", trainable=entry.trainable)
                if part is not None:
                    made[name].part = ArrayPart(tuple(part.shape), part.indices)
    except (CheckpointError, VariableError) as error:
        forget(made.values(), "is gone: the export could not be loaded")
        raise ExportError(f"the tables of {path} could not be loaded by tasks: {error}") from error
    except BaseException:
        forget(made.values(), "is gone: the export could not be loaded")
        raise
    return made


def forget(variables: Iterable[Variable], reason: str) -> None:
    """Free the values of variables that were made. A task that does not answer is asked once."""
    silent: set[str | None] = set()
    for variable in variables:
        # A variable without a device is not made, and its use would make it.
        if "device" not in vars(variable) or variable.device in silent:
            continue
        try:
            variable.forget(reason)
        except DeadlineExceeded:
            silent.add(variable.device)
        except DflowError:
            continue


def array_type(path: Path, text: str) -> ArrayType:
    """Return the type of a variable by its text in a manifest. Raises ExportError for that of no array."""
    try:
        type = parse_type(text)
    except ParseError as error:
        raise damaged(path / MANIFEST, str(error)) from None
    if not isinstance(type, ArrayType):
        raise damaged(path / MANIFEST, f"a variable is {text}, which is no array")
    return type
