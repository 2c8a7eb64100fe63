"""A mistake raises an error that states the fact, the user's line, and the program that works."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow

HERE = Path(__file__).name
DEADLINE_S = 60.0
SPEC = jax.ShapeDtypeStruct((), jnp.float32)


class Made:
    """The variables, functions and queues of the cases, made again for each case."""

    def __init__(self) -> None:
        self.w = dflow.Variable(jnp.zeros(3), name="w")
        self.n = dflow.Variable(0, name="n")
        self.kernel = dflow.variables({"dense": {"kernel": jnp.zeros(3)}})["dense"]["kernel"]
        self.queue = dflow.FIFOQueue(2, SPEC, name="queue")
        self.optimizer = dflow.Optimizer(optax.adam(0.1), [self.w])

    def loss(self) -> Any:
        return (self.w**2).sum()


def in_place(made: Made, symbol: str) -> None:
    exec(compile(f"v {symbol} 2.0", HERE, "exec"), {"v": made.w})


def leak(made: Made) -> Any:
    kept: list[Any] = []
    with pytest.warns(dflow.LeakedTracerWarning):
        dflow.jit(lambda x: kept.append(x * 2))(jnp.ones(3))
    return dflow.jit(lambda: made.w + kept[0])()


def unhashable(fn: Callable[..., Any], first: Any) -> Any:
    jitted = functools.partial(dflow.jit, static_argnames="config")(fn)
    if first is not None:
        jitted(1.0, config=first)
    return jitted(1.0, config={"a": 1})


def unbounded(x: Any) -> Any:
    return jax.lax.while_loop(lambda y: y < 3.0, lambda y: y * 2.0 + 1.0, x)


def closed(made: Made) -> None:
    made.queue.close()
    made.queue.enqueue(1.0)


#: A mistake, the class of its error, the fact in the message, and the remedy.
CASES: dict[str, tuple[Callable[[Made], Any], type[BaseException], str, str]] = {
    "text for a variable": (
        lambda made: made.w.assign("zeros"),
        dflow.VariableShapeError,
        "variable 'w' holds f32[3] but assign was given a str, which is no array",
        "give it an array or a number",
    ),
    "nothing for a variable": (
        lambda made: dflow.jit(lambda: made.w.assign_add(None))(),
        dflow.VariableShapeError,
        "variable 'w' holds f32[3] but assign_add was given a NoneType, which is no array",
        "give it an array or a number",
    ),
    "a first value that is a dict": (
        lambda made: dflow.Variable({"a": jnp.zeros(3)}, name="d"),
        dflow.VariableError,
        "variable 'd' cannot begin with a dict, which is no array",
        "dflow.variables(tree)",
    ),
    "a first value that is text": (
        lambda made: dflow.Variable("w"),
        dflow.VariableError,
        "cannot begin with a str, which is no array",
        "give it an array, a number, or a function without arguments that returns one",
    ),
    "an initialiser that gives a dict": (
        lambda made: dflow.Variable(lambda: {"a": jnp.zeros(3)}, name="d"),
        dflow.VariableError,
        "variable 'd' cannot begin with a dict, which is no array",
        "dflow.variables(tree)",
    ),
    "an initialiser with arguments": (
        lambda made: dflow.Variable(jax.nn.initializers.normal(), name="d"),
        dflow.VariableError,
        "the initialiser of variable 'd' is called without arguments, but needs key, shape",
        "wrap it: dflow.Variable(lambda: initialiser(key, shape))",
    ),
    "near what is no variable": (
        lambda made: dflow.Variable(0.0, near="w"),  # type: ignore[arg-type]
        dflow.VariableError,
        "near='w' is a str, not a variable",
        "give it the variable whose task this one shall share",
    ),
    "an attribute that is not there": (
        lambda made: setattr(made.w, "value", 1.0),
        dflow.VariableError,
        "variable 'w' has no attribute 'value' to set",
        "write w.assign(value)",
    ),
    "plus and assign": (
        lambda made: in_place(made, "+="),
        dflow.VariableError,
        "variable 'w' is updated by an in-place add",
        "write w.assign_add(...)",
    ),
    "power and assign": (
        lambda made: in_place(made, "**="),
        dflow.VariableError,
        "variable 'w' is updated by an in-place pow",
        "write w.assign(w ** ...)",
    ),
    "an index that is assigned to": (
        lambda made: made.kernel.__setitem__(0, 1.0),
        dflow.VariableError,
        "variable 'dense/kernel' cannot be assigned to by index",
        "write variable.scatter_update(indices, rows), or variable.assign(whole)",
    ),
    "a variable in plain jit": (
        lambda made: jax.jit(lambda x: made.kernel + x)(1.0),
        RuntimeError,
        "variable 'dense/kernel' is used in a function that JAX compiles without dflow",
        "or pass it the variable as an argument",
    ),
    "a variable formatted in traced code": (
        lambda made: dflow.jit(lambda: f"{made.n:d}")(),
        dflow.VariableError,
        "variable 'n' is formatted in traced code, where its value is not known",
        "jax.debug.print",
    ),
    "values in another structure": (
        lambda made: dflow.assign({"a": made.w}, {"b": jnp.zeros(3)}),
        dflow.VariableError,
        "the values do not have the structure of the variables",
        "give values of the structure {'a': *}, not {'b': *}",
    ),
    "arrays in the place of variables": (
        lambda made: dflow.assign([jnp.zeros(3)], [jnp.zeros(3)]),
        dflow.VariableError,
        "assign was given ArrayImpl among its variables",
        "dflow.assign(variables, values)",
    ),
    "no variables": (
        lambda made: dflow.grad(made.loss)(),
        TypeError,
        "nothing to differentiate: the function has no arguments, and no variables were given",
        "dflow.grad(loss, [w])",
    ),
    "an empty list of variables": (
        lambda made: dflow.value_and_grad(made.loss, [])(),
        TypeError,
        "nothing to differentiate",
        "dflow.value_and_grad(loss, [w])",
    ),
    "variables before the function": (
        lambda made: dflow.grad([made.w], made.loss),  # type: ignore[arg-type]
        TypeError,
        "grad was given list to differentiate, which is no function",
        "the function comes first: dflow.grad(loss, [w])",
    ),
    "the value of the loss": (
        lambda made: dflow.value_and_grad(made.loss(), [made.w]),
        TypeError,
        "value_and_grad was given ArrayImpl to differentiate, which is no function",
        "dflow.value_and_grad(loss, [w])",
    ),
    "optimizer with swapped arguments": (
        lambda made: dflow.Optimizer([made.w], optax.adam(0.1)),  # type: ignore[arg-type]
        TypeError,
        "an optimizer was given its variables first and the transformation second",
        "dflow.Optimizer(optax.adam(1e-3), variables)",
    ),
    "optimizer with a function that was not called": (
        lambda made: dflow.Optimizer(optax.adam, [made.w]),  # type: ignore[arg-type]
        TypeError,
        "an optimizer was given the function adam instead of a transformation",
        "call it: dflow.Optimizer(adam(1e-3), variables)",
    ),
    "optimizer with a number": (
        lambda made: dflow.Optimizer(0.1, [made.w]),  # type: ignore[arg-type]
        TypeError,
        "an optimizer was given a float instead of a transformation",
        "dflow.Optimizer(optax.adam(1e-3), variables)",
    ),
    "half a step of a counter": (
        lambda made: dflow.Variable(5, name="counter").assign_add(0.5),
        TypeError,
        "variable 'counter' holds i32[] but assign_add was given ~f32[]",
        "make the variable a float, or round first: jnp.round(number).astype(jnp.int32)",
    ),
    "the pair of value and gradients": (
        lambda made: made.optimizer.apply(dflow.value_and_grad(made.loss, [made.w])()),
        TypeError,
        "apply: expected gradients, got a pair whose second part fits the variables",
        "value, gradients = dflow.value_and_grad(loss, variables)()",
    ),
    "a misspelt option of grad": (
        lambda made: dflow.grad(made.loss, vars=[made.w]),
        TypeError,
        "grad() got an unexpected keyword argument 'vars'",
        "did you mean variables?",
    ),
    "a misspelt option of a strategy": (
        lambda made: dflow.distributed.Sync(dflow.connect(), backup_worker=1),
        TypeError,
        "__init__() got an unexpected keyword argument 'backup_worker'",
        "did you mean backup_workers?",
    ),
    "a misspelt setting of a vocabulary": (
        lambda made: dflow.Vocabulary(admit=2),  # type: ignore[call-arg]
        TypeError,
        "__init__() got an unexpected keyword argument 'admit'",
        "did you mean admit_after?",
    ),
    "a misspelt option of a queue": (
        lambda made: dflow.FIFOQueue(2, jnp.ones(3), nam="q"),  # type: ignore[call-arg]
        TypeError,
        "__init__() got an unexpected keyword argument 'nam'",
        "did you mean name?",
    ),
    "a misspelt option of connect": (
        lambda made: dflow.connect(collective=True),  # type: ignore[call-arg]
        TypeError,
        "connect() got an unexpected keyword argument 'collective'",
        "did you mean collectives?",
    ),
    "strings as ids": (
        lambda made: dflow.jit(lambda ids: ids)(np.array(["one", "two"])),
        TypeError,
        "Error interpreting argument",
        "step(dflow.wide_ids(ids))",
    ),
    "the loss": (
        lambda made: made.optimizer.apply(made.loss()),
        TypeError,
        "apply: expected gradients of 1 variables, got a scalar, such as a loss",
        "write value, gradients = dflow.value_and_grad(loss, variables)() and apply the gradients",
    ),
    "a gradient without its list": (
        lambda made: made.optimizer.apply(jnp.zeros(3)),
        TypeError,
        "the gradients have the structure *, but the variables [*]",
        "differentiate with respect to the very variables the optimizer was made for",
    ),
    "a static argument that is not hashable": (
        lambda made: unhashable(lambda x, config: x, None),
        ValueError,
        "Non-hashable static arguments are not supported",
        "give it as something hashable, such as a tuple, a frozenset or a frozen dataclass",
    ),
    "one in a function with state, the second time": (
        lambda made: unhashable(lambda x, config: x + made.n, "first"),
        ValueError,
        "Non-hashable static arguments are not supported",
        "give it as something hashable, such as a tuple, a frozenset or a frozen dataclass",
    ),
    "a Python if on a variable": (
        lambda made: dflow.jit(lambda: 1 if made.n > 0 else 2)(),
        jax.errors.TracerBoolConversionError,
        "Attempted boolean conversion of traced array",
        "jax.lax.cond",
    ),
    "a Python float of a variable": (
        lambda made: dflow.jit(lambda: float(made.n))(),
        jax.errors.ConcretizationTypeError,
        "Abstract tracer value encountered where concrete value is expected",
        "dflow.eager()",
    ),
    "a Python range of a variable": (
        lambda made: dflow.jit(lambda: list(range(made.n)))(),
        jax.errors.TracerIntegerConversionError,
        "was called on traced array",
        "jax.lax.fori_loop",
    ),
    "what is no function": (
        lambda made: dflow.jit(3),  # type: ignore[call-overload]
        TypeError,
        "Expected a callable value, got 3",
        "decorate a function",
    ),
    "a wrong option": (
        lambda made: dflow.jit(lambda x: x, static_argnum=0),
        TypeError,
        "jit() got an unexpected keyword argument 'static_argnum'",
        "did you mean static_argnums or static_argnames",
    ),
    "a wrong keyword of save": (
        lambda made: dflow.save("nowhere", made.w, overwite=True),  # type: ignore[call-arg]
        TypeError,
        "save() got an unexpected keyword argument 'overwite'",
        "did you mean overwrite?",
    ),
    "a wrong keyword of restore": (
        lambda made: dflow.restore("nowhere", made.w, strct=False),  # type: ignore[call-arg]
        TypeError,
        "restore() got an unexpected keyword argument 'strct'",
        "did you mean strict?",
    ),
    "a wrong keyword of load": (
        lambda made: dflow.load("nowhere", name="a"),  # type: ignore[call-arg]
        TypeError,
        "load() got an unexpected keyword argument 'name'",
        "the options are path, prefix",
    ),
    "a wrong keyword of batches": (
        lambda made: dflow.data.batches([1, 2], 1, suffle=2),  # type: ignore[call-arg]
        TypeError,
        "batches() got an unexpected keyword argument 'suffle'",
        "did you mean shuffle?",
    ),
    "a wrong keyword of feed": (
        lambda made: dflow.data.feed([1, 2], made.queue, thread=2),  # type: ignore[call-arg]
        TypeError,
        "feed() got an unexpected keyword argument 'thread'",
        "did you mean threads?",
    ),
    "a value that leaked from a trace": (
        leak,
        jax.errors.UnexpectedTracerError,
        "Encountered an unexpected tracer",
        "return the value from the function that made it",
    ),
    "a closed queue": (
        closed,
        dflow.QueueClosed,
        "queue 'queue' is closed and cannot take 1 element",
        "close it after the last enqueue, or make a new queue",
    ),
    "a queue that stays empty": (
        lambda made: dflow.jit(lambda: made.queue.dequeue(timeout_s=0.01))(),
        dflow.DeadlineExceeded,
        "queue 'queue' could not give 1 element within 0.01 s",
        "does every thread that enqueues still run? timeout_s says how long to wait",
    ),
    "a queue that stays full": (
        lambda made: made.queue.enqueue_many(jnp.zeros(3), timeout_s=0),
        dflow.DeadlineExceeded,
        "queue 'queue' could not take 3 elements within 0 s",
        "does every thread that dequeues still run? timeout_s says how long to wait",
    ),
    "no deadline": (
        lambda made: made.queue.dequeue(timeout_s=None),  # type: ignore[arg-type]
        ValueError,
        "queue 'queue' was given timeout_s=None",
        "give a number of seconds that is known when the program is traced",
    ),
    "a deadline that is not a number": (
        lambda made: made.queue.dequeue(timeout_s=float("nan")),
        ValueError,
        "queue 'queue' was given timeout_s=nan",
        "give a number of seconds that is known when the program is traced",
    ),
    "a deadline that is traced": (
        lambda made: dflow.jit(lambda t: made.queue.dequeue(timeout_s=t))(1.0),
        ValueError,
        "queue 'queue' was given timeout_s=",
        "give a number of seconds that is known when the program is traced",
    ),
    "a queue with swapped arguments": (
        lambda made: dflow.FIFOQueue(SPEC, 4, name="swapped"),  # type: ignore[arg-type]
        ValueError,
        "queue 'swapped' cannot have the capacity ShapeDtypeStruct(shape=(), dtype=float32)",
        "give a whole number of elements, from 1",
    ),
    "an option of Variable misspelt": (
        lambda made: dflow.Variable(0.0, trainabel=False),  # type: ignore[call-arg]
        TypeError,
        "unexpected keyword argument 'trainabel'",
        "did you mean trainable?",
    ),
    "an option of Optimizer misspelt": (
        lambda made: dflow.Optimizer(optax.sgd(0.1), [made.w], nme="sgd"),  # type: ignore[call-arg]
        TypeError,
        "unexpected keyword argument 'nme'",
        "did you mean name?",
    ),
    "a sharding without a mesh": (
        lambda made: dflow.Variable(jnp.zeros(8), sharding=jax.sharding.PartitionSpec("d")),  # type: ignore[arg-type]
        dflow.VariableError,
        "is no jax.sharding.Sharding",
        "jax.sharding.NamedSharding(mesh, spec)",
    ),
    "variables for gradients": (
        lambda made: made.optimizer.apply([made.w]),
        TypeError,
        "apply: expected a gradient, got variable 'w'",
        "by dflow.grad(loss, variables)",
    ),
    "a kernel's static argument by position": (
        lambda made: dflow.kernel(lambda x, n: x.reshape(n, -1))(jnp.zeros(4), 2),
        TypeError,
        "was given 2 by position, as an array",
        "give what is static by keyword",
    ),
    "an option of export misspelt": (
        lambda made: dflow.export(lambda x: x, SPEC, platform=("cpu",)),
        TypeError,
        "export was given 'platform', which it does not take",
        "did you mean platforms?",
    ),
    "a static argument misspelt": (
        lambda made: dflow.jit(lambda x, mode: x + made.w, static_argnames="mod"),
        ValueError,
        "Jitted function has invalid argnames {'mod'}",
        "the parameters are x, mode",
    ),
    "text for an array": (
        lambda made: dflow.jit(lambda x, mode: x + made.w)(1.0, "fast"),
        TypeError,
        "The problematic value is of type <class 'str'>",
        "name it static: dflow.jit(fn, static_argnames='mode')",
    ),
    "text for an array, after arrays": (
        lambda made: [dflow.jit(lambda x, mode: x + made.w)(1.0, mode) for mode in (1.0, "fast")],
        TypeError,
        "The problematic value is of type <class 'str'>",
        "name it static: dflow.jit(fn, static_argnames='mode')",
    ),
    "a traced shape": (
        lambda made: dflow.jit(lambda n: made.w.reshape(n, -1))(3),
        TypeError,
        "Shapes must be 1D sequences of concrete values",
        "name what Python needs in static_argnames",
    ),
    "a traced mask": (
        lambda made: dflow.jit(lambda: made.w.read()[made.w > 0])(),
        IndexError,
        "Array boolean indices must be concrete",
        "jnp.where",
    ),
    "a gradient through a loop without a bound": (
        lambda made: dflow.grad(lambda: unbounded(made.w.sum()), made.w)(),
        ValueError,
        "Reverse-mode differentiation does not work for lax.while_loop",
        "dflow.while_loop(cond, body, init, max_iters=...)",
    ),
    "a traced gradient through a loop without a bound": (
        lambda made: dflow.jit(jax.grad(unbounded))(1.0),
        ValueError,
        "Reverse-mode differentiation does not work for lax.while_loop",
        "dflow.while_loop(cond, body, init, max_iters=...)",
    ),
    "a container that is a number": (
        lambda made: dflow.container(3).__enter__(),  # type: ignore[arg-type]
        ValueError,
        "3 is not a container's name",
        "use letters",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_told_with_its_line_and_its_remedy(case: str) -> None:
    run, kind, fact, remedy = CASES[case]
    with pytest.raises(kind) as caught:
        run(Made())
    told = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert fact in told
    assert remedy in told
    assert re.search(rf"at \S*{HERE}:\d+", told)


def test_python_tells_the_near_name_for_a_misspelt_one() -> None:
    program = """
import sys
import dflow
for misspelt in ("dflow.Varible", "dflow.Variable(0.0).asign", "dflow.Variable(0.0).shap"):
    try:
        eval(misspelt)
    except AttributeError:
        sys.excepthook(*sys.exc_info())
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert re.findall(r"Did you mean: '(\w+)'\?\n", ran.stderr) == ["Variable", "assign", "shape"]


def test_advice_is_given_once_however_deep_the_call() -> None:
    inner = dflow.jit(float)
    with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
        dflow.jit(inner)(1.0)
    assert sum("dflow.eager()" in note for note in caught.value.__notes__) == 1
