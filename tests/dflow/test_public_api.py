"""The names and the side effects of `import dflow`."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dflow

DEADLINE_S = 60.0
NAMES = dflow.__all__
PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def python(script: str) -> str:
    """Run a script in a new Python and return its output."""
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_a_docstring_of_its_own(name: str) -> None:
    documented = inspect.getdoc(getattr(dflow, name))
    assert documented
    assert documented != inspect.getdoc(object)


@pytest.mark.parametrize("name", [name for name in NAMES if inspect.isclass(getattr(dflow, name))])
def test_every_public_method_has_a_docstring(name: str) -> None:
    members = vars(getattr(dflow, name)).items()
    public = {member: value for member, value in members if not member.startswith("_")}
    functions = {
        member: value for member, value in public.items() if inspect.isroutine(value) or isinstance(value, property)
    }
    assert [member for member, value in functions.items() if not value.__doc__] == []


def test_the_page_of_names_has_each_public_name_once_and_no_other() -> None:
    listed = re.findall(r"^- \[`dflow\.(\w+)`\]", PAGE.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(NAMES)


def test_all_is_sorted_and_what_star_gives() -> None:
    given: dict[str, object] = {}
    exec("from dflow import *", given)
    del given["__builtins__"]
    assert sorted(given) == sorted(NAMES)
    assert sorted(NAMES) == list(NAMES)


def test_dir_lists_every_public_name() -> None:
    assert set(NAMES) <= set(dir(dflow))
    assert "__version__" in dir(dflow)
    assert dflow.distributed.__all__


def test_a_name_that_is_not_there_is_an_attribute_error_that_tells_those_that_are() -> None:
    with pytest.raises(AttributeError, match=r"module 'dflow' has no attribute 'Varable'; did you mean Variable"):
        _ = dflow.Varable
    with pytest.raises(AttributeError, match=r"module 'dflow' has no attribute 'xyz'; it has .*, Variable, .*, jit"):
        _ = dflow.xyz
    assert not hasattr(dflow, "__wrapped__")
    assert getattr(dflow, "api_of_tomorrow", None) is None


def test_importing_dflow_imports_no_jax() -> None:
    script = "import sys, dflow; print('jax' in sys.modules, dflow.__version__)"
    assert python(script).split() == ["False", dflow.__version__]


def test_the_command_line_imports_no_jax() -> None:
    assert python("import sys, dflow.__main__; print('jax' in sys.modules)") == "False\n"
