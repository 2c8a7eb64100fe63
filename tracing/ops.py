"""Every op of our own. Numbers are JAX's; these are state, communication and the calls that passes make.

An op that gives no array gives one `token`, so that each node has a value to be named by.
"""

from __future__ import annotations

from dflow.tracing.effects import Effect
from dflow.tracing.errors import GraphTypeError
from dflow.tracing.op import op
from dflow.tracing.types import ArrayType, RefType, TokenType, Type


def _holds(name: str, ref: Type, value: Type) -> None:
    if not isinstance(ref, RefType):
        raise GraphTypeError(f"{name}: the first operand is {ref}, not a variable")
    if not isinstance(value, ArrayType) or value.strong != ref.of.strong:
        raise GraphTypeError(f"{name}: the value is {value} but the variable holds {ref.of}")


@op("var.read", (Effect.READ, 0))
def var_read(ref: RefType, /) -> tuple[Type, ...]:
    """The value of the variable `ref`."""
    if not isinstance(ref, RefType):
        raise GraphTypeError(f"var.read: the operand is {ref}, not a variable")
    return (ref.of,)


@op("var.assign", (Effect.WRITE, 0))
def var_assign(ref: RefType, value: ArrayType, /) -> tuple[Type, ...]:
    """Replace the value of the variable `ref`."""
    _holds("var.assign", ref, value)
    return (TokenType(),)


@op("var.assign_add", (Effect.READ, 0), (Effect.WRITE, 0))
def var_assign_add(ref: RefType, delta: ArrayType, /) -> tuple[Type, ...]:
    """Add `delta` into the variable `ref`, as one update that no other step comes between."""
    _holds("var.assign_add", ref, delta)
    return (TokenType(),)


@op("net.send", (Effect.SEND, None))
def net_send(value: ArrayType, /, *, edge: str, destination: str) -> tuple[Type, ...]:
    """Send `value` over `edge` to the task `destination`."""
    return (TokenType(),)


@op("net.recv", (Effect.RECV, None))
def net_recv(*, edge: str, source: str, type: ArrayType) -> tuple[Type, ...]:
    """The value that the task `source` sends over `edge`."""
    return (type,)


@op("xla.call")
def xla_call(*operands: Type, donate: tuple[int, ...] = ()) -> tuple[Type, ...] | None:
    """Run the node's graph as one XLA computation; its effects are its body's.

    `donate` lists the operands, all variables, whose buffers the computation may overwrite. The result types are
    the body's, which the verifier checks.
    """
    return None
