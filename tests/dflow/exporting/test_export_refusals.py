"""Functions that cannot be exported are refused with their line and a remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas as pl

import dflow

HERE = Path(__file__).name
SPEC = dflow.spec("b, 3", jnp.float32)
SCALAR = dflow.spec("", jnp.float32)


@jax.tree_util.register_pytree_node_class
class Own:
    """A pytree class that only this file knows."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def tree_flatten(self) -> Any:
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> Own:
        return cls(*children)


class Made:
    """The variables, functions and queues of the cases, made again for each case."""

    def __init__(self) -> None:
        self.w = dflow.Variable(jnp.zeros(3), name="w")
        self.queue = dflow.FIFOQueue(2, jax.ShapeDtypeStruct((), jnp.float32), name="queue")
        self.total = dflow.ConditionalAccumulator(jax.ShapeDtypeStruct((), jnp.float32), name="total")

    def add(self, x: Any) -> Any:
        return self.total.apply(x)


def two_of_a_name(made: Made) -> Any:
    other = dflow.Variable(jnp.ones(3), name="w")
    return dflow.export(lambda x: x * made.w + other, SPEC)


def two_of_a_name_apart(made: Made) -> Any:
    other = dflow.Variable(jnp.ones(3), name="w")
    return dflow.export({"one": (lambda x: x * made.w, SPEC), "two": (lambda x: x * other, SPEC)})


def by_callback(x: Any) -> Any:
    return jax.pure_callback(np.sin, x, x)


