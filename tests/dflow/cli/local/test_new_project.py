import ast
import importlib
import sys
from pathlib import Path

import pytest

from dflow import __version__
from dflow.__main__ import main
from dflow.cli.local.new_project import new_project
from dflow.tracing.errors import ConfigError


def test_a_new_project_passes_its_own_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "ring_finder"]) == 0
    monkeypatch.syspath_prepend(tmp_path / "ring_finder")
    tests = importlib.import_module("test_ring_finder")
    names = [name for name in vars(tests) if name.startswith("test_")]
    assert names == ["test_training_in_one_process", "test_training_on_a_cluster"]
    for name in names:
        getattr(tests, name)()
    for module in ("test_ring_finder", "ring_finder"):
        del sys.modules[module]


def test_a_new_project_has_a_readme_and_asks_for_this_version(tmp_path: Path) -> None:
    said = new_project("rings", tmp_path)
    folder = tmp_path / "rings"
    assert sorted(file.name for file in folder.iterdir()) == [
        ".gitignore",
        "README.md",
        "pyproject.toml",
        "rings.py",
        "test_rings.py",
    ]
    assert f'"dflow>={__version__}"' in (folder / "pyproject.toml").read_text()
    assert "$" not in "".join(file.read_text() for file in folder.iterdir())
    documented = ast.get_docstring(ast.parse((folder / "rings.py").read_text())) or ""
    assert "dflow launch --ps 1 --workers 2 rings.py" in documented
    assert "cd rings" in said


@pytest.mark.parametrize(
    ("name", "fact", "remedy"),
    [
        ("My-Rings", "expected the name of a Python module in lower case, got 'My-Rings'", "such as my_rings"),
        ("class", "expected the name of a Python module in lower case, got 'class'", "such as my_project"),
        ("../rings", "expected the name of a Python module in lower case, got '../rings'", "such as rings"),
        ("json", "expected one that no installed module has, got 'json'", "such as my_json"),
        ("taken", r"expected a new one, but .*taken exists", "choose another name, or remove it"),
    ],
)
def test_a_name_that_cannot_be_a_new_module_is_refused_and_nothing_is_written(
    name: str, fact: str, remedy: str, tmp_path: Path
) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(ConfigError, match=rf"(?s){fact}.*{remedy}"):
        new_project(name, tmp_path)
    assert [file.name for file in tmp_path.rglob("*")] == ["taken"]
