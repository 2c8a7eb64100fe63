"""The `dflow` command line: start, join or inspect a cluster, list an export, start a project, check this machine.

Each subcommand imports what it needs when it runs, so that `--help` and `launch` start without delay.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dflow import __version__
from dflow.cli.certs import CERTS
from dflow.cli.command import CommandParser, add_commands
from dflow.cli.compile_command import COMPILE
from dflow.cli.convert_command import CONVERT
from dflow.cli.dashboard_command import DASHBOARD
from dflow.cli.inspect_commands import DUMP, SHOW, STATUS, TRACE, WHERE
from dflow.cli.launch_command import LAUNCH
from dflow.cli.local.completion import COMPLETION
from dflow.cli.local.doctor import DOCTOR
from dflow.cli.local.new_project import NEW
from dflow.cli.serve_command import SERVE
from dflow.cli.server_commands import COORDINATOR, TASK
from dflow.tracing.errors import DflowError

COMMANDS = (
    LAUNCH,
    TASK,
    COORDINATOR,
    STATUS,
    DASHBOARD,
    TRACE,
    DUMP,
    WHERE,
    SHOW,
    SERVE,
    COMPILE,
    CONVERT,
    CERTS,
    NEW,
    DOCTOR,
    COMPLETION,
)


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(prog="dflow", description="Stateful dataflow on JAX and XLA.")
    parser.add_argument("--version", action="version", version=f"dflow {__version__}")
    parser.set_defaults(parser=parser)
    add_commands(parser, "command", COMMANDS)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line `words` (default: the process's arguments) and return the exit status."""
    options = make_parser().parse_args(words)
    try:
        return options.run(options) or 0
    except (DflowError, OSError, ValueError) as error:
        print(f"dflow {options.command}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
