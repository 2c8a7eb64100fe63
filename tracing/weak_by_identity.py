"""A set and a mapping that do not keep their members alive, and find them by identity.

The classes of `weakref` compare members by `==`, which for variables compares values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSet
from typing import Any, Generic, TypeVar
from weakref import ref

K = TypeVar("K")
V = TypeVar("V")


class _Identity(ref[K]):
    """A weak reference that is equal to those of the same object."""

    __slots__ = ("number",)
    number: int

    def __new__(cls, member: K, removed: Callable[[Any], Any] | None = None) -> _Identity[K]:
        made = super().__new__(cls, member, removed)
        made.number = id(member)
        return made

    def __hash__(self) -> int:
        return hash(self.number)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        # The number of a dead object may be another's by now.
        member = self()
        return member is not None and isinstance(other, _Identity) and member is other()


class WeakDict(MutableMapping[K, V], Generic[K, V]):
    """As `weakref.WeakKeyDictionary`, by identity."""

    def __init__(self) -> None:
        items: dict[_Identity[K], V] = {}
        self._items = items
        # It refers to the dict alone, so that it does not keep this object alive.
        self._removed: Callable[[Any], Any] = lambda gone: items.pop(gone, None)

    def __getitem__(self, key: K) -> V:
        return self._items[_Identity(key)]

    def __setitem__(self, key: K, value: V) -> None:
        self._items[_Identity(key, self._removed)] = value

    def __delitem__(self, key: K) -> None:
        del self._items[_Identity(key)]

    def __iter__(self) -> Iterator[K]:
        # A copy is made in one step, before the collector can remove an item.
        return (member for weak in [*self._items.copy()] if (member := weak()) is not None)

    def __len__(self) -> int:
        return len(self._items)


class WeakSet(MutableSet[K], Generic[K]):
    """As `weakref.WeakSet`, by identity."""

    def __init__(self, members: Iterable[K] = ()) -> None:
        self._members: WeakDict[K, None] = WeakDict()
        for member in members:
            self.add(member)

    def __contains__(self, member: object) -> bool:
        return member in self._members

    def __iter__(self) -> Iterator[K]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def add(self, member: K) -> None:
        """Add a member."""
        self._members[member] = None

    def discard(self, member: K) -> None:
        """Remove a member if it is there."""
        self._members.pop(member, None)
