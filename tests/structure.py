"""Print the size and the names of the package: lines, files, classes, protocols, methods that only delegate.

    python -m tests.structure [--list] [REVISION]

With a revision, its figures stand beside those of the working tree. With --list, the places are named too.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
LAYERS = ("tracing", "lowering", "distributed", "dflow")
TESTS = ("tests",)

Sources = Mapping[PurePosixPath, str]


def sources_of_tree(folders: tuple[str, ...] = LAYERS) -> Sources:
    """Return the text of each Python file of the working tree in `folders`, by its path from the root."""
    files = (file for folder in folders for file in (ROOT / folder).rglob("*.py") if not _is_linked(file))
    return {PurePosixPath(file.relative_to(ROOT)): file.read_text() for file in sorted(files)}


def _is_linked(file: Path) -> bool:
    """Whether the file is reached through a link, such as `dflow/tracing`."""
    return any(folder.is_symlink() for folder in file.parents if ROOT in folder.parents)


def sources_of_revision(revision: str, folders: tuple[str, ...] = LAYERS) -> Sources:
    """Return the text of each Python file of a revision in `folders`, by its path from the root."""
    archive = ("git", "archive", "--format=tar", revision, *folders)
    packed = subprocess.run(archive, cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        files = [entry for entry in tar if entry.isfile() and entry.name.endswith(".py")]
        return {PurePosixPath(entry.name): tar.extractfile(entry).read().decode() for entry in files}


def lines_per_layer(sources: Sources) -> Counter[str]:
    """Count the lines of each layer."""
    counts: Counter[str] = Counter()
    for file, text in sources.items():
        counts[file.parts[0]] += text.count("\n")
    return counts


def files_per_folder(sources: Sources) -> Counter[PurePosixPath]:
    """Count the files of each folder, without its `__init__.py`."""
    return Counter(file.parent for file in sources if file.name != "__init__.py")


class _Class:
    """A class of the source: its place, the names of its bases, its own members with their parameters."""

    def __init__(self, file: PurePosixPath, node: ast.ClassDef) -> None:
        self.name, self.place = node.name, f"{file}:{node.lineno} {node.name}"
        self.bases = [name for base in node.bases if (name := _base_name(base))]
        self.members = {name: parameters for name, parameters in _members(node) if name != "__init__"}


def _base_name(base: ast.expr) -> str | None:
    if isinstance(base, ast.Subscript):
        base = base.value
    return getattr(base, "attr", None) or getattr(base, "id", None)


def _members(node: ast.ClassDef) -> Iterator[tuple[str, frozenset[str] | None]]:
    """Yield what instances have: methods with their parameters, fields, and attributes that `__init__` sets.

    None for the parameters of an attribute: a method may be handed on as one.
    """
    for line in node.body:
        if isinstance(line, ast.FunctionDef | ast.AsyncFunctionDef):
            yield line.name, frozenset(_parameters(line))
        in_init = getattr(line, "name", None) == "__init__"
        if in_init or isinstance(line, ast.AnnAssign | ast.Assign):
            for set_here in ast.walk(line):
                if isinstance(set_here, ast.Attribute) and isinstance(set_here.ctx, ast.Store):
                    yield set_here.attr, None
                if isinstance(set_here, ast.Name) and isinstance(set_here.ctx, ast.Store) and not in_init:
                    yield set_here.id, None


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the names of a method's parameters without `self`."""
    named = function.args
    every = [*named.posonlyargs, *named.args, *named.kwonlyargs, named.vararg, named.kwarg]
    return [parameter.arg for parameter in every if parameter is not None and parameter.arg != "self"]


def classes(sources: Sources) -> list[_Class]:
    """Return the classes of the source."""
    return [_Class(file, node) for file, node in _nodes(sources) if isinstance(node, ast.ClassDef)]


def _nodes(sources: Sources) -> Iterator[tuple[PurePosixPath, ast.AST]]:
    return ((file, node) for file, text in sources.items() for node in ast.walk(_parsed(text)))


_parsed = cache(ast.parse)


def lone_protocols(found: list[_Class]) -> list[str]:
    """Return the places of protocols that at most one class implements: derives from, or has the members of.

    A protocol with `__call__` alone is left out, as functions implement it.
    """
    by_name = {one.name: one for one in found}
    protocols = [one for one in found if "Protocol" in one.bases]
    others = [(_all_bases(one, by_name), _all_members(one, by_name)) for one in found if one not in protocols]
    lone = []
    for protocol in protocols:
        asked = _all_members(protocol, by_name)
        has = sum(protocol.name in bases or _covers(members, asked) for bases, members in others)
        if has <= 1 and set(asked) != {"__call__"}:
            lone.append(protocol.place)
    return lone


def _covers(members: Mapping[str, frozenset[str] | None], asked: Mapping[str, frozenset[str] | None]) -> bool:
    return all(
        name in members and ((found := members[name]) is None or (parameters or frozenset()) <= found)
        for name, parameters in asked.items()
    )


