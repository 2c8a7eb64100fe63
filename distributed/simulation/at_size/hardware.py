"""What a simulated cluster is made of, as numbers that are measured or taken from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

MB = 1e6
GB = 1e9


@dataclass(frozen=True)
class Hardware:
    """Links and servers, each task on a machine of its own.

    `link_bytes_per_s`  what a task's network card takes in, and gives out, per second
    `hop_s`             from one task to another, for a message of no size
    `hop_spread`        sigma of the log-normal that multiplies each hop
    `message_s`         processor time of a ps task for each message, one after another
    `sparse_s`          time of a worker for what a sparse lookup needs besides messages
    `incast_s`          lost when more senders than `incast_senders` meet at one network card at a time
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
    """How long a worker computes in a step, apart from all transfers.

    `median_s`       of a worker that is not slow in this step
    `spread`         sigma of the log-normal around it
    `slow_fraction`  in this part of its steps a worker is slow
    `slow_mean`      and then takes longer by an exponential of this mean, as a part of `median_s`
    `hidden`         the part of the time of its transfers in which a worker computes
    """

    median_s: float
    spread: float = 0.0
    slow_fraction: float = 0.0
    slow_mean: float = 0.0
    hidden: float = 0.0


#: Section 6.2 of the OSDI 2016 paper. Fitted: to scalar (1.8 and 8.8 ms) `hop_s` and `message_s`; to dense with 1
#: worker (147 ms and 1.01 s) `link_bytes_per_s` and `incast_s`; to sparse with 1 worker (5 ms) `sparse_s`.
PAPER = Hardware(link_bytes_per_s=1.043 * GB, hop_s=202e-6, message_s=43e-6, sparse_s=3.1e-3, incast_s=49e-3)

#: Inception-v3 on a K40 each, sections 6.3 of the paper, over the links of `PAPER`. Fitted to the time of a step of 50
#: workers with 0, 3 and 4 backups and to 2,300 images/s of 200 workers: all but `spread`, which was assumed.
PAPER_INCEPTION = Computing(median_s=1.668, spread=0.05, slow_fraction=0.086, slow_mean=0.161, hidden=0.672)
