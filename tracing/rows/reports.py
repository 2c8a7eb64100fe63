"""Removal of the reports that a step logs about its tables, for exported functions, which run without Python."""

from __future__ import annotations

from typing import Any

from dflow.tracing.jax_frontend import closed_parts, inner_parts, is_jaxpr, origin_of

#: The name scope of the ops of a report.
REPORT = "dflow_report"


def without_reports(jaxpr: Any) -> Any:
    """Return a jaxpr, open or closed, without the reports in it and in the jaxprs within it."""
    inner, _ = closed_parts(jaxpr)
    kept, lost = [], set[Any]()
    for equation in inner.eqns:
        if not equation.outvars and REPORT in origin_of(equation).scope:
            lost |= equation.effects
            continue
        params = {key: _params_without(value) for key, value in equation.params.items()}
        if any(params[key] is not value for key, value in equation.params.items()):
            gone = _effects_within(equation.params) - _effects_within(params)
            lost |= gone
            equation = equation.replace(params=params, effects=equation.effects - gone)
        kept.append(equation)
    if len(kept) == len(inner.eqns) and all(new is old for new, old in zip(kept, inner.eqns, strict=True)):
        return jaxpr
    lost -= {effect for equation in kept for effect in equation.effects}
    found = inner.replace(eqns=kept, effects=inner.effects - lost)
    return found if jaxpr is inner else jaxpr.replace(jaxpr=found)


def _effects_within(params: Any) -> set[Any]:
    return {effect for part, _ in inner_parts(params) for effect in part.effects}


def _params_without(value: Any) -> Any:
    if isinstance(value, tuple) and any(map(is_jaxpr, value)):
        parts = tuple(map(_params_without, value))
        return value if all(new is old for new, old in zip(parts, value, strict=True)) else parts
    return without_reports(value) if is_jaxpr(value) else value
