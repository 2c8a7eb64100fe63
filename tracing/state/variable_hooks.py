"""What a kind of variable adds to the gradients, updates and checkpoints of its variables.

So derivatives, optimizers and checkpoints know no kind: they call `variable.hooks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from dflow.tracing.rows.id_rows import IdRows
from dflow.tracing.rows.lookups import RowsFound


class VariableHooks:
    """The hooks of an ordinary variable, which add nothing; a kind of variable overrides the hooks that it needs.

    `found` is what lookups of the variable found, in the form that the kind gives it.
    """

    #: The variables that a checkpoint of this one has too, by the end of their names.
    saved: Mapping[str, Any] = MappingProxyType({})
    #: How ids have their rows in the variable; None for one whose rows have fixed numbers.
    id_rows: IdRows | None = None

    def restored(self) -> None:
        """Note that the variable, and those of `saved`, have values of a checkpoint."""

    def counts(self) -> Any:
        """Return the kind's counters of updates, and log a warning if they need one; not in traced code."""

    def gradient_rows(self, found: RowsFound) -> RowsFound:
        """Return the rows of a gradient of the variable as an update takes them."""
        return found

    def note_slots(self, slots: Any) -> None:
        """Note the `OptimizerSlots` of an optimizer of the variable."""

    def refuse_nothing_found(self) -> None:
        """Raise GraphTypeError if an update needs to know what the lookups found."""

    def begin_update(self, update: Any, found: Sequence[Any] | None) -> Any:
        """Begin an update of the variable; return a mask of the rows that it may change, bool[rows], or None for all.

        found  what the lookups found that the gradients are of; None for the mean of a synchronous step
        """

    def admit(self, found: Sequence[Any], update: Any = None) -> None:
        """Note the use of what was found, after the update of the variable; without it if a strategy does that."""


#: The hooks of each ordinary variable.
NO_HOOKS = VariableHooks()
