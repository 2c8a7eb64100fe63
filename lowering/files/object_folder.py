"""Folders in an object store that appear complete or not at all. A store has no rename, and no locks.

    step_100/dflow.json              the manifest; without it there is no checkpoint
    step_100/~0123456789abcdef/...   the files of one attempt to write it, a folder of arrays in itself
    step_100/~0123456789abcdef/.attempt

Each attempt writes under a random name, and is put in place by one conditional write: that of the manifest, with the
paths of the attempt's arrays. `.attempt` has the attempt's state, and is removed once the manifest is written.

The next attempt at a location removes what earlier ones left there. It cannot know whether their processes still run.
Invariant: it removes an attempt only after it has changed the state from "writing" to "removed" by a conditional
write, and an attempt writes its manifest only after it has changed the state from "writing" to "committing" by another.
So an attempt that was removed while it ran fails, and no manifest names arrays that were removed. An attempt whose
process ends in the state "committing" is not removed, since its manifest may still be on the way.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from dflow.lowering.files.array_manifest import MANIFEST, manifest_text, read_manifest
from dflow.lowering.files.object_path import ObjectPath, StoredObject
from dflow.tracing.errors import CheckpointError, CheckpointExists

_NAME = re.compile(r"~[0-9a-f]{16}")
_STATE = ".attempt"
_WRITING, _COMMITTING, _REMOVED, _ASIDE = b"writing", b"committing", b"removed", b"set aside"
#: Number of tries to put an attempt in place when other processes put theirs there meanwhile.
_ATTEMPTS = 10


@contextmanager
def whole_objects(location: ObjectPath, *, overwrite: bool = False) -> Iterator[ObjectPath]:
    """Yield a folder to write arrays and their manifest into, which are at `location` when the block ends.

    If the block fails, they are removed.

    overwrite  whether a checkpoint at `location` may be replaced
    raises     CheckpointExists if something is at `location` that may not be replaced; CheckpointError if the store
               refuses a request, or another process removed the attempt
    """
    # The manifest first: this request tells soon whether the store answers at all.
    if (location / MANIFEST).read().content is not None and not overwrite:
        raise CheckpointExists(f"{location} exists", "save to another URL, or give overwrite=True")
    names = tidy(location)
    if names and MANIFEST not in names:
        raise CheckpointExists(
            f"{location} exists and holds no {MANIFEST}, so it is not what may be overwritten",
            "save to another URL, or remove it yourself",
        )
    staging = location / f"~{secrets.token_hex(8)}"
    state = (staging / _STATE).write(_WRITING)
    try:
        yield staging
        text = _manifest_at(staging)
        if text is None or (staging / _STATE).replace(state, _COMMITTING) is None:
            raise CheckpointError(
                f"{location} cannot be written: what was written there was removed before it was complete",
                "what was there before is as it was; let one process at a time save there, and save again",
            )
    except BaseException:
        with suppress(CheckpointError):
            _remove_attempt(staging, state)
        raise
    # From here on the manifest may be in place, whatever the store answers, so a failure removes nothing.
    replaced = _put_in_place(staging, text, overwrite)
    staging.remove([_STATE])
    if replaced is not None:
        _remove_replaced(location, replaced)


def remove_whole_objects(location: ObjectPath) -> None:
    """Remove the checkpoint at `location`, if there is one: first its manifest, and then its arrays."""
    manifest = (location / MANIFEST).read().content
    if manifest is not None:
        location.remove([MANIFEST])
        _remove_replaced(location, manifest)


def set_objects_aside(location: ObjectPath) -> ObjectPath:
    """Remove the manifest at `location` alone; return the folder of the files, which no later save or removal deletes.

    That is `location` itself, unchanged, if dflow did not write them there.
    """
    attempts = _attempts(location.names())
    complete = [location / name for name in attempts if (location / name / _STATE).read().content is None]
    for attempt in complete:
        (attempt / _STATE).write(_ASIDE)
    if complete:
        location.remove([MANIFEST])
    return complete[0] if complete else location


def tidy(location: ObjectPath) -> list[str]:
    """Remove the files of attempts that were not put in place, and those of checkpoints that were replaced.

    Return the paths of the other objects at `location`.
    """
    names = location.names()
    states = {attempt: (location / attempt / _STATE).read() for attempt in _attempts(names)}
    # Read after the states: an attempt without a state was put in place before, or is left of one that was replaced.
    named = _named(location) if states else set()
    for attempt, state in states.items():
        is_in_place = named is None or attempt in named
        if state.content == _WRITING:
            _remove_attempt(location / attempt, state)
        elif state.content == _COMMITTING and is_in_place:
            (location / attempt).remove([_STATE])
        elif state.content == _REMOVED or (state.content is None and not is_in_place):
            (location / attempt).remove((location / attempt).names())
    return [name for name in names if name.partition("/")[0] not in states]


def is_attempt(name: str) -> bool:
    """Return whether a name is that of the folder of an attempt."""
    return _NAME.fullmatch(name) is not None


def is_begun(folder: ObjectPath) -> bool:
    """Return whether an attempt still writes into its folder."""
    return (folder / _STATE).read().content == _WRITING


def _named(location: ObjectPath) -> set[str] | None:
    """Return the first parts of the arrays' paths at `location`; None for a damaged manifest, which may name any."""
    try:
        return {path.partition("/")[0] for path in read_manifest(location).paths.values()}
    except FileNotFoundError:
        return set()
    except CheckpointError:
        return None


def _manifest_at(staging: ObjectPath) -> bytes | None:
    """Return the text of the manifest beside `staging` for its arrays; None if that has no manifest."""
    try:
        manifest = read_manifest(staging)
    except FileNotFoundError:
        return None
    paths = {name: f"{staging.name}/{path}" for name, path in manifest.paths.items()}
    return manifest_text(manifest.id, manifest.types, paths, manifest.metadata).encode()


def _put_in_place(staging: ObjectPath, text: bytes, overwrite: bool) -> bytes | None:
    """Write the manifest beside `staging`; return the one that it replaces, if any."""
    location = staging.parent
    failure = CheckpointError(
        f"{location} cannot be written: other processes replaced it {_ATTEMPTS} times meanwhile",
        "let one process at a time save there, and save again",
    )
    for _ in range(_ATTEMPTS):
        seen = (location / MANIFEST).read()
        if seen.content is not None and not overwrite:
            remedy = "save to another URL, or give overwrite=True"
            failure = CheckpointExists(f"{location} was made while this was written", remedy)
            break
        if (location / MANIFEST).replace(seen, text) is not None:
            return seen.content
    staging.remove(staging.names())  # its manifest is certainly not in place
    raise failure


def _remove_attempt(attempt: ObjectPath, state: StoredObject) -> None:
    """Remove an attempt, unless its process puts it in place meanwhile."""
    if (attempt / _STATE).replace(state, _REMOVED) is not None:
        attempt.remove(attempt.names())


def _remove_replaced(location: ObjectPath, manifest: bytes) -> None:
    """Remove what a manifest that is no longer in place named, and files beside it, but no other attempts."""
    names = location.names()
    others = {name for name in _attempts(names) if name.encode() not in manifest}
    location.remove(name for name in names if name != MANIFEST and name.partition("/")[0] not in others)


def _attempts(names: list[str]) -> list[str]:
    """Return the names of the attempts that have files among these."""
    return sorted({first for name in names if is_attempt(first := name.partition("/")[0])})
