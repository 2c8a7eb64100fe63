"""How many gradients end a round, when so many workers are backups."""

from __future__ import annotations

from dflow.tracing.errors import StrategyError
from dflow.tracing.source import at, caller


def without_backups(workers: int, backup_workers: int) -> int:
    """Of `workers`, how many are waited for. Raises StrategyError when it is none of them, or more than there are."""
    if not 0 <= backup_workers < workers:
        raise StrategyError(
            f"backup_workers={backup_workers} of {workers} worker{'s' if workers != 1 else ''} leaves none whose "
            f"gradient is waited for{at(caller())}\n  give a number from 0 to {workers - 1}"
        )
    return workers - backup_workers
