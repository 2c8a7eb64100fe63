"""A mistake or a bad number raises an error that states the fact, the user's line, and the program that works."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.calls.number_checks import run_checked

HERE = Path(__file__).name
DEADLINE_S = 60.0
SPEC = jax.ShapeDtypeStruct((), jnp.float32)


class Made:
    """The variables, functions and queues of the cases, made again for each case."""

    def __init__(self) -> None:
        self.w = dflow.Variable(jnp.zeros(3), name="w")
        self.n = dflow.Variable(0, name="n")
        self.queue = dflow.FIFOQueue(2, SPEC, name="queue")
        self.optimizer = dflow.Optimizer(optax.adam(0.1), [self.w])

    def loss(self) -> Any:
        return (self.w**2).sum()


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


class Mistake(NamedTuple):
    """A call, the class of its error, and the remedy in the message."""

    run: Callable[[Made], Any]
    kind: type[BaseException]
    remedy: str


#: By a fact in the message.
CASES: dict[str, Mistake] = {
    "variable 'w' holds f32[3] but assign was given a str, which has no numbers": Mistake(
        lambda made: made.w.assign("zeros"), dflow.VariableShapeError, "give it an array or a number"
    ),
    "variable 'd' cannot begin with a dict, which is no array": Mistake(
        lambda made: dflow.Variable({"a": jnp.zeros(3)}, name="d"), dflow.VariableError, "dflow.variables(tree)"
    ),
    "cannot begin with a str, which has no numbers": Mistake(
        lambda made: dflow.Variable("w"),
        dflow.VariableError,
        "give it an array, a number, or a function without arguments that returns one",
    ),
    "the initialiser of variable 'd' is called without arguments, but needs key, shape": Mistake(
        lambda made: dflow.Variable(jax.nn.initializers.normal(), name="d"),
        dflow.VariableError,
        "wrap it: dflow.Variable(lambda: initialiser(key, shape))",
    ),
    "variable 'w' has no attribute 'value' to set": Mistake(
        lambda made: setattr(made.w, "value", 1.0), dflow.VariableError, "write w.assign(value)"
    ),
    "variable 'w' cannot be assigned to by index": Mistake(
        lambda made: made.w.__setitem__(0, 1.0),
        dflow.VariableError,
        "write w.scatter_update(indices, rows), or w.assign(whole)",
    ),
    "near='w' is a str, not a variable": Mistake(
        lambda made: dflow.Variable(0.0, near="w"),
        dflow.VariableError,
        "give it the variable whose task this one shall share",
    ),
    "variable 'n' is formatted in traced code, where its value is not known": Mistake(
        lambda made: dflow.jit(lambda: f"{made.n:d}")(), dflow.VariableError, "jax.debug.print"
    ),
    "the values do not have the structure of the variables": Mistake(
        lambda made: dflow.assign({"a": made.w}, {"b": jnp.zeros(3)}),
        dflow.VariableError,
        "give values of the structure {'a': *}, not {'b': *}",
    ),
    "assign was given ArrayImpl among its variables": Mistake(
        lambda made: dflow.assign([jnp.zeros(3)], [jnp.zeros(3)]),
        dflow.VariableError,
        "dflow.assign(variables, values)",
    ),
    "nothing to differentiate: the function has no arguments, and no variables were given": Mistake(
        lambda made: dflow.grad(made.loss)(), TypeError, "dflow.grad(loss, [w])"
    ),
    "grad was given list to differentiate, which is no function": Mistake(
        lambda made: dflow.grad([made.w], made.loss), TypeError, "the function comes first: dflow.grad(loss, [w])"
    ),
    "an optimizer was given its variables first and the transformation second": Mistake(
        lambda made: dflow.Optimizer([made.w], optax.adam(0.1)),
        TypeError,
        "dflow.Optimizer(optax.adam(1e-3), variables)",
    ),
    "an optimizer was given the function adam instead of a transformation": Mistake(
        lambda made: dflow.Optimizer(optax.adam, [made.w]), TypeError, "call it: dflow.Optimizer(adam(1e-3), variables)"
    ),
    "an optimizer was given a float instead of a transformation": Mistake(
        lambda made: dflow.Optimizer(0.1, [made.w]), TypeError, "dflow.Optimizer(optax.adam(1e-3), variables)"
    ),
    "variable 'counter' holds i32[] but assign_add was given ~f32[]": Mistake(
        lambda made: dflow.Variable(5, name="counter").assign_add(0.5),
        TypeError,
        "make the variable a float, or round first: jnp.round(number).astype(jnp.int32)",
    ),
    "apply: expected gradients, got a pair whose second part fits the variables": Mistake(
        lambda made: made.optimizer.apply(dflow.value_and_grad(made.loss, [made.w])()),
        TypeError,
        "value, gradients = dflow.value_and_grad(loss, variables)()",
    ),
    "Error interpreting argument": Mistake(
        lambda made: dflow.jit(lambda day: day)(np.array(["2026-01-01"], "datetime64[D]")),
        TypeError,
        "times.astype(numpy.int64)",
    ),
    "apply: expected gradients of 1 variables, got a scalar, such as a loss": Mistake(
        lambda made: made.optimizer.apply(made.loss()),
        TypeError,
        "write value, gradients = dflow.value_and_grad(loss, variables)() and apply the gradients",
    ),
    "the gradients have the structure *, but the variables [*]": Mistake(
        lambda made: made.optimizer.apply(jnp.zeros(3)),
        TypeError,
        "differentiate with respect to the very variables the optimizer was made for",
    ),
    "Non-hashable static arguments are not supported": Mistake(
        lambda made: unhashable(lambda x, config: x, None),
        ValueError,
        "give it as something hashable, such as a tuple, a frozenset or a frozen dataclass",
    ),
    "An error occurred while trying to hash an object of type": Mistake(
        lambda made: unhashable(lambda x, config: x + made.n, "first"),
        ValueError,
        "give it as something hashable, such as a tuple, a frozenset or a frozen dataclass",
    ),
    "Attempted boolean conversion of traced array": Mistake(
        lambda made: dflow.jit(lambda: 1 if made.n > 0 else 2)(), jax.errors.TracerBoolConversionError, "jax.lax.cond"
    ),
    "Abstract tracer value encountered where concrete value is expected": Mistake(
        lambda made: dflow.jit(lambda: float(made.n))(), jax.errors.ConcretizationTypeError, "dflow.eager()"
    ),
    "was called on traced array": Mistake(
        lambda made: dflow.jit(lambda: list(range(made.n)))(),
        jax.errors.TracerIntegerConversionError,
        "jax.lax.fori_loop",
    ),
    "Expected a callable value, got 3": (lambda made: dflow.jit(3), TypeError, "decorate a function"),
    "jit() got an unexpected keyword argument 'static_argnum'": Mistake(
        lambda made: dflow.jit(lambda x: x, static_argnum=0),
        TypeError,
        "did you mean static_argnums or static_argnames",
    ),
    "load() got an unexpected keyword argument 'name'": Mistake(
        lambda made: dflow.load("nowhere", name="a"), TypeError, "the options are path, prefix"
    ),
    "Encountered an unexpected tracer": Mistake(
        leak, jax.errors.UnexpectedTracerError, "return the value from the function that made it"
    ),
    "queue 'queue' was given timeout_s=nan": Mistake(
        lambda made: made.queue.dequeue(timeout_s=float("nan")),
        ValueError,
        "give a number of seconds that is known when the program is traced",
    ),
    "queue 'swapped' cannot have the capacity ShapeDtypeStruct(shape=(), dtype=float32)": Mistake(
        lambda made: dflow.FIFOQueue(SPEC, 4, name="swapped"), ValueError, "give a whole number of elements, from 1"
    ),
    "is no jax.sharding.Sharding": Mistake(
        lambda made: dflow.Variable(jnp.zeros(8), sharding=jax.sharding.PartitionSpec("d")),
        dflow.VariableError,
        "jax.sharding.NamedSharding(mesh, spec)",
    ),
    "apply: expected a gradient, got variable 'w'": Mistake(
        lambda made: made.optimizer.apply([made.w]), TypeError, "by dflow.grad(loss, variables)"
    ),
    "was given 2 by position, as an array": Mistake(
        lambda made: dflow.kernel(lambda x, n: x.reshape(n, -1))(jnp.zeros(4), 2),
        TypeError,
        "give what is static by keyword",
    ),
    "export was given 'platform', which it does not take": Mistake(
        lambda made: dflow.export(lambda x: x, SPEC, platform=("cpu",)), TypeError, "did you mean platforms?"
    ),
    "Jitted function has invalid argnames {'mod'}": Mistake(
        lambda made: dflow.jit(lambda x, mode: x + made.w, static_argnames="mod"),
        ValueError,
        "the parameters are x, mode",
    ),
    "The problematic value is of type <class 'str'>": Mistake(
        lambda made: dflow.jit(lambda x, mode: x + made.w)(1.0, "fast"),
        TypeError,
        "static_argnames='mode'); or where it is an id, give an array or list of ids: [mode]",
    ),
    "problematic value is of type <class 'str'>": Mistake(
        lambda made: [dflow.jit(lambda x, mode: x + made.w)(1.0, mode) for mode in (1.0, "fast")],
        TypeError,
        "name it static: dflow.jit(fn, static_argnames='mode')",
    ),
    "Shapes must be 1D sequences of concrete values": Mistake(
        lambda made: dflow.jit(lambda n: made.w.reshape(n, -1))(3),
        TypeError,
        "name what Python needs in static_argnames",
    ),
    "Array boolean indices must be concrete": Mistake(
        lambda made: dflow.jit(lambda: made.w.read()[made.w > 0])(), IndexError, "jnp.where"
    ),
    "Reverse-mode differentiation does not work for lax.while_loop": Mistake(
        lambda made: dflow.grad(lambda: unbounded(made.w.sum()), made.w)(),
        ValueError,
        "dflow.while_loop(cond, body, init, max_iters=...)",
    ),
}

#: A call with a misspelt option, the word, and the option.
MISSPELT: tuple[tuple[Callable[[Made], Any], str, str], ...] = (
    (lambda made: dflow.grad(made.loss, vars=[made.w]), "vars", "variables"),
    (lambda made: dflow.Vocabulary(admit=2), "admit", "admit_after"),
    (lambda made: dflow.connect(collective=True), "collective", "collectives"),
    (lambda made: dflow.save("nowhere", made.w, overwite=True), "overwite", "overwrite"),
    (lambda made: dflow.data.batches([1, 2], 1, suffle=2), "suffle", "shuffle"),
    (lambda made: dflow.Optimizer(optax.sgd(0.1), [made.w], nme="sgd"), "nme", "name"),
)


def said(kind: type[BaseException], run: Callable[[Made], Any]) -> str:
    """Return the error with its notes, one of which has the line of the mistake."""
    with pytest.raises(kind) as caught:
        run(Made())
    words = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert re.search(rf"at \S*{HERE}:\d+", words)
    return words


@pytest.mark.parametrize("fact", CASES)
def test_a_mistake_is_told_with_its_line_and_its_remedy(fact: str) -> None:
    run, kind, remedy = CASES[fact]
    words = said(kind, run)
    assert fact in words
    assert remedy in words


@pytest.mark.parametrize(("run", "word", "option"), MISSPELT, ids=[option for *_, option in MISSPELT])
def test_a_misspelt_option_is_told_with_the_option_of_a_near_name(
    run: Callable[[Made], Any], word: str, option: str
) -> None:
    words = said(TypeError, run)
    assert f"got an unexpected keyword argument '{word}'" in words
    assert f"did you mean {option}?" in words


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


def test_the_op_is_named_and_the_variables_are_as_before() -> None:
    v = dflow.Variable(jnp.ones(2))

    @dflow.jit
    def step(x: Any) -> Any:
        v.assign_add(jnp.ones(2))
        return v + jnp.log(x)

    with jax.debug_nans(True):
        np.testing.assert_array_equal(step(1.0), [2, 2])
        for _ in range(2):
            with pytest.raises(FloatingPointError, match="nan") as caught:
                step(-1.0)
        np.testing.assert_array_equal(step(1.0), [3, 3])
    np.testing.assert_array_equal(v, [3, 3])
    assert "step" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_a_variable_that_becomes_nan_is_found() -> None:
    v = dflow.Variable(0.0)
    poison = dflow.jit(lambda x: v.assign(v / x))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        poison(0.0)
    assert float(v) == 0.0


def test_infinities_are_looked_for_when_asked_for() -> None:
    v = dflow.Variable(1.0)
    grow = dflow.jit(lambda x: v / x)
    assert float(grow(0.0)) == float("inf")
    with jax.debug_nans(True):
        assert float(grow(0.0)) == float("inf")
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match="inf"):
        grow(0.0)


def test_a_function_that_uses_queues_is_not_run_again() -> None:
    queue = dflow.FIFOQueue(4, jax.ShapeDtypeStruct((), jnp.float32))
    take = dflow.jit(lambda: jnp.log(queue.dequeue()))
    queue.enqueue(-1.0)
    queue.enqueue(1.0)
    with (
        jax.debug_nans(True),
        pytest.raises(FloatingPointError, match=r"invalid value \(nan\) encountered in <lambda>"),
    ):
        take()
    assert int(queue.size()) == 1


def test_donated_arguments_do_not_hide_the_error() -> None:
    v = dflow.Variable(1.0)
    f = dflow.jit(lambda x: jnp.log(x) * v, donate_argnums=0)
    f(jnp.ones(3))
    with (
        jax.debug_nans(True),
        pytest.raises(FloatingPointError, match=r"invalid value \(nan\) encountered in <lambda>"),
    ):
        f(-jnp.ones(3))


def test_what_others_write_to_variables_that_are_only_read_stays() -> None:
    v, seen = dflow.Variable(jnp.ones(2)), dflow.Variable(0.0)

    def meanwhile(x: Any) -> Any:
        seen.assign_add(1.0)
        return x

    @dflow.jit
    def step(x: Any) -> Any:
        v.assign_add(jnp.ones(2))
        return jnp.log(x) * jnp.float32(seen)

    dflow.jit(lambda: seen.assign(1.0))()
    step(1.0)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        run_checked("step", lambda: (meanwhile(0), step(-1.0))[1], [v, seen], {v.key}, lambda: None)
    assert (v.read().tolist(), float(seen)) == ([2, 2], 2.0)
