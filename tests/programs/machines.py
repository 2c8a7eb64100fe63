"""The meaning of a program's statements, in terms of control flow, batches and derivatives.

`Traced` is the program as a user writes it, with JAX's control flow. `AtOnce` is the same program with Python's control
flow, where each op runs immediately. `tests.programs.reference` has a third meaning, which does not use dflow.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

import dflow
from dflow.tracing.devices.device import device_scope
from dflow.tracing.devices.device_name import full_device_name
from dflow.tracing.rows.row_gradient import RowGradient
from tests.programs.statements import (
    Apply,
    Ask,
    Batch,
    Call,
    Cond,
    Derive,
    Gather,
    Log,
    Loop,
    On,
    Op,
    Put,
    Read,
    Size,
    Statement,
    Take,
    TakeSum,
    Write,
)

#: The shape of every value of a program.
SHAPE = (3,)
#: Bound of the numbers of a value.
LIMIT = 16
#: Largest number of iterations of a loop.
MOST_TURNS = 3


def bounded(x: Any) -> Any:
    """Replace numbers that are too large by 1: all numbers stay exact, and derivatives are those of x, or 0."""
    return jnp.where(jnp.abs(x) <= LIMIT, x, jnp.ones_like(x))


KINDS = {
    "add": lambda x, y: bounded(x + y),
    "sub": lambda x, y: bounded(x - y),
    "mul": lambda x, y: bounded(x * y),
    "max": lambda x, y: jnp.where(x > y, x, y),
    "where": lambda x, y: jnp.where(x > y, x, -y),
}

#: Updates of a bool instead of the ones that it lacks.
_BOOL_KINDS = {"assign_sub": "assign"} | dict.fromkeys(("scatter_add", "scatter_sub", "scatter_mul"), "scatter_update")


def _small(x: Any) -> Any:
    return jnp.where(jnp.abs(x) <= 1, x, -jnp.ones_like(x))


def _spread(number: Any) -> Any:
    return jnp.broadcast_to(number.astype(jnp.float32), SHAPE)


def as_value(array: Any) -> Any:
    """Convert a variable's value or rows to a value of the stack."""
    # The derivative of a number that bfloat16 rounds would not be exact.
    held = jax.lax.stop_gradient(array) if array.dtype != jnp.float32 else array
    held = held.astype(jnp.float32).reshape(-1, 3 if array.size % 3 == 0 else 1).sum(0)
    return bounded(jnp.broadcast_to(held, SHAPE))


def as_operand(value: Any, dtype: Any, shape: tuple[int, ...], is_factor: bool) -> Any:
    """Convert a value of the stack to an operand for a variable of this type."""
    name = np.dtype(dtype).name
    if is_factor or name == "bfloat16":
        value = _small(value)
    count = 1 if name == "bfloat16" else shape[0] if len(shape) > 1 else 1
    if shape == ():
        value = value[0] + value[1] * (not is_factor and name != "bfloat16")
    elif len(shape) > 1:
        value = jnp.stack([value if is_factor else value + row for row in range(count)])
    if name == "bool":
        return value > 0
    return (value.astype(jnp.int32) if name == "uint8" else value).astype(dtype)


def as_indices(value: Any, ndim: int) -> Any:
    """Row indices from below the first row's negative index to past the last row."""
    indices = value.astype(jnp.int32) % 8 - 3
    return indices if ndim == 1 else indices[:2]


def parity(value: Any, count: int) -> Any:
    return value.sum().astype(jnp.int32) % count


