"""Shared by every test run: the Hypothesis profile, the --update-golden option, the platform, a small heap."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.effort import (
    DEFAULT_EXAMPLES,
    FOR_ALL,
    FOR_ONCE,
    HALF_VARIABLE,
    examples,
    factor,
    outside_the_half,
    quick_compilation,
)

#: Folders of connections, decisions and processes, which compile little.
_OF_CLUSTERS = (
    *(f"tests/distributed/{folder}/" for folder in ("asynchronous", "cluster", "coordinator", "observe", "process")),
    *(f"tests/distributed/{folder}/" for folder in ("snapshots", "synchronous", "task", "transport", "wire")),
)
#: Folders whose tests are all as those marked `once`.
ONCE = ("tests/lowering/files/", "tests/simulation/", "tests/distributed/launching/", *_OF_CLUSTERS)
#: Folders of whose tests that run on one Python CI runs them on the second, so that both runs take about as long.
#: Of the tests of launched processes, Ray's stay on the first, which alone has Ray.
ON_SECOND = (
    "tests/benchmarks/test_tiny.py",
    "tests/dflow/tables/",
    "tests/examples/test_examples.py",
    *(
        f"tests/distributed/launching/test_{subject}.py"
        for subject in ("launcher", "on_ssh", "resumed_launch", "sidecars")
    ),
    *_OF_CLUSTERS,
)

#: Each Python of CI has each test here, with half of its cases: a newer JAX breaks tests of traces, calls and random
#: programs first. Elsewhere it has half of the tests of each file.
HALF_OF_A_TEST = (
    *(f"tests/tracing/{folder}/" for folder in ("ir", "jaxprs", "primitives", "state", "syntax")),
    *("tests/lowering/programs/", "tests/lowering/test_", "tests/reference/", "tests/tracing/test_"),
    *(f"tests/dflow/{name}" for name in ("calls/", "jit_surface/", "test_programs.py")),
)

# Read by JAX when a test first imports it: tests compare numbers bit by bit, so they run on CI's platform.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Read by XLA at its first compilation. `make nightly`, or `XLA_FLAGS=` before a command, compiles as users do.
os.environ.setdefault("XLA_FLAGS", quick_compilation())

# Programs compiled by one process of a run are read by the others and by later files: most programs of tests are small
# and common to many. Each run has a new folder, so that no earlier result is used.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Without its own threads, NumPy takes a quarter less time to import.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Processes that tests start import `sitecustomize.py` from there. A process of tests may inherit the entry already.
QUICK_PYTHON = str(Path(__file__).parent / "quick_python")
os.environ["PYTHONPATH"] = os.pathsep.join(
    dict.fromkeys([QUICK_PYTHON, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
)

# Garbage collection takes a tenth of the time of tests that trace this much, so it runs seldom.
gc.set_threshold(50_000, 20, 20)

pytest.register_assert_rewrite("tests.golden")

hypothesis.settings.register_profile("dev", deadline=None, max_examples=examples(DEFAULT_EXAMPLES))
hypothesis.settings.register_profile(
    "ci", deadline=None, max_examples=examples(DEFAULT_EXAMPLES), derandomize=True, print_blob=True
)
# For `make nightly`: a failure prints the command that repeats it, and stays in the database of examples until it
# passes.
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=examples(DEFAULT_EXAMPLES), print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(scope="session", autouse=True)
def _files_of_runs_go_to_the_tests_own_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["DFLOW_RUN_DIR"] = str(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module", autouse=True)
def _nothing_compiled_outlives_its_file() -> Iterator[None]:
    """Clear JAX's caches: each garbage collection walks all of their objects, which takes seconds after some files."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
        gc.collect()
    # The rest stays to the end. (The count of frozen objects cannot be tested: Python 3.12 never gives 0.)
    gc.freeze()


@pytest.fixture(scope="module")
def all_holders() -> None:
    """Let the collector see all objects again, for a file that tests reports of the holders of a kept value."""
    gc.unfreeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --update-golden."""
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the expected graphs of *.graphs with the actual ones"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Give the run a folder for compiled programs; tell tests/golden.py whether to rewrite."""
    from tests.golden import UpdateMode

    _share_what_is_compiled(config)
    UpdateMode.on = config.getoption("--update-golden")
    if UpdateMode.on and (config.getoption("numprocesses", None) or hasattr(config, "workerinput")):
        raise pytest.UsageError("--update-golden rewrites files case by case: run it without -n, as `make golden` does")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked `long` unless `-m` names them, and in a run with few random cases those of the other Python."""
    is_without_long = "long" not in config.getoption("markexpr")
    is_first, is_short = factor() >= FOR_ONCE, factor() < FOR_ALL
    is_divided = HALF_VARIABLE in os.environ
    outside = outside_the_half({item.nodeid: _group(item.nodeid) for item in items if not _runs_once(item)})
    for item in items:
        if _runs_once(item):
            is_elsewhere = is_short and (is_divided and item.nodeid.startswith(ON_SECOND)) == is_first
        else:
            is_elsewhere = item.nodeid in outside
        if is_elsewhere:
            item.add_marker(pytest.mark.skip(reason="a run with all cases does it"))
        if is_without_long and item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="`make nightly` does it, and `pytest -m long`"))


def _group(nodeid: str) -> str:
    return nodeid.partition("[" if nodeid.startswith(HALF_OF_A_TEST) else "::")[0]


def _runs_once(item: pytest.Item) -> bool:
    return item.get_closest_marker("once") is not None or item.nodeid.startswith(ONCE)


def pytest_collection_finish() -> None:
    """Freeze the objects that imports of the test files made, so that garbage collection neither walks them nor
    reports them.
    """
    gc.collect()
    gc.freeze()


def _share_what_is_compiled(config: pytest.Config) -> None:
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="dflow-tests-compiled-", ignore_cleanup_errors=True)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder.name
        config.add_cleanup(folder.cleanup)