def by_a_kernel(x: Any) -> Any:
    def body(given: Any, result: Any) -> None:
        result[...] = given[...] * 2

    return pl.pallas_call(body, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def in_a_loop(made: Made) -> Any:
    def body(_: Any, x: Any) -> Any:
        jax.debug.print("{}", x)
        return x + 1

    return dflow.export(lambda x: jax.lax.fori_loop(0, 3, body, x), SCALAR)


def in_a_scope(made: Made) -> Any:
    def fn(x: Any) -> Any:
        with dflow.device("ps:0"):
            return x * 2

    return dflow.export(fn, SPEC)


def a_ref(made: Made) -> Any:
    ref = jax.new_ref(jnp.zeros(3))
    return dflow.export(lambda x: x + ref[...], SPEC)


def within(made: Made) -> Any:
    return dflow.jit(lambda x: dflow.export(lambda y: y, SPEC) and x)(1.0)


def differentiable_while(made: Made) -> Any:
    return dflow.export(lambda x: jax.lax.while_loop(lambda v: v < 3, lambda v: v + 1, x), SCALAR, vjp_order=1)


class Refused(NamedTuple):
    """A call, and the remedy in the message."""

    call: Callable[[Made], Any]
    remedy: str


#: By the fact in the message, in which `HERE` stands for a line of this file.
CASES: dict[str, Refused] = {
    "call cannot be exported: it uses queue 'queue' (dequeue), which is of this process\n  at HERE": Refused(
        lambda made: dflow.export(lambda: made.queue.dequeue() + 1),
        "export a function that takes what it would dequeue or take as arguments, and gives what it would put in",
    ),
    "train cannot be exported: it uses accumulator 'total' (apply), which is of this process\n  at HERE": Refused(
        lambda made: dflow.export({"train": (made.add, SCALAR)}), "export a function that takes"
    ),
    "by_callback cannot be exported: pure_callback calls a Python function, which an export does not hold": Refused(
        lambda made: dflow.export(by_callback, SPEC),
        "write it in jax.numpy, or call it before or after what is exported",
    ),
    "cannot be exported: debug_print prints or calls back while it runs\n  at HERE": Refused(
        in_a_loop, "leave it out of the function that is exported"
    ),
    "fn cannot be exported: mul is placed on ps:0, and an export is for one device\n  at HERE": Refused(
        in_a_scope, "export it without dflow.device"
    ),
    "closes over Ref{float32[3]}, which is no array": Refused(a_ref, "keep that in a dflow.Variable"),
    "serve cannot be exported: x['a'] is a Own, which needs the code to load\n  at HERE": Refused(
        lambda made: dflow.export({"serve": (lambda x: x["a"].value, {"a": Own(SPEC)})}),
        "export a function that takes and gives dicts",
    ),
    "call cannot be exported: result[0] is a Own": Refused(
        lambda made: dflow.export(lambda x: [Own(x)], SPEC), "export a function that takes and gives dicts"
    ),
    "call uses two variables named 'w'; an export identifies variables by their names\n  at HERE": Refused(
        two_of_a_name, "give one of them another name"
    ),
    "two uses another variable called 'w' than the functions before it\n  at HERE": Refused(
        two_of_a_name_apart, "give one of them another name"
    ),
    "call cannot be exported for cuda, tpu: eig is in the way\n  at HERE": Refused(
        lambda made: dflow.export(lambda x: jnp.linalg.eig(x)[0], jnp.eye(3)),
        "leave the platform out: platforms=('cpu',)",
    ),
    "by_a_kernel cannot be exported for cpu: pallas_call is in the way\n  at HERE": Refused(
        lambda made: dflow.export(by_a_kernel, jnp.ones((8, 128)), platforms=("cpu", "tpu")),
        "leave the platform out: platforms=('tpu',)",
    ),
    "call cannot be exported for cpu: ffi_call of 'mine' is in the way\n  at HERE": Refused(
        lambda made: dflow.export(lambda x: jax.ffi.ffi_call("mine", x)(x), SPEC, platforms=["cpu"]),
        "disabled_checks=[jax.export.DisabledSafetyCheck.custom_call('mine')]",
    ),
    "call cannot be exported with vjp_order=1: Reverse-mode differentiation does not work for lax.while_loop": Refused(
        differentiable_while, "export it with vjp_order=0"
    ),
    "an argument or a result of call is of i2, which the files of JAX": Refused(
        lambda made: dflow.export(lambda x: x.astype(jnp.float32), jnp.zeros(3, jnp.int2), platforms=["cpu"]),
        "keep it as int8 or uint8",
    ),
    "call cannot be exported: the letters in its shapes are of two scopes": Refused(
        lambda made: dflow.export(
            lambda x, y: (x, y), SPEC, jax.ShapeDtypeStruct(jax.export.symbolic_shape("b"), jnp.float32)
        ),
        "make all of them with dflow.spec, or with one jax.export.SymbolicScope",
    ),
    "call is a Variable, which is no function\n  at HERE": Refused(
        lambda made: dflow.export(made.w),
        "write dflow.export(fn, *specs), or dflow.export({'name': (fn, *specs)}) for several",
    ),
    "functions are exported by name, and arguments are given beside them\n  at HERE": Refused(
        lambda made: dflow.export({"serve": lambda x: x}, SPEC), "dflow.export({'serve': (fn, *specs)})"
    ),
    "functions are exported by name, and there is none": Refused(lambda made: dflow.export({}), "give each its own"),
    "'to serve' is no name of a function\n  at HERE": Refused(
        lambda made: dflow.export({"to serve": (lambda x: x, SPEC)}), "letters, digits and '_'"
    ),
    "'save' is what a loaded export has itself\n  at HERE": Refused(
        lambda made: dflow.export({"save": (lambda x: x, SPEC)}), "give it another name"
    ),
    "platforms=('gpu',)\n  at HERE": Refused(
        lambda made: dflow.export(lambda x: x, SPEC, platforms=("gpu",)), "give one or more of cpu, cuda, rocm, tpu"
    ),
    "platforms='cpu'": Refused(lambda made: dflow.export(lambda x: x, SPEC, platforms="cpu"), "give one or more of"),
    "export is called inside traced code\n  at HERE": Refused(within, "call it outside of any function"),
    "'b 3' is no shape: ": Refused(
        lambda made: dflow.spec("b 3", jnp.float32),
        "write the dimensions with commas between: dflow.spec('b, 784', jnp.float32)",
    ),
    "there is no function 'serve'\n  at HERE": Refused(
        lambda made: dflow.export(lambda x: x, SPEC).mlir_module("serve"), "name one of call"
    ),
    "there are 2 functions\n  at HERE": Refused(
        lambda made: dflow.export({"one": (lambda x: x, SPEC), "two": (lambda x: x, SPEC)}).mlir_module(),
        "name one of one, two",
    ),
    "call was exported for cpu and tpu, not for 'cuda'\n  at HERE": Refused(
        lambda made: dflow.export(lambda x: x, SPEC, platforms=("cpu", "tpu")).mlir_module(platform="cuda"),
        "name one of these, or give platforms to dflow.export",
    ),
}


@pytest.mark.parametrize("fact", CASES)
def test_what_cannot_be_exported_is_named_with_its_line_and_a_remedy(fact: str) -> None:
    call, remedy = CASES[fact]
    with pytest.raises(dflow.ExportError) as caught:
        call(Made())
    assert fact in re.sub(rf"\S*{HERE}:\d+", "HERE", str(caught.value))
    assert remedy in str(caught.value)


def test_what_is_refused_in_one_platform_is_exported_for_the_others() -> None:
    made = dflow.export(lambda x: jnp.linalg.eig(x)[0], jnp.eye(3), platforms=("cpu",))
    assert str(made).endswith("  for cpu")


def test_a_target_that_is_allowed_is_exported() -> None:
    allowed = jax.export.DisabledSafetyCheck.custom_call("mine")
    made = dflow.export(
        lambda x: jax.ffi.ffi_call("mine", x)(x), jnp.ones(3), platforms=["cpu"], disabled_checks=[allowed]
    )
    assert "custom_call @mine" in made.mlir_module()


def test_an_optimizer_is_not_taken_for_a_device_scope() -> None:
    w = dflow.Variable(jnp.ones(3), name="w")
    optimizer = dflow.Optimizer(optax.adam(0.1), [w], name="adam")
    made = dflow.export(dflow.jit(lambda: optimizer.apply([w.read()])))
    assert set(made.variables) == {"w", "adam/0/count", "adam/0/mu/w", "adam/0/nu/w"}


def test_an_export_is_not_saved_to_an_object_store() -> None:
    made = dflow.export(lambda x: x, jnp.ones(3))
    with pytest.raises(dflow.ExportError, match="expected a local path, got s3://bucket/model"):
        made.save("s3://bucket/model")


@pytest.mark.parametrize(
    "needs_the_size",
    [
        lambda x: x.sum() if x.shape[0] > 3 else x.max(),
        lambda x: jnp.zeros(int(x.shape[0])),
        lambda x: jnp.arange(x.shape[0], dtype=np.int8).reshape(2, -1),
    ],
    ids=["compares it", "makes it a number", "divides it"],
)
def test_an_op_that_needs_an_open_size_is_refused_with_the_size(needs_the_size: Any) -> None:
    with pytest.raises(dflow.ExportError, match=r"take any size of b, got one that needs(.|\n)*export it for one size"):
        dflow.export(needs_the_size, dflow.spec("b", jnp.float32))
    dflow.export(needs_the_size, dflow.spec("4", jnp.float32))
