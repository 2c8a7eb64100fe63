"""Default name of an optimizer: the same in every process that has the same variables.

Invariant: two optimizers of the same variables never share a derived name in one process, so they share no slots.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

from dflow.tracing.devices.device_name import is_on_task
from dflow.tracing.errors import VariableError
from dflow.tracing.state.container import uncontained
from dflow.tracing.state.resources import Variable
from dflow.tracing.weak_by_identity import WeakDict

#: By the first variable: the number of optimizers that have each derived name.
_derived: WeakDict[Variable, Counter[str]] = WeakDict()


def derived_name(variables: Sequence[Variable]) -> str:
    """Return a name made of the variables' names and their order.

    Raises VariableError for a second optimizer of variables on other tasks: processes may make the two in any order.
    """
    names = [uncontained(variable.name) for variable in variables]
    name = f"optimizer_{hashlib.sha256(chr(10).join(names).encode()).hexdigest()[:8]}"
    uses = _derived.setdefault(variables[0], Counter())
    uses[name] += 1
    if uses[name] == 1:
        return name
    if any(is_on_task(variable.device) for variable in variables):
        shown = ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
        raise VariableError(
            f"a second optimizer of variables {shown}: expected a name that tells the two apart in every process, "
            f"got none",
            "give each of them one, name='...', the same in each process",
        )
    return f"{name}_{uses[name] - 1}"
