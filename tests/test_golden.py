from __future__ import annotations

from pathlib import Path

import pytest

from tests import golden

TEXT = """Why these cases.

=== first
a
  b
---
c

=== second, not yet filled in
d
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "x.graphs"
    path.write_text(TEXT)
    return path


def test_reads_names_inputs_and_expected_graphs(path: Path) -> None:
    first, second = golden.read_golden(path)
    assert (first.name, first.input, first.expected) == ("first", "a\n  b", "c")
    assert (second.name, second.input, second.expected) == ("second, not yet filled in", "d", "")
    assert [param.id for param in golden.golden_cases(path)] == [first.name, second.name]


def test_a_difference_names_the_case_and_the_way_to_accept_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden.UpdateMode, "on", False)
    with pytest.raises(pytest.fail.Exception, match=r"x\.graphs: case 'first' differs.*make golden(.|\n)*-c\n\+other"):
        golden.check(golden.read_golden(path)[0], "other")
    assert path.read_text() == TEXT


def test_update_rewrites_only_what_differs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden.UpdateMode, "on", True)
    first, second = golden.read_golden(path)
    golden.check(first, "c\n")
    assert path.read_text() == TEXT
    golden.check(first, "new\n")
    golden.check(second, "e")
    assert path.read_text() == TEXT.replace("\nc\n", "\nnew\n").replace("\nd\n", "\nd\n---\ne\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing here\n", "no case; a case begins with"),
        ("=== a\n---\n=== a\n---\n", r"more than one case is called \['a'\]"),
        ("=== a\n---\n---\n", "case 'a' has 2 lines '---', and should have one"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.graphs"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        golden.read_golden(path)
