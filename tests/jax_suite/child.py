"""The process of one test file: replace `jax.jit`, run pytest, and record the end of every test.

    python child.py WAY ROOT RECORDS DONE [pytest arguments]

WAY is `jax` or `dflow`. RECORDS gets a line of JSON at each beginning and each end, so the results of a process that
dies remain. Tests named in the file DONE are skipped: a process that replaces a dead one receives them.

The file is run by its path, not as a module of `tests`, because the suites have packages of that name. JAX is imported
before the suite's own set-up in both ways, so its environment variables must be set outside.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

#: Of two phases the worse outcome counts; a tear-down that passes follows a skip in the set-up.
_WORSE = ("passed", "xpassed", "xfailed", "skipped", "failed")


class Recorder:
    """A pytest plugin that records each test's beginning, outcome and last line of error."""

    def __init__(self, root: Path, records: Path, done: Path) -> None:
        self._root, self._done = root, set(done.read_text().splitlines())
        self._records = records.open("a", buffering=1)
        self._outcomes: list[tuple[str, str]] = []
        self._traces = 0

    def traced(self) -> None:
        self._traces += 1

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        left = [item for item in items if self._name(item.nodeid, config) not in self._done]
        config.hook.pytest_deselected(items=[item for item in items if item not in left])
        items[:] = left

    def pytest_configure(self, config: pytest.Config) -> None:
        """dflow's warnings are not differences, even where a suite makes warnings errors."""
        self._config = config
        if "dflow" in sys.modules:
            for warning in ("RetraceWarning", "LeakedTracerWarning"):
                config.addinivalue_line("filterwarnings", f"ignore::dflow.{warning}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(file=last_line(report.longreprtext), outcome="failed")

    def pytest_internalerror(self, excrepr: Any) -> None:
        """Record a fault of pytest or of a plugin, after which no test runs."""
        self._write(file=last_line(str(excrepr)), outcome="failed")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Record the beginning, in case the test ends the process."""
        self._outcomes, self._traces = [], 0
        self._write(begun=self._name(nodeid, self._config))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome: str = report.outcome
        if hasattr(report, "wasxfail"):
            outcome = "xpassed" if report.passed else "xfailed"
        skip = report.longrepr[-1] if isinstance(report.longrepr, tuple) else None
        self._outcomes.append((outcome, "" if report.passed else skip or last_line(report.longreprtext)))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        outcome, error = max(self._outcomes, key=lambda one: _WORSE.index(one[0]), default=("failed", "no outcome"))
        self._write(ended=self._name(nodeid, self._config), outcome=outcome, error=error, traces=self._traces)

    def _name(self, nodeid: str, config: pytest.Config) -> str:
        file, *inner = nodeid.split("::")
        path = (config.rootpath / file).resolve()
        name = "::".join([path.relative_to(self._root).as_posix() if path.is_relative_to(self._root) else file, *inner])
        return re.sub(r"0x[0-9a-f]{6,}", "0x", name.replace("\n", "\\n"))

    def _write(self, **fields: Any) -> None:
        self._records.write(json.dumps(fields) + "\n")


def last_line(text: str) -> str:
    """Return the line of a traceback that describes the error: pytest marks its lines with an E."""
    final = re.split(r"During handling of the above exception|The above exception was the direct cause", text)[-1]
    lines = [line for line in final.splitlines() if line.strip()]
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    raised = r"[\w.]*(Error|Exception|Warning|Interrupt|Exit|Failed)\b|assert "
    said = next((line for line in errors if re.match(raised, line)), "")
    return (said or (errors or lines or [""])[-1].strip())[:300]


def replace_jit(traced: Callable[[], None]) -> None:
    """Replace `jax.jit` by `dflow.jit`, before any program is imported; call `traced` at each trace.

    JAX's own modules keep theirs: their jitted functions are inside JAX (jax.numpy, checks of its test helpers), and no
    program that uses dflow replaces them.
    """
    import dflow
    from dflow.calls.trace_log import TraceLog

    add = TraceLog.add

    def counted(self: TraceLog, *args: Any, **kwargs: Any) -> None:
        traced()
        add(self, *args, **kwargs)

    TraceLog.add = counted  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module: Any = importlib.import_module("jax.experimental.pjit")
        if hasattr(module, "pjit"):
            names = list(inspect.signature(module.pjit).parameters)[1:]
            module.pjit = lambda fun, *given, **options: dflow.jit(
                fun, **dict(zip(names, given, strict=False)), **options
            )
    jax.jit = dflow.jit  # type: ignore[assignment]


def main() -> None:
    way, root, records, done, *arguments = sys.argv[1:]
    # The folder of this script must not be searched for imports.
    del sys.path[0]
    recorder = Recorder(Path(root), Path(records), Path(done))
    if way == "dflow":
        replace_jit(recorder.traced)
    raise SystemExit(pytest.main(arguments, plugins=[recorder]))


if __name__ == "__main__":
    main()
