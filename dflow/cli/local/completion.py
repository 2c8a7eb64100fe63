"""`dflow completion SHELL`: print the script that completes `dflow`'s commands, options and file names in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from dflow.cli.command import Command
from dflow.tracing.errors import ConfigError

SHELLS = {
    "bash": 'eval "$(dflow completion bash)"                                in ~/.bashrc',
    "zsh": 'eval "$(dflow completion zsh)"                                 in ~/.zshrc, after compinit',
    "fish": "dflow completion fish > ~/.config/fish/completions/dflow.fish  once",
}


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script for one of `SHELLS`. Raises ConfigError if `shtab`, which writes it, is not installed."""
    try:
        import shtab
    except ModuleNotFoundError:
        raise ConfigError(
            "dflow completion needs shtab, which is not installed", "pip install 'dflow[completion]'"
        ) from None
    for action in _actions(parser):
        if action.metavar == "DIR":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.metavar == "FILE" or action.dest == "script":
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _actions(each)
        else:
            yield action


COMPLETION = Command(
    "completion",
    "print the script that completes dflow's command line in a shell",
    lambda parser: parser.add_argument("shell", choices=tuple(SHELLS), help="the shell"),
    lambda options: print(completion(options.parser, options.shell)),
    epilog="Use it so: " + "; ".join(" ".join(text.split()) for text in SHELLS.values()),
)
