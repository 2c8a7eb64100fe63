"""An event file of TensorBoard: records with a time, a step and a value, added one by one.

tensorboardX gives the record format and the messages. Its own queue and thread are not used: an error of the disk ends
that thread without a word, and the program then waits for it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

#: Distinguishes the files of this process.
_numbers = itertools.count()


class EventFile:
    """A new event file in a folder, which is made if it is missing. Every method may raise OSError.

    goes_on  whether this file goes on with a run that has called `discard` for an earlier one
    """

    def __init__(self, folder: Path, goes_on: bool) -> None:
        from tensorboardX import summary
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.record_writer import RecordWriter

        self._event, self._summary = Event, summary
        folder.mkdir(parents=True, exist_ok=True)
        self._has_earlier = any(folder.glob("events.out.tfevents.*"))
        #: Whether the records are of the run whose first step the next `discard` has.
        self._is_of_next_run = not goes_on
        # Readers take the files of a folder in the order of their names.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers):06d}"
        self._path = folder / name
        self._records = RecordWriter(str(self._path))
        #: Wait until the disk has what is written; and end.
        self.sync, self.close = self._records.flush, self._records.close
        try:
            self._records.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
            if not self._has_earlier:
                self._start(0)  # some readers discard nothing at the first start of a folder
            self.sync()
        except OSError:
            with contextlib.suppress(OSError):
                self.close()
            raise

    def discard(self, first: int) -> None:
        """Have readers discard what earlier runs have of step `first` and later ones, in this file too."""
        is_of_this_run, self._is_of_next_run = self._is_of_next_run, False
        if is_of_this_run and not self._has_earlier:
            return
        self.sync()
        own = self._path.stat().st_size if is_of_this_run else 0
        self._start(first)
        for event in self._events(own):
            if event.step >= first and not event.file_version:  # it is discarded too
                self._records.write(event.SerializeToString())

    def scalars(self, step: int, time_s: float, numbers: Mapping[str, float]) -> None:
        """Add a point to the curve of each name, as a 32-bit float."""
        values = [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._add(time_s, step=step, summary=self._summary.Summary(value=values))

    def histogram(self, step: int, time_s: float, name: str, values: Any, buckets: int) -> None:
        """Add a histogram of finite numbers."""
        self._add(time_s, step=step, summary=self._summary.histogram(name, values, buckets))

    def text(self, step: int, time_s: float, name: str, text: str) -> None:
        self._add(time_s, step=step, summary=self._summary.text(name, text))

    def image(self, step: int, time_s: float, name: str, image: Any) -> None:
        """Add an image of shape [height, width] or [height, width, channels]."""
        image = np.asarray(image)
        self._add(time_s, step=step, summary=self._summary.image(name, image, dataformats="HWC"[: image.ndim]))

    def graph(self, step: int, time_s: float, graph: bytes) -> None:
        """Add a serialized GraphDef, which has no step."""
        self._add(time_s, graph_def=graph)

    def session(self, hyperparameters: Mapping[str, Any]) -> None:
        """Add the hyperparameters, and that the run has begun."""
        from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

        data = HParamsPluginData()
        data.session_start_info.start_time_secs = time.time()
        for name, value in hyperparameters.items():
            kind = "string" if isinstance(value, str) else "bool" if isinstance(value, bool) else "number"
            setattr(data.session_start_info.hparams[name], f"{kind}_value", value)
        self._session("_hparams_/session_start_info", data)

    def session_end(self, failed: bool) -> None:
        """Add that the run has ended, and how."""
        from tensorboardX.proto.api_pb2 import Status
        from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

        data = HParamsPluginData()
        data.session_end_info.status = Status.Value("STATUS_FAILURE" if failed else "STATUS_SUCCESS")
        data.session_end_info.end_time_secs = time.time()
        self._session("_hparams_/session_end_info", data)

    def _start(self, first: int) -> None:
        event = self._event(wall_time=time.time(), step=first)
        event.session_log.status = event.session_log.START
        self._records.write(event.SerializeToString())

    def _events(self, size: int) -> Iterator[Any]:
        """Yield the events in the first `size` bytes of the file. A record is a length, its CRC, data and their CRC."""
        with self._path.open("rb") as file:
            while file.tell() < size:
                (length,) = struct.unpack("<Q4x", file.read(12))
                yield self._event.FromString(file.read(length))
                file.seek(4, os.SEEK_CUR)

    def _session(self, tag: str, data: Any) -> None:
        summary = self._summary.Summary()
        value = summary.value.add(tag=tag)
        value.metadata.plugin_data.plugin_name = "hparams"
        value.metadata.plugin_data.content = data.SerializeToString()
        self._add(time.time(), summary=summary)

    def _add(self, time_s: float, **what: Any) -> None:
        self._records.write(self._event(wall_time=time_s, **what).SerializeToString())
