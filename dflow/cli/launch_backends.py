"""The places where `dflow launch` can start a cluster, each with its options of the command line.

To add one, write its `LaunchPlace` in `distributed/launching/` and add a `LaunchBackend` to `BACKENDS`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from dflow.cli.command import at_least_one, checked, count
from dflow.distributed.launching.launch_plan import LaunchPlan
from dflow.distributed.launching.place import LaunchPlace
from dflow.distributed.launching.ray_resources import ray_resources
from dflow.distributed.launching.shares import core_shares, gpu_shares, visible_gpus
from dflow.distributed.launching.this_machine import ThisMachine
from dflow.distributed.transport.security.policy import SameMachine, SecurityPolicy
from dflow.tracing.errors import ConfigError


@dataclass(frozen=True)
class LaunchBackend:
    """A place for `dflow launch --on NAME`.

    `add_options`  adds the options that only this backend takes; their default is None
    `place`        returns the place, and a note for the user that may be empty. Raises ConfigError
    """

    add_options: Callable[[argparse.ArgumentParser], None]
    place: Callable[[LaunchPlan, argparse.Namespace, SecurityPolicy], tuple[LaunchPlace, str]]


def add_backends(parser: argparse.ArgumentParser) -> None:
    """Add `--on` and the options of each backend."""
    parser.add_argument_group("where").add_argument(
        "--on",
        choices=tuple(BACKENDS),
        default=THIS_MACHINE,
        help="this machine (default), or the Ray cluster that RAY_ADDRESS names or that runs here; each task is then "
        "an actor",
    )
    for backend in BACKENDS.values():
        backend.add_options(parser)


def backend_of(options: argparse.Namespace) -> LaunchBackend:
    """Return the backend that `--on` names. Raises ConfigError for an option of another backend."""
    for name, other in BACKENDS.items():
        for option in _options_of(other) if name != options.on else ():
            if getattr(options, option) is not None:
                raise ConfigError(f"--{option.replace('_', '-')} is for --on {name}, got --on {options.on}")
    return BACKENDS[options.on]


def _options_of(backend: LaunchBackend) -> list[str]:
    parser = argparse.ArgumentParser(add_help=False)
    backend.add_options(parser)
    return list(vars(parser.parse_args([])))


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


def _this_machine(plan: LaunchPlan, options: argparse.Namespace, security: SecurityPolicy) -> tuple[LaunchPlace, str]:
    given, count = os.environ, len(plan.workers)
    gpus = gpu_shares(visible_gpus(given), count, options.gpus_per_worker, given)
    cores = core_shares(sorted(os.sched_getaffinity(0)), count, options.cpus_per_worker, given)
    shares = {
        task: replace(core, environment={**core.environment, **gpu})
        for task, core, gpu in zip(plan.workers, cores, gpus, strict=True)
    }
    return ThisMachine(shares), ""


def _ray_options(parser: argparse.ArgumentParser) -> None:
    resources = parser.add_argument_group("what each task asks of its Ray node")
    for job, text in (("ps", "each stock task"), ("worker", "each task that runs the script")):
        resources.add_argument(
            f"--{job}-resources",
            type=checked(ray_resources),
            metavar="NAME=AMOUNT,...",
            help=f"resources of {text}, such as CPU=1,GPU=0.5 (default: CPU=1)",
        )


def _on_ray(plan: LaunchPlan, options: argparse.Namespace, security: SecurityPolicy) -> tuple[LaunchPlace, str]:
    try:
        from dflow.distributed.launching.on_ray import OnRay
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != RAY:
            raise
        raise ConfigError("--on ray needs Ray, which is not installed", "pip install 'dflow[ray]'") from None
    asked: dict[str, dict[str, float]] = {}
    for jobs, each in ((plan.stock, options.ps_resources), (plan.jobs, options.worker_resources)):
        asked |= dict.fromkeys(jobs, each or {"CPU": 1.0})
    place = OnRay(asked, plan.snapshots, is_secured=not isinstance(security, SameMachine))
    return place, f"{place.described(plan.counts)}; "


THIS_MACHINE = "this-machine"
RAY = "ray"

BACKENDS = {
    THIS_MACHINE: LaunchBackend(_machine_options, _this_machine),
    RAY: LaunchBackend(_ray_options, _on_ray),
}
