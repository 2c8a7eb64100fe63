"""Removal of the reports that a step logs about its tables, for exported functions, which run without Python."""

from __future__ import annotations

from dflow.tracing.jax_frontend import Equation, Jaxpr, origin_of, without_equations

#: The name scope of the ops of a report.
REPORT = "dflow_report"


def without_reports(jaxpr: Jaxpr) -> Jaxpr:
    """Return a program without the reports in it."""
    found: Jaxpr = without_equations(jaxpr, _is_report)
    return found


def _is_report(equation: Equation) -> bool:
    return REPORT in origin_of(equation).scope
