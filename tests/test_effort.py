"""The factor on random tests: the number that it multiplies, and that every test uses it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest

from tests.effort import DEFAULT_EXAMPLES, HALF_VARIABLE, VARIABLE, examples, factor, outside_the_half

FILES = sorted(Path(__file__).parent.rglob("*.py"))


def test_the_factor_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert (factor(), examples(25)) == (1, 25)
    monkeypatch.setenv(VARIABLE, "50")
    assert examples(25) == 1250
    monkeypatch.setenv(VARIABLE, "1/3")
    assert (examples(25), examples(1)) == (9, 1)


@pytest.mark.parametrize("given", ["", "0", "-1", "1/0", "many", "²"])
def test_what_is_no_factor_is_named(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, given)
    with pytest.raises(ValueError, match=f"{VARIABLE} is '.*', not a positive number"):
        factor()


def test_two_halves_are_all_cases_of_a_group_and_share_none(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [f"a.py::many[{n}]" for n in range(5)]
    groups = {"a.py::single": "a.py::single", **dict.fromkeys(cases, "a.py::many")}
    outside = {}
    for half in ("0", "1"):
        monkeypatch.setenv(HALF_VARIABLE, half)
        outside[half] = outside_the_half(groups)
    assert (outside["0"], outside["1"]) == (set(cases[1::2]), set(cases[0::2]))
    monkeypatch.delenv(HALF_VARIABLE)
    assert outside_the_half(groups) == set()
    monkeypatch.setenv(HALF_VARIABLE, "2")
    with pytest.raises(ValueError, match=f"{HALF_VARIABLE}: expected 0 or 1, got '2'"):
        outside_the_half(groups)


def test_a_test_without_settings_of_its_own_is_multiplied_too() -> None:
    assert hypothesis.settings().max_examples == examples(DEFAULT_EXAMPLES)


def test_every_number_of_examples_goes_by_the_factor() -> None:
    past = [
        f"{file.name}:{keyword.value.lineno}"
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "max_examples" and not ast.unparse(keyword.value).startswith("examples(")
    ]
    assert past == []


def test_processes_of_tests_collect_garbage_seldom() -> None:
    program = "import gc; print(gc.get_threshold()[0])"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "50000\n"
