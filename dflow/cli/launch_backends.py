"""The backends that can start a cluster for `dflow launch`, each with its options of the command line.

To add one, write its `LaunchTarget` in `distributed/launching/` and add its two functions to `BACKENDS`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from dflow.cli.command import at_least_one, checked, count
from dflow.distributed.launching.launch_plan import LaunchPlan
from dflow.distributed.launching.shares import even_shares
from dflow.distributed.launching.ssh_hosts import placed, read_hosts
from dflow.distributed.launching.task_programs import LaunchTarget, ThisMachine
from dflow.distributed.transport.security.policy import SameMachine, SecurityPolicy
from dflow.tracing.errors import ConfigError

#: Adds the options that only one backend takes; their default is None.
AddOptions = Callable[[argparse.ArgumentParser], None]
#: Returns the target of a launch, and a note for the user that may be empty. Raises ConfigError.
MakeTarget = Callable[[LaunchPlan, argparse.Namespace, SecurityPolicy], tuple[LaunchTarget, str]]


def add_backends(parser: argparse.ArgumentParser) -> None:
    """Add `--on` and the options of each backend."""
    parser.add_argument_group("where").add_argument(
        "--on",
        choices=tuple(BACKENDS),
        default=THIS_MACHINE,
        help="this machine (default); the Ray cluster that RAY_ADDRESS names or that runs here, as actors; or the "
        "hosts of a file, by ssh",
    )
    for add_options, _ in BACKENDS.values():
        add_options(parser)


def backend_of(options: argparse.Namespace) -> MakeTarget:
    """Return what makes the target that `--on` names. Raises ConfigError for an option of another backend."""
    for name, (add_options, _) in BACKENDS.items():
        parser = argparse.ArgumentParser(add_help=False)
        add_options(parser)
        for option in vars(parser.parse_args([])) if name != options.on else ():
            if getattr(options, option) is not None:
                raise ConfigError(f"--{option.replace('_', '-')} is for --on {name}, got --on {options.on}")
    return BACKENDS[options.on][1]


def _machine_options(parser: argparse.ArgumentParser) -> None:
    share = parser.add_argument_group("what each worker gets of this machine")
    share.add_argument(
        "--gpus-per-worker",
        type=count,
        metavar="N",
        help="GPUs for itself alone, 0 for none (default: an even part; several share a GPU's memory when there are "
        "fewer GPUs than workers)",
    )
    share.add_argument(
        "--cpus-per-worker",
        type=at_least_one,
        metavar="N",
        help="cores it is kept on, which no other gets (default: all cores, with an even part of as many threads)",
    )


def _this_machine(plan: LaunchPlan, options: argparse.Namespace, security: SecurityPolicy) -> tuple[LaunchTarget, str]:
    shares = even_shares(os.environ, len(plan.workers), options.gpus_per_worker, options.cpus_per_worker)
    return ThisMachine(dict(zip(plan.workers, shares, strict=True))), ""


def _ray_options(parser: argparse.ArgumentParser) -> None:
    resources = parser.add_argument_group("what each task asks of its Ray node")
    for job, text in (("ps", "each stock task"), ("worker", "each task that runs the script")):
        resources.add_argument(
            f"--{job}-resources",
            type=checked(ray_resources),
            metavar="NAME=AMOUNT,...",
            help=f"resources of {text}, such as CPU=1,GPU=0.5 (default: CPU=1)",
        )


def ray_resources(text: str) -> dict[str, float]:
    """Parse resources by Ray's names, such as `CPU=1,GPU=0.5,NAME=2`; 1 CPU by default. Raises ValueError."""
    found = {"CPU": 1.0}
    for part in text.split(","):
        name, equals, amount = part.partition("=")
        try:
            found[name.strip()] = float(amount)
        except ValueError:
            equals = ""
        if not (name.strip() and equals and found[name.strip()] >= 0):
            raise ValueError(f"{text!r} states no resources; write them as CPU=1,GPU=0.5 with names of Ray's")
    return found


def _on_ray(plan: LaunchPlan, options: argparse.Namespace, security: SecurityPolicy) -> tuple[LaunchTarget, str]:
    try:
        from dflow.distributed.launching.on_ray import OnRay
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != RAY:
            raise
        raise ConfigError("--on ray needs Ray, which is not installed", "pip install 'dflow[ray]'") from None
    asked: dict[str, dict[str, float]] = {}
    for jobs, each in ((plan.stock, options.ps_resources), (plan.jobs, options.worker_resources)):
        asked |= dict.fromkeys(jobs, each or {"CPU": 1.0})
    target = OnRay(asked, plan.snapshots, is_secured=not isinstance(security, SameMachine))
    return target, f"{target.described(plan.counts)}; "


def _ssh_options(parser: argparse.ArgumentParser) -> None:
    hosts = parser.add_argument_group("hosts to reach by ssh")
    hosts.add_argument(
        "--hosts",
        type=Path,
        metavar="FILE",
        help="a line for each host: NAME [slots=N] [user=NAME] [port=N]; slots is the number of tasks there that run "
        "the script (default: 1). Stock tasks go to the hosts with slots=0, else to all, one after the other",
    )
    hosts.add_argument(
        "--python", metavar="PATH", help="the interpreter on each host (default: the one that runs this)"
    )
    hosts.add_argument("--directory", metavar="DIR", help="the folder of the script on each host (default: this one)")
    hosts.add_argument("--ssh", metavar="COMMAND", help="ssh with options of yours, such as 'ssh -F FILE'")


def _on_ssh(plan: LaunchPlan, options: argparse.Namespace, security: SecurityPolicy) -> tuple[LaunchTarget, str]:
    from dflow.distributed.launching.on_ssh import OnSsh

    if options.hosts is None:
        raise ConfigError("--on ssh: expected the hosts, got none", "give --hosts FILE, with a line for each host")
    hosts = read_hosts(options.hosts)
    parts = placed(hosts, plan.servers, plan.workers)
    python, directory = options.python or sys.executable, options.directory or os.getcwd()
    command = shlex.split(options.ssh or "ssh")
    target = OnSsh(parts, command, python, directory, is_secured=not isinstance(security, SameMachine))
    used = ", ".join(dict.fromkeys(part.host.name for part in parts.values()))
    return target, f"by ssh on {used}, the coordinator here on {target.address}; "


THIS_MACHINE = "this-machine"
RAY = "ray"
SSH = "ssh"

BACKENDS: dict[str, tuple[AddOptions, MakeTarget]] = {
    THIS_MACHINE: (_machine_options, _this_machine),
    RAY: (_ray_options, _on_ray),
    SSH: (_ssh_options, _on_ssh),
}
