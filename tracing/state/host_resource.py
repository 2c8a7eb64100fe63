"""Users' handles to state that the host keeps between XLA computations: queues and accumulators.

Such a resource has a name, a type and a home, which holds its contents. In traced code its methods record ops that the
executor runs in the order of the program; elsewhere they run immediately. Its ops may wait.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax

from dflow.tracing.errors import DflowError
from dflow.tracing.ir.accumulator_settings import AccumulatorSettings
from dflow.tracing.ir.op import OpDef
from dflow.tracing.ir.queue_settings import DEFAULT_TIMEOUT_S, QueueSettings
from dflow.tracing.ir.types import HostType, array_type_of
from dflow.tracing.jax_frontend import Handle, is_tracing
from dflow.tracing.primitives.host_primitives import host_p
from dflow.tracing.primitives.namesakes import joined_namesakes, warn_of_namesakes
from dflow.tracing.source import caller
from dflow.tracing.state.container import contained, join
from dflow.tracing.state.context import Home, current_home

_serials = itertools.count()


class HostResource:
    """A queue or an accumulator. Among a function's arguments it is a pytree without leaves."""

    #: The noun for it in names and messages, and the class of its errors.
    kind: ClassVar[str]
    error: ClassVar[type[DflowError]]
    #: Remedies for an op under vmap, and for one inside a loop that is differentiated; the method that puts a value in.
    batched_remedy: ClassVar[str]
    looped_remedy: ClassVar[str]
    puts: ClassVar[str]
    #: Whether snapshots of a cluster have its contents.
    is_saved: ClassVar[bool] = True
    type: HostType
    #: Beside its type, all that decides its results: equal settings and equal ops give equal results.
    settings: QueueSettings | AccumulatorSettings

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # By handle, since JAX keeps the trees of arguments for as long as a function lives.
        jax.tree_util.register_pytree_node(
            cls, lambda resource: ((), resource.handle), lambda handle, _: handle.variable
        )

    def __init__(self, name: str | None) -> None:
        self.serial = next(_serials)
        self.name = contained(name or f"{self.kind}_{self.serial}")
        #: Whether the name was given, and not made up.
        self.is_named = name is not None
        self.loc = caller()
        if is_tracing():
            raise self.error(
                f"{self.title} is created inside traced code, which runs once, not once a step",
                "create it before, and use it inside",
                at=self.loc,
            )

    @property
    def title(self) -> str:
        """Its kind and name, for messages."""
        return f"{self.kind} {self.name!r}"

    def settle(self) -> None:
        """Create the resource in the current state backend. Subclasses call this once its type and settings are set."""
        self.handle = Handle(self)
        self.home: Home = current_home()
        location = self.home.create_resource(self)
        self.device: str | None = location.device
        #: Its name in the store that holds it.
        self.key = location.key
        self.namesakes = joined_namesakes(self)
        join(self)

    def forget(self, reason: str) -> None:
        """Free the contents. Later use, and ops that wait for it, raise an error that gives the reason."""
        remedy = "make it again, or keep what outlives it outside the container"
        self.home.forget_resource(self, f"{self.title} {reason}", remedy)
        self.namesakes.pop(self, None)

    def use(self, op: OpDef, operands: Sequence[Any] = (), attributes: Mapping[str, Any] = {}) -> Sequence[Any]:
        """Run an op, or record it in traced code; its results."""
        warn_of_namesakes((self,))
        results: Sequence[Any] = host_p.bind(*operands, handle=self.handle, op=op, **attributes)
        return results

    def timeout(self, timeout_s: Any) -> dict[str, Any]:
        """The attributes for the longest wait of an op; infinity means no deadline.

        Raises the class's error unless it is a number; NaN is none.
        """
        try:
            seconds = float(timeout_s)
        except (TypeError, ValueError):
            seconds = math.nan
        if math.isnan(seconds):
            raise self.error(
                f"{self.title} was given timeout_s={number_text(timeout_s)}",
                "give a number of seconds that is known when the program is traced",
            )
        return {} if seconds == DEFAULT_TIMEOUT_S else {"timeout_s": seconds}


def known_number(number: Any) -> int | None:
    """Return `number` as an int; None if it is not an integer or is traced."""
    try:
        return operator.index(number)
    except TypeError:
        return None


def number_text(number: Any) -> str:
    """The text of an argument, expected to be a number known when the program is traced, for a message."""
    return f"{array_type_of(number)} (traced)" if isinstance(number, jax.core.Tracer) else str(number)
