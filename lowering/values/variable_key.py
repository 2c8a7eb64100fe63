"""Keys of variables in the table of their process: two variables of one name have two keys there."""

from __future__ import annotations


def key_of(name: str, serial: int) -> str:
    """Return the key of a variable of this process."""
    return f"{name}#{serial}"


def shown(key: str) -> str:
    """Return the name of the variable with a key."""
    return key.rpartition("#")[0] or key
