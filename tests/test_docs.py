"""Every Python block of the README and the docs prints the output below it; every link and named file exists.

The blocks of a page run in order in one namespace. A ```text block right after a ```python block is its output;
`...` in it stands for anything. `make golden` rewrites such blocks, except those where `...` stands for something. A
page about several devices needs a process that has them: `test_several_devices.py` starts one, and
`JAX_NUM_CPU_DEVICES=8` before a command rewrites that page. The code cells of a notebook run in order, too.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest

from dflow.tracing.state import container
from dflow.tracing.weak_by_identity import WeakDict
from tests.golden import UpdateMode

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
#: Pages without code that runs here, whose links are checked too.
OTHERS = sorted(
    [*map(ROOT.joinpath, ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")), *ROOT.glob("docs/decisions/*.md")]
)
NOTEBOOKS = sorted(ROOT.glob("docs/notebooks/*.ipynb"))
#: Pages that need several devices.
OF_DEVICES = {"devices.md"}
#: Pages about libraries that are not among the dependencies.
OF_LIBRARIES = {
    "clicks.md": ("pandas", "pyarrow"),
    "data.md": ("pandas",),
    "keras.md": ("keras",),
    "libraries.md": ("keras", "torch", "grain", "pandas"),
}
RUN_HERE = [page for page in PAGES if page.name not in OF_DEVICES or jax.device_count() > 1]
BLOCK = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)


@pytest.mark.once
@pytest.mark.parametrize("page", RUN_HERE, ids=lambda page: page.name)
def test_the_snippets_of_a_page_run_and_print_what_it_says(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "_members", WeakDict())  # without the containers of earlier tests
    if missing := [name for name in OF_LIBRARIES.get(page.name, ()) if find_spec(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    with namespace_of(page) as namespace:
        check_snippets(page, namespace)


@contextlib.contextmanager
def namespace_of(page: Path) -> Iterator[dict[str, object]]:
    """Return the context of a namespace, which frees the names of its variables at the end, and restores the logger.

    A compiled function keeps the namespace, whose variables a later test could not make with other types. A page may
    have the logger pass more, which a later test would find among its records.
    """
    namespace: dict[str, object] = {"__name__": page.stem}
    logger = logging.getLogger("dflow")
    level, handlers = logger.level, [*logger.handlers]
    try:
        yield namespace
    finally:
        namespace.clear()
        logger.setLevel(level)
        logger.handlers[:] = handlers


def check_snippets(page: Path, namespace: dict[str, object]) -> None:
    """Run the blocks of a page, and compare the output."""
    original = page.read_text()
    updated = original
    for match in BLOCK.finditer(original):
        code, expected = match.groups()
        line = original.count("\n", 0, match.start(1))
        printed = run("\n" * line + code, page.name, namespace)
        if expected is not None and not matches(printed, expected):
            stands_for_anything = expected.count("...") > printed.count("...")
            if stands_for_anything or not UpdateMode.on:
                raise AssertionError(f"{page.name}:{line} printed\n{printed}\nbut the page says\n{expected}")
            updated = updated.replace(match[0], f"```python\n{code}```\n\n```text\n{printed}```\n")
    if updated != original:
        page.write_text(updated)


@pytest.mark.once
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_and_is_kept_without_outputs(notebook: Path) -> None:
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell for cell in cells if cell["outputs"] or cell["execution_count"]] == []
    with namespace_of(notebook) as namespace:
        for number, cell in enumerate(cells):
            run("".join(cell["source"]), f"{notebook.name}[{number}]", namespace)


def test_every_page_is_in_the_navigation_once() -> None:
    """The index is the list that the site's navigation is made of (docs/conf.py)."""
    listed = re.findall(r"^- \[.*?\]\((.*?)\)", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE)
    decisions = [path.relative_to(ROOT / "docs" / "decisions") for path in OTHERS if path.parent.name == "decisions"]
    of_decisions = re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs" / "decisions" / "README.md").read_text())
    pages = [*ROOT.glob("docs/*.md"), *NOTEBOOKS, ROOT / "docs" / "decisions" / "README.md"]
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in pages if page.stem != "index")
    assert set(of_decisions) >= {str(path) for path in decisions if path.stem != "README"}


def test_the_sites_reference_reads_docstrings_as_they_are_written() -> None:
    spec = importlib.util.spec_from_file_location("plain_docstrings", ROOT / "docs" / "plain_docstrings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    docstring = """Compile `fn`, for `a
and b`.

fn       takes *args and
         returns one
a, `_b`  two flags
Returns `Function`s.

    x = fn(*y)

- one
- two"""
    assert module.as_rst(docstring.splitlines()) == [
        "Compile ``fn``, for ``a and b``.",
        "",
        "``fn``",
        "    takes \\*args and returns one",
        "",
        "``a, _b``",
        "    two flags",
        "",
        "Returns ``Function``\\ s.",
        "",
        "::",
        "",
        "    x = fn(*y)",
        "",
        "- one",
        "",
        "- two",
        "",
    ]


@pytest.mark.parametrize("page", [*PAGES, *OTHERS, *NOTEBOOKS], ids=lambda page: str(page.relative_to(ROOT)))
def test_the_links_of_a_page_lead_to_headings_that_are_there(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", outside_of_code(page))
    for path, heading in links:
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert not heading or heading in headings(target), f"{path}#{heading}"


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: str(page.relative_to(ROOT)))
def test_the_files_that_a_page_names_exist(page: Path) -> None:
    folders = "tracing|lowering|distributed|dflow|tests|benchmarks|examples|docs"
    named = re.findall(rf"`((?:{folders})/[\w./-]*)`", outside_of_code(page))
    assert not [path for path in named if not (ROOT / path).exists()]


def outside_of_code(page: Path) -> str:
    """The page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings: lower case, words joined by hyphens, no other signs."""
    titles = re.findall(r"^#+ (.*)$", outside_of_code(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def run(code: str, name: str, namespace: dict[str, object]) -> str:
    """Run the code and return what it prints. The code itself catches the exceptions that it shows."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, name, "exec"), namespace)
    return out.getvalue()


def matches(printed: str, expected: str) -> bool:
    """Whether the output is the expected one, where `...` stands for anything."""
    pattern = ".*?".join(re.escape(part) for part in expected.split("..."))
    return re.fullmatch(pattern, printed, re.DOTALL) is not None
