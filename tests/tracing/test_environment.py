"""The declared environment variables: all that the package reads, and the page that is made of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dflow.tracing.environment import VARIABLES, misspelt, read
from tests.golden import UpdateMode

ROOT = Path(__file__).parents[2]
LAYERS = ("tracing", "lowering", "distributed", "dflow")
PAGE = ROOT / "docs" / "environment.md"
INTRODUCTION = """\
# Environment variables

Made by `make golden` from `tracing/environment.py`. A variable that is empty counts as not set. A name that is spelt
almost like one of these is warned of when dflow is imported. [clusters.md](clusters.md) and [security.md](security.md)
say which variables a cluster needs.

| variable | legal values | if it is not set | meaning |
|---|---|---|---|
"""


def sources() -> dict[Path, str]:
    files = [file for layer in LAYERS for file in (ROOT / layer).rglob("*.py")]
    return {file: file.read_text() for file in files if file.name != "environment.py"}


def test_the_variables_that_the_package_names_are_those_that_are_declared() -> None:
    named = {name for text in sources().values() for name in re.findall(r"\bDFLOW_[A-Z_]*[A-Z]\b", text)}
    assert named == {*VARIABLES}


def test_no_variable_is_read_from_the_environment_but_by_its_declaration() -> None:
    by_hand = re.compile(r"""environ(?:ment)?(?:\.get\(|\[)["']DFLOW_""")
    assert [file for file, text in sources().items() if by_hand.search(text)] == []


def test_the_page_lists_them() -> None:
    rows = (f"| `{name}` | {' | '.join(texts)} |\n" for name, texts in VARIABLES.items())
    expected = INTRODUCTION + "".join(rows)
    if UpdateMode.on:
        PAGE.write_text(expected)
    assert PAGE.read_text() == expected, "run `make golden`"


def test_a_variable_that_is_not_set_is_empty_and_one_that_is_not_declared_cannot_be_read() -> None:
    assert read("DFLOW_JOB", {}) == ""
    assert read("DFLOW_JOB", {"DFLOW_JOB": "ps"}) == "ps"
    with pytest.raises(KeyError):
        read("DFLOW_JOBS", {"DFLOW_JOBS": "ps"})


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("DFLOW_COORDINATER", "DFLOW_COORDINATOR"),
        ("DFLOW_WORKER", "DFLOW_WORKERS"),
        ("DFLOW_JOBS", "DFLOW_JOB"),
        ("DFLOW_TLS_CERTS", "DFLOW_TLS_CERT"),
        ("DFLOW_METRIC_PORT", "DFLOW_METRICS_PORT"),
    ],
)
def test_a_misspelt_name_has_a_near_one(name: str, near: str) -> None:
    assert misspelt({name: "x"}) == {name: near}


@pytest.mark.parametrize(
    "name",
    [
        *VARIABLES,
        *("DFLOW_TEST_EFFORT", "DFLOW_BENCH_TINY", "SLURM_JOB_ID", "dflow_job", "DFLOW_HOME"),
        *("DFLOW_SERVICE_HOST", "DFLOW_SERVICE_PORT", "DFLOW_SERVICE_PORT_GRPC", "DFLOW_PORT_7711_TCP"),
    ],
)
def test_no_other_name_is_warned_of(name: str) -> None:
    assert misspelt({name: "x"}) == {}
