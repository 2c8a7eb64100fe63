"""Where new variables live: the current home, and the default one.

Context decides, not the data: `with cluster.parameter_servers():` sets a home for the variables made inside. The
default home, this process, is set once by the layer that has a store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dflow.tracing.context_values import within
from dflow.tracing.errors import InternalError
from dflow.tracing.ir.resource_op import ResourceOp
from dflow.tracing.state.initial_value import Initial

if TYPE_CHECKING:
    import jax
    from jax.sharding import Sharding


class ValueLocation(NamedTuple):
    """Location of a variable's value: the task (None: this process) and its key in that task's store.

    `sharding` is its sharding over several devices or an explicit mesh; None for one device or an open placement.
    """

    device: str | None
    key: str
    sharding: Sharding | None = None


class Home(Protocol):
    """Keeps the values of variables, queues and accumulators, and serves ops on them that run outside a graph.

    A `variable` is a `Variable`, a `resource` a `HostResource`; their files import this one.
    """

    #: Whether two variables of one name are one variable.
    shares_names: bool

    @property
    def spread(self) -> int:
        """Number of tasks over which new variables are spread, at least 1."""

    def create(self, variable: Any, initial: Initial, near: Any) -> ValueLocation | None:
        """Create the variable's value, or find it; return its location, or None if `settle` will set that later.

        Raises VariableError when a variable of that name but another type is there.
        """

    def prepared(self, initial: Initial, name: str | None) -> Initial:
        """Return an initial value in the form that `create` takes and `initial_type` knows the type of.

        Raises VariableError for a function that is no initialiser.
        """

    def settle(self, variable: Any) -> None:
        """Create a variable that `create` deferred, unless it exists by now; set its device and key."""

    def together(self) -> AbstractContextManager[None]:
        """Return a context that creates the variables made inside together, at its end or at their first use."""

    def read(self, variable: Any) -> jax.Array:
        """The value now. The array stays valid, whatever later steps write."""

    def gather(self, variable: Any, indices: Any) -> jax.Array:
        """The rows at `indices` now."""

    def update(self, variable: Any, kind: str, *operands: Any) -> None:
        """Change the value, as one update; `kind` is a key of `updates.KINDS`, the operands fit it."""

    def create_resource(self, resource: Any) -> ValueLocation:
        """Create a queue or an accumulator; returns where it is."""

    def use_resource(self, resource: Any, op: ResourceOp, operands: Sequence[Any]) -> Sequence[jax.Array]:
        """Run an op on the resource now, waiting for it; its results."""

    def forget(self, variable: Any, reason: str, remedy: str) -> None:
        """Free the value. Later use of the variable raises VariableError with this reason and remedy."""

    def forget_resource(self, resource: Any, reason: str, remedy: str) -> None:
        """Free the contents. Later use of the resource, and ops that wait for it, raise an error with both texts."""


#: Gives the sharding of a new `Variable` of this process, whose `sharding` may be a `PartitionSpec` or None.
Spread = Callable[[Any], "Sharding | None"]

_current: ContextVar[Home | None] = ContextVar("dflow_home", default=None)
_default: list[Home] = []
_spread: ContextVar[Spread | None] = ContextVar("dflow_spread", default=None)


def set_default_home(home: Home) -> None:
    """Set the home of variables that are created outside every `home` block."""
    _default[:] = [home]


def default_home() -> Home:
    """The home of variables created outside every `home` block. Raises InternalError when no layer has set it."""
    if not _default:
        raise InternalError("no home for variables is set; import dflow, not its layers alone")
    return _default[0]


def current_home() -> Home:
    """The home of variables created here. Raises InternalError when no layer has set a default."""
    return _current.get() or default_home()


def home(home: Home) -> AbstractContextManager[None]:
    """Make the variables created inside live in `home`."""
    return within(_current, home)


def spread_here() -> Spread | None:
    """What gives the shardings of the variables of this process that are created here; None outside `spreading`."""
    return _spread.get()


def spreading(spread: Spread) -> AbstractContextManager[None]:
    """Have `spread` give the shardings of the variables created inside, except those beside another variable."""
    return within(_spread, spread)
