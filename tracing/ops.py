"""Every op of our own. Numbers are JAX's; these are state, communication and the calls that passes make.

An op that gives no array gives one `token`, so that each node has a value to be named by.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflow.tracing.effects import Effect
from dflow.tracing.errors import GraphTypeError
from dflow.tracing.op import OpDef, op
from dflow.tracing.types import ArrayType, RefType, TokenType, Type
from dflow.tracing.updates import ASSIGNS, KINDS, indices_refusal, kind_refusal, lookup_type


@op("var.read", (Effect.READ, 0))
def var_read(ref: RefType, /) -> tuple[Type, ...]:
    """The value of the variable `ref`."""
    if not isinstance(ref, RefType):
        raise GraphTypeError(f"var.read: the operand is {ref}, not a variable")
    return (ref.of,)


@op("var.gather", (Effect.READ, 0))
def var_gather(ref: RefType, indices: ArrayType, /) -> tuple[Type, ...]:
    """The rows of the variable `ref` at `indices`, which may have any shape."""
    _check_indices("var.gather", ref, indices)
    return (lookup_type(ref.of, indices),)


def _check_indices(name: str, ref: Type, indices: Type) -> None:
    if not isinstance(ref, RefType):
        raise GraphTypeError(f"{name}: the first operand is {ref}, not a variable")
    if not isinstance(indices, ArrayType):
        raise GraphTypeError(f"{name}: the indices are {indices}, not an array")
    refusal = indices_refusal(ref.of, indices)
    if refusal is not None:
        raise GraphTypeError(f"{name}: {refusal}")


def _update(kind: str) -> OpDef:
    """The op of one kind of update; of rows, it takes their indices before them."""
    name = f"var.{kind}"

    def rule(ref: RefType, /, *operands: ArrayType) -> tuple[Type, ...]:
        if not isinstance(ref, RefType):
            raise GraphTypeError(f"{name}: the first operand is {ref}, not a variable")
        refusal = kind_refusal(kind, ref.of)
        if refusal is not None:
            raise GraphTypeError(f"{name}: {refusal}")
        _check_value(name, ref, operands) if kind in ASSIGNS else _check_rows(name, ref, operands)
        return (TokenType(),)

    # An assign gives what was there before to nobody; every other update makes its value of the old one.
    return op(name, *([] if kind == "assign" else [(Effect.READ, 0)]), (Effect.WRITE, 0))(rule)


def _check_value(name: str, ref: RefType, operands: Sequence[Type]) -> None:
    (value,) = operands
    if not isinstance(value, ArrayType) or value.strong != ref.of.strong:
        raise GraphTypeError(f"{name}: the value is {value} but the variable holds {ref.of}")


def _check_rows(name: str, ref: RefType, operands: Sequence[Type]) -> None:
    indices, rows = operands
    _check_indices(name, ref, indices)
    assert isinstance(indices, ArrayType)
    wanted = lookup_type(ref.of, indices)
    if not isinstance(rows, ArrayType) or rows.strong != wanted.strong:
        raise GraphTypeError(f"{name}: the rows are {rows} but {indices} of {ref.of} need {wanted}")


#: The updates of a variable, by their kind: `assign`, `assign_add`, ... `scatter_min`.
UPDATES = {kind: _update(kind) for kind in KINDS}
var_assign, var_assign_add = UPDATES["assign"], UPDATES["assign_add"]


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
