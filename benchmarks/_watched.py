"""A process whose output is read line by line, each with the time when it arrived."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

#: Time between two looks at a condition, and from SIGTERM to SIGKILL, in s.
LOOK_S, GRACE_S = 0.02, 20.0

Found = TypeVar("Found")


class Line(NamedTuple):
    """A line of output, and when it arrived, by `time.monotonic`."""

    at_s: float
    text: str


class Watched:
    """The process of `words`, which gets SIGTERM at the end of the `with` block."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            words,
            env={**environment, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._lines: list[Line] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(Line(time.monotonic(), line.rstrip()))

    def wait_for(self, text: str, timeout_s: float, after_s: float = 0.0) -> Line:
        """Wait for a line with this text that arrives after `after_s`, and return the first one."""
        return self.wait_until(lambda: self._find(text, after_s), f"a line with {text!r}", timeout_s)

    def _find(self, text: str, after_s: float) -> Line | None:
        return next((line for line in [*self._lines] if line.at_s > after_s and text in line.text), None)

    def wait_until(self, condition: Callable[[], Found | None], what: str, timeout_s: float) -> Found:
        """Wait until the condition returns a value, and return it.

        Raises SystemExit, with all output, when the process ends before, or the time is over.
        """
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("\n".join([*(line.text for line in self._lines), f"{what} did not come"]))
            time.sleep(LOOK_S)
        return found
