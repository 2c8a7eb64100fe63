"""Exports that are refused: functions that no export can hold, and damaged or hostile exports of unknown origin."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import random
import re
import shutil
from collections import namedtuple
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import export
from jax.experimental import pallas as pl

import dflow
from dflow.lowering.programs.foreign_program import bytecode_reader
from tests.dflow.training.test_foreign_checkpoints import repaired
from tests.effort import examples
from tests.hostile_files import changed_bytes, damage

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


Pair = namedtuple("Pair", ["one", "two"])
ARGUMENTS = (jnp.ones(3), {"a": (jnp.ones(2), None), "b": Pair(jnp.zeros(2), jnp.zeros(()))})
#: A variable keeps its name in use.
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export with a variable, a large constant, trees, and a function with a derivative."""
    w = dflow.Variable(jnp.ones(3), name="w")
    table = jnp.arange(30_000.0).reshape(3, 10_000)

    def step(x: Any, given: Any) -> Any:
        w.assign_add(x)
        return {"pair": given["b"], "sum": (table.T @ w).sum() + given["a"][0].sum(), "w": w}

    square = dflow.export(lambda x: x * x, jnp.ones(3), vjp_order=1)
    exported = dflow.export({"step": (step, *ARGUMENTS), "twice": (lambda x: x * 2, jnp.ones(3)), "square": square})
    return exported.save(tmp_path_factory.mktemp("foreign") / "good")


@pytest.fixture
def path(good: Path, tmp_path: Path) -> Path:
    """A copy of the export, to damage it."""
    return Path(shutil.copytree(good, tmp_path / "copy"))


def load(path: Path, **options: Any) -> dflow.Loaded:
    return dflow.load(path, prefix=f"foreign{next(NUMBERS)}/", **options)


def put(path: Path, content: bytes, name: str = "twice") -> None:
    """Make these bytes a program, with matching size and digest in the manifest."""
    (path / "programs" / name).write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["signatures"][name] |= {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest))


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def program_of(fn: Callable[[Any], Any], *targets: str) -> export.Exported:
    """A program that the loader accepts as the one of `twice`."""
    checks = [export.DisabledSafetyCheck.custom_call(target) for target in targets]
    jitted = jax.jit(lambda state, constants, x: (fn(x), state), keep_unused=True)
    return export.export(jitted, disabled_checks=checks)({}, {}, jax.ShapeDtypeStruct((3,), "float32"))


def calling(target: str) -> Callable[[Any], Any]:
    return lambda x: jax.ffi.ffi_call(target, x)(x)


def test_a_program_that_names_a_host_callback_is_refused(path: Path) -> None:
    """The pointer of its callback comes from the program itself: a call would end the process."""
    target = "xla_ffi_python_cpu_callback"
    put(path, program_of(calling(target), target).serialize())
    with pytest.raises(
        dflow.ExportError,
        match=rf"the program 'twice' of .* calls '{target}', which is no library routine(.|\n)*at .*\n  if you trust",
    ):
        load(path)


def test_a_target_that_the_loader_allows_is_called(path: Path) -> None:
    target = export.DisabledSafetyCheck.custom_call("of_some_user")
    put(path, program_of(calling("of_some_user"), "of_some_user").serialize())
    assert "custom_call @of_some_user" in load(path, disabled_checks=[target]).mlir_module("twice")


def test_a_derivative_is_looked_at_too(path: Path) -> None:
    @jax.custom_vjp
    def fn(x: Any) -> Any:
        return x * 2

    fn.defvjp(lambda x: (x * 2, None), lambda _, ct: (calling("hidden")(ct),))
    put(path, program_of(fn, "hidden").serialize(vjp_order=1))
    with pytest.raises(dflow.ExportError, match="calls 'hidden'"):
        load(path)


def test_a_derivative_is_as_good_as_before(good: Path) -> None:
    square = load(good).square
    assert jax.grad(lambda x: square(x).sum())(jnp.arange(3.0)).tolist() == [0.0, 2.0, 4.0]


class Chest:
    """A class of the user's in the pytrees of a program."""


def test_a_tree_of_a_users_type_is_refused_before_its_code_runs(path: Path) -> None:
    ran: list[bytes] = []
    jax.tree_util.register_pytree_node(Chest, lambda chest: ((), None), lambda aux, children: Chest())
    export.register_pytree_node_serialization(
        Chest,
        serialized_name="tests.dflow.Chest",
        serialize_auxdata=lambda aux: b"anything",
        deserialize_auxdata=ran.append,
    )
    put(path, program_of(lambda x: (x, Chest())).serialize())
    with pytest.raises(dflow.ExportError, match="twice is damaged: a program has a tree of a type of the user's"):
        load(path)
    assert ran == []


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (lambda x: (x, x), "it gives PyTreeDef.*, and the manifest says PyTreeDef"),
        (lambda x: x.sum(), r"it gives float32\[\], and the manifest says f32\[3\]"),
        (lambda x: x.astype("int32"), r"it gives int32\[3\], and the manifest says f32\[3\]"),
    ],
)
def test_a_program_of_another_signature_is_refused(path: Path, fn: Callable[[Any], Any], says: str) -> None:
    put(path, program_of(fn).serialize())
    with pytest.raises(dflow.ExportError, match=f"programs/twice is damaged: {says}"):
        load(path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m["signatures"]["step"]["parameters"].reverse() or m, "it takes PyTreeDef"),
        (lambda m: m["signatures"]["step"]["parameters"][0].update(name="not a name"), "is not a valid parameter name"),
        (lambda m: m["signatures"]["step"]["parameters"][0].update(name="given"), "duplicate parameter name: 'given'"),
        (lambda m: m["signatures"]["step"]["parameters"][0].update(by="name"), "wrong parameter order"),
        (lambda m: m["signatures"]["step"].update(platforms=[]), "step is for no platform"),
        (lambda m: m["signatures"]["step"].update(variables=["table"]), "step uses 'table', and says nothing else"),
        (lambda m: m["signatures"]["step"].update(result={"kind": "variable", "name": "x"}), "step returns 'x', and"),
        (lambda m: m["signatures"]["step"].update(result={"kind": "namedtuple", "name": "a b", "of": []}), "'a b'"),
        (lambda m: m["signatures"]["step"].update(size_bytes=-1), "more than 0 bytes"),
        (lambda m: m["signatures"]["square"].update(vjp_order=2), "it holds 1 derivatives, and the manifest says 2"),
    ],
)
def test_a_manifest_that_cannot_be_is_refused(path: Path, change: Callable[[Any], Any], says: str) -> None:
    rewrite(path, change)
    with pytest.raises(dflow.ExportError, match=f"is damaged: .*{says}"):
        load(path)


