"""Folders of arrays to read in tests."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dflow.lowering.files.array_files import fill_folder
from dflow.lowering.files.array_manifest import MANIFEST
from dflow.lowering.files.atomic_directory import whole_folder


def write_arrays(
    path: str | os.PathLike[str],
    arrays: Mapping[str, Any],
    metadata: Mapping[str, Any] | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Write a folder of arrays atomically, as `dflow.save` does."""
    with whole_folder(path, marker=MANIFEST, overwrite=overwrite) as folder:
        fill_folder(folder, arrays, metadata)
