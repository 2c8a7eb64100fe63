"""The parameters of a simulated cluster, measured or taken from other sources."""

from __future__ import annotations

from dataclasses import dataclass

MB = 1e6
GB = 1e9


@dataclass(frozen=True)
class Hardware:
    """Links and servers; each task has its own machine.

    `link_bytes_per_s`  bandwidth of a task's network card in each direction
    `hop_s`             latency from one task to another, for an empty message
    `hop_spread`        sigma of the log-normal factor of each hop
    `message_s`         processor time of a ps task for each message; it handles one at a time
    `sparse_s`          time of a worker for a sparse lookup, besides its messages
    `incast_s`          time lost when more than `incast_senders` senders meet at one network card
    """

    link_bytes_per_s: float
    hop_s: float
    message_s: float
    hop_spread: float = 0.2
    sparse_s: float = 0.0
    incast_s: float = 0.0
    incast_senders: int = 8


@dataclass(frozen=True)
class Computing:
    """The computing time of a worker's step, without transfers.

    `median_s`       median of steps that are not slow
    `spread`         sigma of the log-normal factor of each step
    `slow_fraction`  fraction of a worker's steps that are slow
    `slow_mean`      mean extra time of a slow step, exponentially distributed, as a fraction of the step's usual time
    `hidden`         fraction of the transfer time that overlaps with computing
    """

    median_s: float
    spread: float = 0.0
    slow_fraction: float = 0.0
    slow_mean: float = 0.0
    hidden: float = 0.0


#: Section 6.2 of the OSDI 2016 paper. Fitted: to scalar (1.8 and 8.8 ms) `hop_s` and `message_s`; to dense with 1
#: worker (147 ms and 1.01 s) `link_bytes_per_s` and `incast_s`; to sparse with 1 worker (5 ms) `sparse_s`.
PAPER = Hardware(link_bytes_per_s=1.043 * GB, hop_s=202e-6, message_s=43e-6, sparse_s=3.1e-3, incast_s=49e-3)

#: Inception-v3 with one K40 GPU per worker, section 6.3 of the paper, over the links of `PAPER`. `spread` is assumed;
#: the rest is fitted to the step time of 50 workers with 0, 3 and 4 backups, and to 2,300 images/s of 200 workers.
PAPER_INCEPTION = Computing(median_s=1.668, spread=0.05, slow_fraction=0.086, slow_mean=0.161, hidden=0.672)
