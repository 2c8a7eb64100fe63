"""Print the size and the names of the package: lines, files per folder, classes that share a name.

    python -m tests.structure [REVISION]

With a revision, its figures stand beside those of the working tree.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
LAYERS = ("tracing", "lowering", "distributed", "dflow")

Sources = Mapping[PurePosixPath, str]


def sources_of_tree() -> Sources:
    """Return the text of each source file of the working tree, by its path from the root."""
    files = (file for layer in LAYERS for file in (ROOT / layer).rglob("*.py") if not _is_linked(file))
    return {PurePosixPath(file.relative_to(ROOT)): file.read_text() for file in sorted(files)}


def _is_linked(file: Path) -> bool:
    """Whether the file is reached through a link, such as `dflow/tracing`."""
    return any(folder.is_symlink() for folder in file.parents if ROOT in folder.parents)


def sources_of_revision(revision: str) -> Sources:
    """Return the text of each source file of a revision, by its path from the root."""
    names = _git("ls-tree", "-r", "--name-only", revision, *LAYERS).splitlines()
    return {PurePosixPath(name): _git("show", f"{revision}:{name}") for name in names if name.endswith(".py")}


def _git(*words: str) -> str:
    return subprocess.run(("git", *words), cwd=ROOT, check=True, capture_output=True, text=True).stdout


def lines_per_layer(sources: Sources) -> Counter[str]:
    """Count the lines of each layer."""
    counts: Counter[str] = Counter()
    for file, text in sources.items():
        counts[file.parts[0]] += text.count("\n")
    return counts


def files_per_folder(sources: Sources) -> Counter[PurePosixPath]:
    """Count the files of each folder, without its `__init__.py`."""
    return Counter(file.parent for file in sources if file.name != "__init__.py")


def shared_class_names(sources: Sources) -> dict[str, list[PurePosixPath]]:
    """Return the names that several classes have, each with the files of these classes."""
    files: dict[str, list[PurePosixPath]] = defaultdict(list)
    for file, text in sources.items():
        for name in _classes(ast.parse(text)):
            files[name].append(file)
    return {name: found for name, found in sorted(files.items()) if len(found) > 1}


def _classes(tree: ast.Module) -> Iterator[str]:
    return (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def table(sources: Sources) -> str:
    """Return the figures as text."""
    lines, folders = lines_per_layer(sources), files_per_folder(sources)
    longest = sorted(sources, key=lambda file: -sources[file].count("\n"))[:5]
    rows = [
        f"lines      {lines.total():6}   {', '.join(f'{layer} {lines[layer]}' for layer in LAYERS)}",
        f"files      {folders.total():6}   in {len(folders)} folders",
        f"fullest    {max(folders.values()):6}   {', '.join(f'{name} {n}' for name, n in folders.most_common(5))}",
        f"longest    {sources[longest[0]].count(chr(10)):6}   "
        + ", ".join(f"{name} {sources[name].count(chr(10))}" for name in longest),
        f"same name  {len(shared_class_names(sources)):6}   {', '.join(shared_class_names(sources)) or 'none'}",
    ]
    return "\n".join(rows)


def main() -> None:
    """Print the figures of the working tree, after those of the revision that the command names."""
    for revision in sys.argv[1:]:
        print(f"{revision}\n{table(sources_of_revision(revision))}\n")
    print(f"working tree\n{table(sources_of_tree())}")


if __name__ == "__main__":
    main()