class Traced:
    """A program with JAX's control flow, over variables, queues and an accumulator; it logs to `seen`."""

    def __init__(
        self,
        variables: Sequence[Any],
        queues: Sequence[Any] = (),
        accumulator: Any = None,
        seen: list[Any] | None = None,
    ) -> None:
        self.variables, self.queues, self.accumulator = list(variables), list(queues), accumulator
        self.seen: list[Any] = [] if seen is None else seen

    def run(self, statements: Sequence[Statement], stack: Sequence[Any], shared: int | None = None) -> list[Any]:
        """Return the stack after the statements. Under a batch its first `shared` values are equal for the whole
        batch.
        """
        stack = list(stack)
        for statement in statements:
            stack += self._run_one(statement, stack, shared)
        return stack

    def _run_one(self, statement: Statement, stack: list[Any], shared: int | None) -> list[Any]:
        def pick(index: int) -> Any:
            return stack[index % len(stack)]

        def inner(body: Sequence[Statement], *more: Any) -> Any:
            return self.run(body, [*stack, *more], shared)[-1]

        match statement:
            case Op(kind, left, right):
                return [KINDS[kind](pick(left), pick(right))]
            case Read(variable):
                return [as_value(self._variable(variable).read())]
            case Gather(variable, value):
                held = self._variable(variable)
                ndim = len(held.shape)
                return [as_value(held.gather(as_indices(pick(value), ndim)) if ndim else held.read())]
            case Write():
                self._write(statement, stack, shared)
                return []
            case Log(value):
                self.log(pick(value))
                return []
            case Put():
                self._put(statement, pick(statement.value))
                return []
            case Take():
                return [self._taken(statement)]
            case Size(queue):
                return [_spread(self.queues[queue].size())]
            case Apply(value, count, age):
                fresh = [self._applied(pick(value) + index, age) for index in range(count)]
                return [_spread(sum(fresh, jnp.int32(0)))]
            case TakeSum(count):
                vector, rows = self.accumulator.take(count)
                # A sum that depends on the order.
                return [as_value(vector + 2 * rows.indices[:3] + rows.rows[:3, 0] * jnp.arange(1, 4))]
            case Ask("set_step"):
                self.accumulator.set_step(self.accumulator.step + 1)
                return []
            case Ask(what):
                number = self.accumulator.step if what == "step" else getattr(self.accumulator, what)()
                return [_spread(number)]
            case On(name, body):
                with device_scope(full_device_name(name)):
                    return self.run(body, stack, shared)[len(stack) :]
            case Loop():
                return self._loop(statement, pick(statement.value), stack[-1], inner)
            case Cond(test, branches, divided):
                bodies = [lambda body=body: inner(body) for body in branches]
                if divided:
                    return [self.divided_switch(parity(pick(test), len(bodies)), bodies)]
                same = stack if shared is None else stack[:shared]
                return [self.switch(parity(same[test % len(same)], len(bodies)), bodies)]
            case Call(("custom_jvp" | "custom_vjp") as how, value, body):
                return [self.custom(how, lambda x: self.run(body, [x]), pick(value))]
            case Call(how, value, body):
                return [self.call(how, lambda x: inner(body, x))(pick(value))]
            case Batch(value, size, body):
                xs = bounded(pick(value) + jnp.arange(size, dtype=jnp.float32)[:, None])
                return [bounded(self.batch(lambda x: self.run(body, [*stack, x], len(stack))[-1], xs).sum(0))]
            case Derive(how, value, places, body):
                wrt = [*dict.fromkeys(v for v in map(self._variable, places) if v.dtype == jnp.float32)]
                machine = self.within()
                fn: Callable[..., Any] = lambda x: machine.run(body, [*stack, x], shared)[-1]  # noqa: E731
                results = self.derive(how, fn, wrt, pick(value))
                return [as_value(result) for result in results]
        raise AssertionError(statement)

    def _variable(self, index: int) -> Any:
        return self.variables[index % len(self.variables)]

    def _write(self, write: Write, stack: list[Any], shared: int | None) -> None:
        variable, kind = self._variable(write.variable), write.kind
        if variable.shape == () and kind.startswith("scatter"):
            kind = {"scatter_update": "assign"}.get(kind, kind.replace("scatter", "assign"))
        more = {}
        if variable.dtype == bool:
            kind = _BOOL_KINDS.get(kind, kind)
        elif shared is not None and write.sums and kind in ("assign_add", "scatter_add"):
            more = {"reduce": "sum"}
        same = stack if shared is None or more else stack[:shared]
        value = same[write.value % len(same)]
        if more:
            value = bounded(value + stack[shared])
        shape, operands = variable.shape, []
        if kind.startswith("scatter"):
            indices = as_indices(value, len(shape))
            shape = (*indices.shape, *shape[1:])
            operands = [indices]
        operands.append(as_operand(value, variable.dtype, shape, kind.endswith("mul")))
        if kind == "scatter_update":  # Of different rows for one index any may remain.
            operands[1] = jnp.broadcast_to(operands[1][0], shape)
        getattr(variable, kind)(*operands, **more)

    def _put(self, put: Put, value: Any) -> None:
        numbers = [value.astype(jnp.int32) + index for index in range(put.count)]
        queue = self.queues[put.queue]
        if put.at_once and numbers:
            queue.enqueue_many((jnp.stack([n[0] for n in numbers]), jnp.stack([n[1:] for n in numbers])))
            return
        for number in numbers:
            queue.enqueue((number[0], number[1:]))

    def _taken(self, take: Take) -> Any:
        queue = self.queues[take.queue]
        if take.how == "one by one" or not take.count:
            elements = [queue.dequeue() for _ in range(take.count)]
            whole = [jnp.concatenate([first[None], second]) for first, second in elements]
        elif take.how == "at once":
            first, second = queue.dequeue_many(take.count)
            whole = list(jnp.concatenate([first[:, None], second], axis=1))
        else:
            (first, second), count = queue.dequeue_up_to(take.count)
            whole = [*jnp.concatenate([first[:, None], second], axis=1), count]
        # A sum that depends on the order.
        return as_value(sum((n * one for n, one in enumerate(whole, 1)), jnp.zeros(SHAPE, jnp.int32)))

    def _applied(self, value: Any, age: int) -> Any:
        """Apply a vector, and rows at indices below 3 that depend on it; return 1 where they are fresh."""
        vector = value.astype(jnp.int32)
        rows = RowGradient(vector[:2] % 3, vector[1:, None], (5, 1))
        return jnp.asarray(self.accumulator.apply((vector, rows), self.accumulator.step - age), jnp.int32)

    def _loop(self, loop: Loop, start: Any, last: Any, inner: Callable[..., Any]) -> list[Any]:
        def step(c: Any, x: Any) -> Any:
            y = inner(loop.body, c, x)
            return y, KINDS["sub"](y, c)

        def again(c: Any) -> Any:
            within = c[0] < loop.turns
            if loop.watched is None:
                return within
            seen = as_value(self._variable(loop.watched).read())
            return jnp.logical_and(within, (seen + c[1] * (loop.watched % 2)).sum() % 5 != 0)

        def turn(c: Any) -> Any:
            return c[0] + 1, inner(loop.body, c[1])

        xs = bounded(last + jnp.arange(loop.turns, dtype=jnp.float32)[:, None])
        match loop.how:
            case "scan":
                carry, ys = self.scan(step, start, xs, reverse=loop.reverse)
                return [carry, bounded(ys.sum(0))]
            case "map":
                return [bounded(self.map(lambda x: inner(loop.body, x), xs).sum(0))]
            case "fori":
                return [self.fori_loop(0, loop.turns, lambda i, c: inner(loop.body, bounded(c + i)), start)]
            case "while":
                return [self.while_loop(again, turn, (jnp.int32(0), start))[1]]
            case "bounded":
                return [self.bounded_loop(again, turn, (jnp.int32(0), start), max_iters=loop.turns + 1)[1]]
        raise AssertionError(loop)

    scan = staticmethod(jax.lax.scan)
    map = staticmethod(jax.lax.map)
    fori_loop = staticmethod(jax.lax.fori_loop)
    while_loop = staticmethod(jax.lax.while_loop)
    bounded_loop = staticmethod(dflow.while_loop)
    switch = staticmethod(jax.lax.switch)
    divided_switch = staticmethod(jax.lax.switch)
    batch = staticmethod(lambda fn, xs: jax.vmap(fn)(xs))

    def within(self) -> Traced:
        """Return a machine for the body of a derivative, whose values are abstract."""
        return Traced(self.variables, self.queues, self.accumulator, self.seen)

    def log(self, value: Any) -> None:
        io_callback(lambda array: self.seen.append(np.asarray(array).tolist()), None, value, ordered=True)

    def call(self, how: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        return {"jit": jax.jit, "dflow.jit": dflow.jit, "checkpoint": jax.checkpoint}[how](fn)

    def custom(self, how: str, effects: Callable[..., Any], x: Any) -> Any:

        def fn(x: Any) -> Any:
            effects(jax.lax.stop_gradient(x))
            return ruled(x)

        return with_rule(how, fn)(x)

    def derive(self, how: str, fn: Callable[..., Any], wrt: Sequence[Any], x: Any) -> list[Any]:
        """Return the value of `fn` and its dense derivatives."""
        with warnings.catch_warnings():
            # A random program may differentiate by variables that it never reads.
            warnings.simplefilter("ignore", dflow.UnreadVariableWarning)
            return self._derived(how, fn, wrt, x)

    def _derived(self, how: str, fn: Callable[..., Any], wrt: Sequence[Any], x: Any) -> list[Any]:
        ones = [jnp.ones(v.shape, v.dtype) for v in wrt]
        match how:
            case "grad":
                grads = dflow.grad(lambda x: fn(x).sum(), wrt, argnums=0)(x)
            case "value_and_grad":
                grads = dflow.value_and_grad(lambda x: (fn(x).sum(), x), wrt, argnums=0, has_aux=True)(x)
            case "jvp":
                return list(dflow.jvp(fn, (x,), (jnp.ones_like(x),), variables=wrt, directions=ones))
            case "vjp":
                value, pull = dflow.vjp(fn, x, variables=wrt)
                grads = (value, pull(jnp.ones_like(x)))
            case _:
                grads = dflow.hvp(lambda x: fn(x).sum(), wrt, argnums=0)((ones, jnp.ones_like(x)), x)
        leaves = jax.tree_util.tree_leaves(grads, is_leaf=dflow.is_row_gradient)
        return [leaf.dense() if dflow.is_row_gradient(leaf) else leaf for leaf in leaves]


def ruled(x: Any) -> Any:
    return bounded(x * 3 - 1)


def with_rule(how: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with a rule that is not its derivative."""
    if how == "custom_jvp":
        forward = jax.custom_jvp(fn)
        forward.defjvp(lambda primals, tangents: (forward(*primals), 2 * tangents[0]))
        return forward
    backward = jax.custom_vjp(fn)
    backward.defvjp(lambda x: (backward(x), x), lambda x, cotangent: (bounded(cotangent * jnp.where(x > 0, 2, -1)),))
    return backward


class AtOnce(Traced):
    """A program with Python's control flow."""

    def scan(self, step: Callable[..., Any], carry: Any, xs: Any, *, reverse: bool) -> Any:
        """Like `jax.lax.scan`, with the results in the other order."""
        ys: list[Any] = []
        for x in xs[::-1] if reverse else xs:
            carry, y = step(carry, x)
            ys.append(y)
        return carry, jnp.stack(ys)

    def map(self, fn: Callable[..., Any], xs: Any) -> Any:
        return jnp.stack([fn(x) for x in xs])

    def fori_loop(self, start: int, stop: int, fn: Callable[..., Any], carry: Any) -> Any:
        for i in range(start, stop):
            carry = fn(i, carry)
        return carry

    def while_loop(self, test: Callable[..., Any], step: Callable[..., Any], carry: Any) -> Any:
        while (live := self._is_live(test(carry))) is True:
            carry = step(carry)
        return carry if live is False else self._divided_while(test, step, carry)

    @staticmethod
    def _is_live(test: Any) -> bool | None:
        try:
            return bool(test)
        except jax.errors.TracerBoolConversionError:
            return None  # each element of a batch has its own condition

    def _divided_while(self, test: Callable[..., Any], step: Callable[..., Any], carry: Any) -> Any:
        for _ in range(MOST_TURNS):
            live = test(carry)
            carry = tuple(jnp.where(live, new, old) for new, old in zip(step(carry), carry, strict=True))
        return carry

    def bounded_loop(self, test: Callable[..., Any], step: Callable[..., Any], carry: Any, *, max_iters: int) -> Any:
        return self.while_loop(test, step, carry)

    def switch(self, index: Any, branches: Sequence[Callable[..., Any]]) -> Any:
        return branches[int(index)]()

    def divided_switch(self, index: Any, branches: Sequence[Callable[..., Any]]) -> Any:
        """Like `jax.lax.switch`, where each element of a batch takes its own branch."""
        return jax.lax.select_n(index, *[jnp.asarray(branch()) for branch in branches])

    def call(self, how: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        return fn

    def log(self, value: Any) -> None:
        self.seen.append(np.asarray(value).tolist())