def test_trees_without_end_are_refused(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    deep = '{"kind": "list", "of": [' * 100 + '{"kind": "none"}' + "]}" * 100
    rewrite(path, lambda m: m["signatures"]["step"].update(result="HERE"))
    (path / "manifest.json").write_text((path / "manifest.json").read_text().replace('"HERE"', deep))
    with pytest.raises(dflow.ExportError, match="it has a tree of more than 64 levels"):
        load(path)
    (path / "manifest.json").write_text(text.replace('"dflow":', '"x": ' + "[" * 100_000 + '"dflow":'))
    with pytest.raises(dflow.ExportError, match=r"manifest\.json is damaged"):
        load(path)


@pytest.mark.parametrize("file", ["manifest.json", "programs/twice"])
def test_a_pipe_is_refused_and_not_waited_for(path: Path, file: str) -> None:
    (path / file).unlink()
    os.mkfifo(path / file)
    with pytest.raises(dflow.ExportError, match=f"{file} is damaged: not a regular file"):
        load(path)


#: A function that returns its argument, without file names, so that its bytes are equal everywhere.
BYTECODE = base64.b64decode(
    b"TUzvUg1TdGFibGVITE9fdjEuOC4wAAEXBQEFBwEDCwMFDxMDKRMHAQsLExMTEwMJCwsLCwMHExcHAkkFCxcBAwMXAQMVFwEDQxcB"
    b"A5UDASMDHQ0dDykDDQURAwEDAQkEPQUBUAMBBwQtAwEFA1AFAwcEGQMDBwMDBwAFBAkDAQYDAQUBAHsRDwsFFREPCxFidWlsdGlu"
    b"AHZobG8AbW9kdWxlAGZ1bmNfdjEAcmV0dXJuX3YxAC0AbWFpbgBwdWJsaWMACBUFBQEBCwsNCw8R"
)


def test_a_reader_of_bytecode_goes_on_after_a_refusal() -> None:
    with bytecode_reader() as as_text:
        assert "func.func public @main" in as_text(BYTECODE)
        with pytest.raises(ValueError, match="Failed to deserialize"):
            as_text(b"ML\xefR of tomorrow")
        assert "func.func public @main" in as_text(BYTECODE)


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        pytest.param(97, 255, "it ended the process that read it with status -11", id="crash"),
        pytest.param(88, 1, "it ended the process that read it with status -24", id="without end"),
        pytest.param(102, 16, "std::bad_alloc|it ended the process", id="gigabytes"),
    ],
)
def test_damage_that_harms_the_reader_of_bytecode_is_an_error(at: int, value: int, said: str) -> None:
    with bytecode_reader() as as_text, pytest.raises(ValueError, match=said):
        as_text(BYTECODE[:at] + bytes([value]) + BYTECODE[at + 1 :])


@cache
def good_program() -> export.Exported:
    return program_of(lambda x: jnp.sin(x) * 2)


@settings(max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck))
@given(rng=st.randoms(use_true_random=False))
def test_a_damaged_program_is_an_error_or_another_program(
    good: Path, tmp_path_factory: pytest.TempPathFactory, rng: random.Random
) -> None:
    path = Path(shutil.copytree(good, tmp_path_factory.mktemp("damaged") / "copy"))
    program = good_program()
    whole = rng.random() < 0.5
    if whole:
        put(path, changed_bytes(bytes(program.serialize()), rng))
    else:
        module = changed_bytes(program.mlir_module_serialized, rng)
        put(path, bytes(dataclasses.replace(program, mlir_module_serialized=module).serialize()))
    with contextlib.suppress(dflow.ExportError):
        load(path)


@settings(max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck))
@given(rng=st.randoms(use_true_random=False))
def test_a_damaged_export_is_an_error_or_can_be_called(
    good: Path, tmp_path_factory: pytest.TempPathFactory, rng: random.Random
) -> None:
    path = Path(shutil.copytree(good, tmp_path_factory.mktemp("damaged") / "copy"))
    damage(path, rng, repaired)
    with contextlib.suppress(dflow.ExportError):
        there = load(path)
        there.step(*ARGUMENTS)
        there.twice(jnp.ones(3))
        jax.grad(lambda x: there.square(x).sum())(jnp.ones(3))
