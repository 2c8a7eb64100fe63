"""The number of gradients that end a synchronous step, given the number of backup workers."""

from __future__ import annotations

from dflow.tracing.errors import StrategyError


def without_backups(workers: int, backup_workers: int) -> int:
    """Return how many of `workers` are waited for. Raises StrategyError unless this is from 1 to `workers`."""
    if not 0 <= backup_workers < workers:
        raise StrategyError(
            f"backup_workers={backup_workers} of {workers} worker{'s' if workers != 1 else ''} leaves none whose "
            f"gradient is waited for",
            f"give a number from 0 to {workers - 1}",
        )
    return workers - backup_workers
