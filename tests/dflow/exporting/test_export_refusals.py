"""Functions that cannot be exported are refused with their line and a remedy."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback
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


#: A mistake, the fact in the message, and the remedy. `HERE` stands for a line of this file.
CASES: dict[str, tuple[Callable[[Made], Any], str, str]] = {
    "a queue": (
        lambda made: dflow.export(lambda: made.queue.dequeue() + 1),
        "call cannot be exported: it uses queue 'queue' (dequeue), which is of this process\n  at HERE",
        "export a function that takes what it would dequeue or take as arguments, and gives what it would put in",
    ),
    "an accumulator": (
        lambda made: dflow.export({"train": (made.add, SCALAR)}),
        "train cannot be exported: it uses accumulator 'total' (apply), which is of this process\n  at HERE",
        "export a function that takes",
    ),
    "a callback": (
        lambda made: dflow.export(by_callback, SPEC),
        "by_callback cannot be exported: pure_callback calls a Python function, which an export does not hold",
        "write it in jax.numpy, or call it before or after what is exported",
    ),
    "a callback with effects": (
        lambda made: dflow.export(lambda x: io_callback(np.sin, x, x), SPEC),
        "io_callback calls a Python function",
        "write it in jax.numpy",
    ),
    "a print in a loop": (
        in_a_loop,
        "cannot be exported: debug_print prints or calls back while it runs\n  at HERE",
        "leave it out of the function that is exported",
    ),
    "a device scope": (
        in_a_scope,
        "fn cannot be exported: mul is placed on ps:0, and an export is for one device\n  at HERE",
        "export it without dflow.device",
    ),
    "a jax.Ref": (a_ref, "closes over Ref{float32[3]}, which is no array", "keep that in a dflow.Variable"),
    "a class of the user's as argument": (
        lambda made: dflow.export({"serve": (lambda x: x["a"].value, {"a": Own(SPEC)})}),
        "serve cannot be exported: x['a'] is a Own, which needs the code to load\n  at HERE",
        "export a function that takes and gives dicts",
    ),
    "a class of the user's as result": (
        lambda made: dflow.export(lambda x: [Own(x)], SPEC),
        "call cannot be exported: result[0] is a Own",
        "export a function that takes and gives dicts",
    ),
    "two variables of a name": (
        two_of_a_name,
        "call uses two variables named 'w'; an export identifies variables by their names\n  at HERE",
        "give one of them another name",
    ),
    "two variables of a name in two functions": (
        two_of_a_name_apart,
        "two uses another variable called 'w' than the functions before it\n  at HERE",
        "give one of them another name",
    ),
    "an op that a platform has not": (
        lambda made: dflow.export(lambda x: jnp.linalg.eig(x)[0], jnp.eye(3)),
        "call cannot be exported for cuda, tpu: eig is in the way\n  at HERE",
        "leave the platform out: platforms=('cpu',)",
    ),
    "a kernel of Pallas on a CPU": (
        lambda made: dflow.export(by_a_kernel, jnp.ones((8, 128)), platforms=("cpu", "tpu")),
        "by_a_kernel cannot be exported for cpu: pallas_call is in the way\n  at HERE",
        "leave the platform out: platforms=('tpu',)",
    ),
    "a target that nobody guarantees": (
        lambda made: dflow.export(lambda x: jax.ffi.ffi_call("mine", x)(x), SPEC, platforms=["cpu"]),
        "call cannot be exported for cpu: ffi_call of 'mine' is in the way\n  at HERE",
        "disabled_checks=[jax.export.DisabledSafetyCheck.custom_call('mine')]",
    ),
    "what has no derivative": (
        differentiable_while,
        "call cannot be exported with vjp_order=1: Reverse-mode differentiation does not work for lax.while_loop",
        "export it with vjp_order=0",
    ),
    "a dtype that files have not": (
        lambda made: dflow.export(lambda x: x.astype(jnp.float32), jnp.zeros(3, jnp.int2), platforms=["cpu"]),
        "an argument or a result of call is of i2, which the files of JAX",
        "keep it as int8 or uint8",
    ),
    "letters of two scopes": (
        lambda made: dflow.export(
            lambda x, y: (x, y), SPEC, jax.ShapeDtypeStruct(jax.export.symbolic_shape("b"), jnp.float32)
        ),
        "call cannot be exported: the letters in its shapes are of two scopes",
        "make all of them with dflow.spec, or with one jax.export.SymbolicScope",
    ),
    "no function": (
        lambda made: dflow.export(made.w),
        "call is a Variable, which is no function\n  at HERE",
        "write dflow.export(fn, *specs), or dflow.export({'name': (fn, *specs)}) for several",
    ),
    "arguments beside several": (
        lambda made: dflow.export({"serve": lambda x: x}, SPEC),
        "functions are exported by name, and arguments are given beside them\n  at HERE",
        "dflow.export({'serve': (fn, *specs)})",
    ),
    "none": (lambda made: dflow.export({}), "functions are exported by name, and there is none", "give each its own"),
    "a name that is none": (
        lambda made: dflow.export({"to serve": (lambda x: x, SPEC)}),
        "'to serve' is no name of a function\n  at HERE",
        "letters, digits and '_'",
    ),
    "a name that the loaded object has": (
        lambda made: dflow.export({"save": (lambda x: x, SPEC)}),
        "'save' is what a loaded export has itself\n  at HERE",
        "give it another name",
    ),
    "a platform that is none": (
        lambda made: dflow.export(lambda x: x, SPEC, platforms=("gpu",)),
        "platforms=('gpu',)\n  at HERE",
        "give one or more of cpu, cuda, rocm, tpu",
    ),
    "one platform as text": (
        lambda made: dflow.export(lambda x: x, SPEC, platforms="cpu"),
        "platforms='cpu'",
        "give one or more of",
    ),
    "inside traced code": (within, "export is called inside traced code\n  at HERE", "call it outside of any function"),
    "a shape that is none": (
        lambda made: dflow.spec("b 3", jnp.float32),
        "'b 3' is no shape: ",
        "write the dimensions with commas between: dflow.spec('b, 784', jnp.float32)",
    ),
    "the module of a function that is not there": (
        lambda made: dflow.export(lambda x: x, SPEC).mlir_module("serve"),
        "there is no function 'serve'\n  at HERE",
        "name one of call",
    ),
    "the module of one of several": (
        lambda made: dflow.export({"one": (lambda x: x, SPEC), "two": (lambda x: x, SPEC)}).mlir_module(),
        "there are 2 functions\n  at HERE",
        "name one of one, two",
    ),
    "the module for another platform": (
        lambda made: dflow.export(lambda x: x, SPEC, platforms=("cpu", "tpu")).mlir_module(platform="cuda"),
        "call was exported for cpu and tpu, not for 'cuda'\n  at HERE",
        "name one of these, or give platforms to dflow.export",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_exported_is_named_with_its_line_and_a_remedy(case: str) -> None:
    program, fact, remedy = CASES[case]
    with pytest.raises(dflow.ExportError) as caught:
        program(Made())
    text = str(caught.value)
    assert re.sub(rf"(?<=  at )\S*{HERE}:\d+", "HERE", text).startswith(fact) or fact in re.sub(
        rf"\S*{HERE}:\d+", "HERE", text
    )
    assert remedy in text


def test_a_mesh_of_several_devices_is_named() -> None:
    """An abstract mesh is enough to trace over, so no devices are needed."""
    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.shard_map(
        lambda x: x * 2,
        mesh=mesh,
        in_specs=jax.sharding.PartitionSpec("data"),
        out_specs=jax.sharding.PartitionSpec("data"),
    )
    with pytest.raises(
        dflow.ExportError, match=r"shard_map spreads over 2 devices \(data: 2\), and an export is for one"
    ):
        dflow.export(spread, jax.ShapeDtypeStruct((4,), jnp.float32))


def test_what_is_refused_in_one_platform_is_exported_for_the_others() -> None:
    made = dflow.export(lambda x: jnp.linalg.eig(x)[0], jnp.eye(3), platforms=("cpu",))
    assert str(made).endswith("  for cpu")


def test_a_target_that_is_allowed_is_exported() -> None:
    allowed = jax.export.DisabledSafetyCheck.custom_call("mine")
    made = dflow.export(
        lambda x: jax.ffi.ffi_call("mine", x)(x), jnp.ones(3), platforms=["cpu"], disabled_checks=[allowed]
    )
    assert "custom_call @mine" in made.mlir_module()


def test_state_is_exported_from_whichever_device_of_this_process_holds_it() -> None:
    with dflow.device("cpu:0"):
        w = dflow.Variable(jnp.ones(3), name="w")
    assert dflow.export(lambda x: x + w, jnp.ones(3)).variables == {"w": w}


def test_an_optimizer_is_not_taken_for_a_device_scope() -> None:
    w = dflow.Variable(jnp.ones(3), name="w")
    optimizer = dflow.Optimizer(optax.adam(0.1), [w], name="adam")
    made = dflow.export(dflow.jit(lambda: optimizer.apply([w.read()])))
    assert set(made.variables) == {"w", "adam/0/count", "adam/0/mu/w", "adam/0/nu/w"}


def test_a_function_of_static_arguments_fixes_them() -> None:
    power = functools.partial(dflow.jit, static_argnames="n")(lambda x, n: x**n)
    assert "call(x: f32[3]) -> f32[3]\n  fixed: n = 2\n" in str(
        dflow.export({"call": dflow.export(power, jnp.ones(3), n=2)})
    )


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
