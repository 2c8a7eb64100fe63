"""The disks of the ps tasks: temporary files, which take simulated time and fail as a schedule says.

The real code writes and reads the parts of snapshots. This file delays each write and read, and refuses or damages
parts where the faults of the schedule say so. A process that ends while it writes leaves its unfinished part behind.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from dflow.distributed.snapshots import task_snapshots
from dflow.lowering.files.atomic_directory import whole_folder
from dflow.lowering.files.changed_rows import ChangedArrays, read_changed_arrays
from tests.simulation.blocking_program import CURRENT, ProcessEnded
from tests.simulation.events import EventQueue
from tests.simulation.faults import Faults, Outage
from tests.simulation.network import Network
from tests.simulation.simulated_threads import SimulatedLock

#: Longest time of a write or a read of a part, on a host that is not slow.
WORK_S = 0.6
#: Memory in place of a disk, where the system has it: parts are flushed.
_MEMORY = "/dev/shm"


class SimulatedDisks:
    """The folders of all ps tasks in one schedule.

    folder   each task's parts are in a folder of its name in this one
    damaged  the host and the number of each part that was damaged
    """

    def __init__(self, events: EventQueue, network: Network, faults: Faults, seed: int) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=_MEMORY if os.path.isdir(_MEMORY) else None))
        self.damaged: set[tuple[str, int]] = set()
        self._events, self._network, self._faults = events, network, faults
        self._random = random.Random(f"disks {seed}")

    def close(self) -> None:
        """Remove all files."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Have `TaskSnapshots` write to these disks, and its locks wait in simulated time."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(task_snapshots, "whole_folder", self._whole_folder)
            patch.setattr(task_snapshots, "read_changed_arrays", self._read_changed_arrays)
            patch.setattr(task_snapshots, "threading", _Locks)
            yield

    def part(self, host: str, number: int) -> Path:
        """Return the path of a host's part of a snapshot."""
        return self.folder / host.replace(":", "-") / str(number)

    @contextmanager
    def _whole_folder(self, place: Path, *, marker: str, overwrite: bool = False) -> Iterator[Path]:
        host = _host(place)
        with ExitStack() as after, whole_folder(place, marker=marker, overwrite=overwrite) as part:
            yield part
            try:
                self._work(host)
            except ProcessEnded:
                # `whole_folder` removes it on the way out, which a process that is killed does not.
                left = shutil.copytree(part, self.folder / f"{host} left")
                after.callback(os.rename, left, part)
                after.callback(part.with_suffix(".lock").touch)
                raise
            if self._has(self._faults.full, host):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(part))
        self._damage(host, place)

    def _read_changed_arrays(self, place: Path) -> ChangedArrays:
        self._work(_host(place))
        return read_changed_arrays(place)

    def _work(self, host: str) -> None:
        CURRENT.get().sleep(self._random.random() * WORK_S * min(self._network.slowness(host), 10.0))

    def _has(self, faults: tuple[Outage, ...], host: str) -> bool:
        return any(fault.hosts == (host,) and fault.at_s <= self._events.now_s < fault.end_s for fault in faults)

    def _damage(self, host: str, place: Path) -> None:
        """Damage a part that is complete, if the schedule has such a fault now."""
        # Other programs' files of a folder are not read here.
        unread = place / "_METADATA", place / "zarr.json"
        files = sorted(file for file in place.rglob("*") if file.is_file() and file not in unread)
        file = self._random.choice(files)
        if self._has(self._faults.gone, host):
            shutil.rmtree(place)
        elif self._has(self._faults.torn, host):
            os.truncate(file, file.stat().st_size // 2)
        elif self._has(self._faults.flip, host):
            content = bytearray(file.read_bytes())
            content[self._random.randrange(len(content))] ^= 1
            file.write_bytes(content)
        else:
            return
        self.damaged.add((host, int(place.name)))


class _Locks:
    """Stands for the module `threading` in `task_snapshots`."""

    Lock = SimulatedLock


def _host(place: Path) -> str:
    return place.parent.name.replace("-", ":")
