"""Rules for every file of the tree: one import name per module, no pickle, JAX's internals in one file."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from mypy.modulefinder import FindModuleCache, SearchPaths

import dflow

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("tracing", "lowering", "distributed")
PACKAGE = [ROOT / "dflow", *(ROOT / layer for layer in LAYERS)]
TREE = [*PACKAGE, ROOT / "tests", ROOT / "benchmarks", ROOT / "examples"]

UNPICKLERS = {"pickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
JAX_INTERNALS = ROOT / "tracing" / "jax_frontend.py"
#: Scripts for processes, which would take too long to import JAX.
SCRIPTS = (
    ROOT / "lowering" / "programs" / "read_bytecode.py",
    ROOT / "distributed" / "collectives" / "jax_service.py",
)


def sources(folders: list[Path]) -> list[Path]:
    """Every Python file under `folders`, once: the links inside dflow/ are not followed."""
    return sorted(
        path
        for folder in folders
        for path in folder.rglob("*.py")
        if not any(part.is_symlink() for part in path.parents)
    )


def module_name(path: Path) -> str:
    """The only name under which the file `path` is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("dflow", *(part for part in parts if part not in ("dflow", "__init__"))))


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each import in `tree`, by statement or by a call with a literal name."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, name.name) for name in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                yield from ((node.lineno, f"{'.' * level}{module or ''}.{name.name}") for name in names)
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name
            case _:
                pass


@cache
def imports_of_file(path: Path) -> list[tuple[int, str]]:
    """Return the imports of a file, which several tests want of all files."""
    return [*imports(ast.parse(path.read_text()))]


def importers(found: Iterable[tuple[int, str]], *roots: str) -> list[str]:
    """Lines of the imports of a module that is one of `roots` or inside one."""
    return [
        f"line {line}: {name}"
        for line, name in found
        if any(name == root or name.startswith(root + ".") for root in roots)
    ]


def offenders(folders: list[Path], *roots: str, but: tuple[Path, ...] = ()) -> list[str]:
    """Every import of one of `roots` in the files of `folders`."""
    return [
        f"{path.relative_to(ROOT)}, {found}"
        for path in sources(folders)
        if path not in but
        for found in importers(imports_of_file(path), *roots)
    ]


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, pickle as p",
        "from pickle import loads",
        "def f():\n    import pickle.x",
        "__import__('pickle')",
        "import importlib\nimportlib.import_module('pickle')",
    ],
)
def test_the_scan_finds_a_planted_import(source: str) -> None:
    assert importers(imports(ast.parse(source)), "pickle")
    assert not importers(imports(ast.parse(source.replace("pickle", "picklecount"))), "pickle")


@pytest.mark.once
def test_the_scan_reads_each_file_once_and_every_layer() -> None:
    found = {path.relative_to(ROOT).as_posix() for path in sources(PACKAGE)}
    assert {"dflow/__init__.py", *(f"{layer}/__init__.py" for layer in LAYERS)} <= found
    assert not {name for name in found if name.split("/")[:1] == ["dflow"] and name.split("/")[1] in LAYERS}


@pytest.mark.once
def test_the_type_checker_follows_the_links_to_every_layer() -> None:
    finder = FindModuleCache(SearchPaths((str(ROOT),), (), (), ()), None, None)
    seen = {source.module for source in finder.find_modules_recursive("dflow")}
    assert seen == {module_name(path) for path in sources(PACKAGE)}


@pytest.mark.once
def test_every_module_has_one_name() -> None:
    assert offenders(TREE, *LAYERS) == []


@pytest.mark.once
def test_nothing_in_the_package_can_unpickle() -> None:
    assert offenders(PACKAGE, *sorted(UNPICKLERS)) == []
    allowing = [
        f"{path.relative_to(ROOT)}, line {node.value.lineno}"
        for path in sources(PACKAGE)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle"
        if not (isinstance(node.value, ast.Constant) and node.value.value is False)
    ]
    assert allowing == []


@pytest.mark.once
def test_only_the_front_end_imports_jax_internals() -> None:
    assert offenders(PACKAGE, "jax._src", "jaxlib", but=(JAX_INTERNALS, *SCRIPTS)) == []


@pytest.mark.once
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_import_our_modules_at_the_top_of_the_file_only(layer: str) -> None:
    inside = [
        f"{path.relative_to(ROOT)}, line {line}: {name}"
        for path in sources([ROOT / layer])
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for line, name in imports(function)
        if name.split(".")[0] == "dflow"
    ]
    assert inside == []


def test_every_public_name_exists_and_says_what_it_is() -> None:
    public: list[str] = getattr(dflow, "__all__", [])
    assert len(public) == len(set(public))
    objects = {name: getattr(dflow, name) for name in public}
    documented = {name: inspect.getdoc(value) for name, value in objects.items() if callable(value)}
    assert [name for name, text in documented.items() if not text] == []


def test_importing_dflow_touches_no_device() -> None:
    program = """
        import dflow
        for name in dflow.__all__:
            getattr(dflow, name)
        import dflow.tracing, dflow.lowering, dflow.distributed
        from jax._src import xla_bridge
        assert not xla_bridge.backends_are_initialized(), "a backend is up"
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=60)


def test_the_coordinator_the_launcher_and_the_dashboard_start_without_jax() -> None:
    modules = (
        "dflow.distributed.coordinator_role",
        "dflow.distributed.launching.launcher",
        "dflow.cli.launch_command",
        "dflow.dashboard.serving",
    )
    code = f"import sys, {', '.join(modules)}; sys.exit('jaxlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
