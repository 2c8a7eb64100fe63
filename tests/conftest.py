"""What every test run shares: the Hypothesis profile, the --update-golden option, the platform, a small heap."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import hypothesis
import pytest

from tests.effort import DEFAULT_EXAMPLES, examples

# Read by JAX when a test first imports it: tests compare numbers bit by bit, so they run where CI runs them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Seldom, for they take a tenth of the time of tests that trace as much as these.
gc.set_threshold(50_000, 20, 20)

pytest.register_assert_rewrite("tests.golden")

hypothesis.settings.register_profile("dev", deadline=None, max_examples=examples(DEFAULT_EXAMPLES))
hypothesis.settings.register_profile(
    "ci", deadline=None, max_examples=examples(DEFAULT_EXAMPLES), derandomize=True, print_blob=True
)
# Of `make nightly`: a failure prints how to run it again, and stays in the database of examples until it passes.
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=examples(DEFAULT_EXAMPLES), print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(scope="session", autouse=True)
def _files_of_runs_go_to_the_tests_own_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["DFLOW_RUN_DIR"] = str(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module", autouse=True)
def _nothing_compiled_outlives_its_file() -> Iterator[None]:
    """Let go of JAX's caches: each collection of garbage walks all that they hold, seconds of it after some files."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
        gc.collect()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --update-golden."""
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the expected graphs of *.graphs with the actual ones"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Tell tests/golden.py whether to rewrite."""
    from tests.golden import UpdateMode

    UpdateMode.on = config.getoption("--update-golden")
    if UpdateMode.on and (config.getoption("numprocesses", None) or hasattr(config, "workerinput")):
        raise pytest.UsageError("--update-golden rewrites files case by case: run it without -n, as `make golden` does")
