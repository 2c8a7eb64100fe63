"""`dflow doctor`: check that dflow can work on this machine, and say what to do where it cannot."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING

from dflow.cli.command import Command, add_seconds

if TYPE_CHECKING:
    from dflow.cli.local.doctor_checks import Diagnosis


def show(found: Iterable[Diagnosis]) -> int:
    """Print each diagnosis as it is found, and return the exit status: 1 if any is *wrong*."""
    wrong = 0
    for each in found:
        print(f"{each.level:5}  {each.text}", flush=True)
        if each.remedy:
            print(f"       -> {each.remedy}", flush=True)
        wrong += each.level == "wrong"
    print(f"dflow doctor: {f'{wrong} wrong, with the remedies above' if wrong else 'nothing is wrong'}")
    return 1 if wrong else 0


def _doctor(options: argparse.Namespace) -> int:
    from dflow.cli.local.doctor_checks import clock, devices, extras, limits, network, versions

    return show(chain(versions(), extras(), limits(), network(), clock(), devices(options.timeout)))


DOCTOR = Command(
    "doctor",
    "check the installation and this machine",
    lambda parser: add_seconds(parser, "--timeout", 60, "how long JAX may take to list its devices"),
    _doctor,
    more=": versions, extras, devices, limits, network, clock. The exit status is 1 if something is wrong.",
)
