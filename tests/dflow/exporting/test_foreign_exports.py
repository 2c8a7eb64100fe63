"""An export of unknown origin is loaded and called, or raises an ExportError."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import random
import shutil
from collections import namedtuple
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import export

import dflow
from dflow.lowering.programs.foreign_program import bytecode_reader
from tests.dflow.training.test_foreign_checkpoints import repaired
from tests.effort import examples
from tests.hostile_files import changed_bytes, damage

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