def _all_bases(one: _Class, by_name: Mapping[str, _Class]) -> set[str]:
    known = [by_name[base] for base in one.bases if base in by_name]
    return {*one.bases, *(name for base in known for name in _all_bases(base, by_name))}


def _all_members(one: _Class, by_name: Mapping[str, _Class]) -> dict[str, frozenset[str] | None]:
    members = dict(one.members)
    for base in one.bases:
        if base in by_name:
            members = {**_all_members(by_name[base], by_name), **members}
    return members


def delegations(sources: Sources) -> list[str]:
    """Return the places of methods whose body is one expression: a member of an attribute of theirs.

    It is read, or called with names, attributes and constants as they are. A call of a member of `self` counts if it
    hands on the method's own arguments and nothing else.
    """
    return [
        f"{file}:{method.lineno} {owner.name}.{method.name}"
        for file, owner in _nodes(sources)
        if isinstance(owner, ast.ClassDef)
        for method in owner.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and _delegates(method)
    ]


def _delegates(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    body = method.body[1:] if ast.get_docstring(method) is not None else method.body
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr):
        return False
    value = body[0].value.value if isinstance(body[0].value, ast.Await) else body[0].value
    if not isinstance(value, ast.Call):
        return _steps_from_self(value) > 1
    handed = [*(_unstarred(one) for one in value.args), *(keyword.value for keyword in value.keywords)]
    if _steps_from_self(value.func) > 1:
        return all(isinstance(one, ast.Name | ast.Attribute | ast.Constant) for one in handed)
    own = sorted(_parameters(method))
    return _steps_from_self(value.func) == 1 and sorted(getattr(one, "id", "") for one in handed) == own


def _unstarred(argument: ast.expr) -> ast.expr:
    return argument.value if isinstance(argument, ast.Starred) else argument


def _steps_from_self(value: ast.expr | None) -> int:
    """Return the number of attributes from `self` to the value, such as 2 for `self._file.close`; else 0."""
    steps = 0
    while isinstance(value, ast.Attribute):
        value, steps = value.value, steps + 1
    return steps if isinstance(value, ast.Name) and value.id == "self" else 0


def shared_class_names(sources: Sources) -> dict[str, list[PurePosixPath]]:
    """Return the names that several classes have, each with the files of these classes."""
    files: dict[str, list[PurePosixPath]] = defaultdict(list)
    for file, node in _nodes(sources):
        if isinstance(node, ast.ClassDef):
            files[node.name].append(file)
    return {name: found for name, found in sorted(files.items()) if len(found) > 1}


def classes_per_1000_lines(sources: Sources) -> float:
    """Return the number of classes in 1,000 lines of source."""
    return 1000 * len(classes(sources)) / lines_per_layer(sources).total()


def table(sources: Sources, tests: Sources, *, with_places: bool = False) -> str:
    """Return the figures as text."""
    lines, folders = lines_per_layer(sources), files_per_folder(sources)
    longest = sorted(sources, key=lambda file: -sources[file].count("\n"))[:5]
    lone, delegating = lone_protocols(classes(sources)), delegations(sources)
    rows = [
        f"lines      {lines.total():6}   {', '.join(f'{layer} {lines[layer]}' for layer in LAYERS)}",
        f"tests      {lines_per_layer(tests).total():6}   lines in {len(tests)} files",
        f"files      {folders.total():6}   in {len(folders)} folders",
        f"fullest    {max(folders.values()):6}   {', '.join(f'{name} {n}' for name, n in folders.most_common(5))}",
        f"longest    {sources[longest[0]].count(chr(10)):6}   "
        + ", ".join(f"{name} {sources[name].count(chr(10))}" for name in longest),
        f"classes    {len(classes(sources)):6}   {classes_per_1000_lines(sources):.1f} in 1,000 lines",
        f"same name  {len(shared_class_names(sources)):6}   {', '.join(shared_class_names(sources)) or 'none'}",
        f"protocols  {len(lone):6}   that at most one class implements",
        *(f"             {place}" for place in lone if with_places),
        f"delegate   {len(delegating):6}   methods of one line",
        *(f"             {place}" for place in delegating if with_places),
    ]
    return "\n".join(rows)


def main() -> None:
    """Print the figures of the working tree, after those of the revision that the command names."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("revisions", nargs="*", metavar="REVISION")
    parser.add_argument("--list", action="store_true", help="name the protocols and the methods that delegate")
    options = parser.parse_args()
    for revision in options.revisions:
        figures = table(sources_of_revision(revision), sources_of_revision(revision, TESTS), with_places=options.list)
        print(f"{revision}\n{figures}\n")
    print(f"working tree\n{table(sources_of_tree(), sources_of_tree(TESTS), with_places=options.list)}")


if __name__ == "__main__":
    main()
