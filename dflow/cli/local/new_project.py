"""`dflow new NAME`: a folder with a small project to start from. Nothing that exists is overwritten."""

from __future__ import annotations

import importlib.util
import keyword
import re
from pathlib import Path

from dflow import __version__
from dflow.cli.command import Command
from dflow.cli.local.project_files import project_files
from dflow.tracing.errors import ConfigError


def new_project(name: str, parent: Path) -> str:
    """Write the project `name` into a new folder of `parent`; return a message for the user.

    raises  ConfigError if `name` is no module name, is the name of an installed module, or its folder exists
    """
    if not re.fullmatch(r"[a-z_][a-z0-9_]*", name) or keyword.iskeyword(name):
        near = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_").lower()
        near = near if re.fullmatch(r"[a-z_][a-z0-9_]*", near) and not keyword.iskeyword(near) else "my_project"
        raise ConfigError(
            f"project name: expected the name of a Python module in lower case, got {name!r}",
            f"choose another name, such as {near}",
        )
    folder = parent / name
    if folder.exists():
        raise ConfigError(
            f"project folder: expected a new one, but {folder} exists", "choose another name, or remove it"
        )
    if importlib.util.find_spec(name) is not None:
        raise ConfigError(
            f"project name: expected one that no installed module has, got {name!r}",
            f"choose another name, such as my_{name}",
        )
    folder.mkdir()
    for file, text in project_files(name, __version__).items():
        (folder / file).write_text(text)
    next_commands = {
        f"cd {name}": "",
        f"python {name}.py": "  # one process",
        f"dflow launch --ps 1 --workers 2 {name}.py": "  # a parameter task and two workers",
        "pytest": "  # its tests, on one process and on a cluster",
    }
    width = max(map(len, next_commands))
    lines = [f"  {command:{width}}{comment}".rstrip() for command, comment in next_commands.items()]
    return "\n".join([f"wrote {folder}: a script that trains, its tests, and a README", *lines])


NEW = Command(
    "new",
    "write a small project to start from",
    lambda parser: parser.add_argument(
        "name", metavar="NAME", help="the name of the folder and of the Python module in it"
    ),
    lambda options: print(new_project(options.name, Path())),
    more=", in a new folder: a script that trains in one process and on a cluster, its tests, a README.",
)
