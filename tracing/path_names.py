"""Names of the leaves of pytrees, made from their paths, such as `layers/0/w`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def path_name(path: tuple[Any, ...]) -> str:
    """The name of a leaf from its pytree path: keys, fields and indices joined by `/`."""
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def leaf_names(parameter: str, value: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    """A name for each leaf of one parameter's value."""
    flat, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=is_leaf)
    return [f"{parameter}/{path_name(path)}" if path else parameter for path, _ in flat]
