"""All-reduce training: several processes do what one process does with all their batches. Deaths: `tests/chaos`."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.collectives.process_mesh import ProcessMesh, _sizes
from dflow.distributed.training.step_report import StepProgress
from dflow.distributed.training.work_messages import RoundsDone
from dflow.tracing.errors import DeviceError, StrategyError
from tests.distributed.processes import Spawned
from tests.distributed.training import all_reduce_programs
from tests.distributed.training.all_reduce_programs import MAKERS, Program, TableProgram, sum_by_optimizer

#: Compares no programs.
ALONE: Any = SimpleNamespace(step=lambda *_, **__: nullcontext())
PROGRAM = Path(all_reduce_programs.__file__).read_text()

#: Two workers of two devices each: each way to divide a model, and each way to do another step than the other worker.
PAIR = (
    PROGRAM
    + """
import os
from jax.sharding import PartitionSpec as P

cluster = dflow.connect(collectives=True)
index = cluster.index
AllReduce = dflow.distributed.AllReduce


def attempt(what, do):
    try:
        print(what, "gave", do())
    except dflow.DflowError as error:
        print(what, "raised", type(error).__name__, str(error).replace(chr(10), " / "))


for name, options, spec in (
    ("replicated", {}, None),
    ("sharded", {"fully_sharded": True}, None),
    ("parallel", {"axes": {"data": -1, "model": 2}}, P(None, "model")),
    ("across", {"axes": {"model": 2, "data": -1}, "fully_sharded": True}, P("model")),
):
    program = Program(AllReduce(cluster, **options), name, spec)
    print(name, "has part", program.strategy.part, program.w.read().sharding.spec, program.b.read().sharding.spec)
    print(name, "gave", program.train())
    dflow.save(name, program.state)
    attempt(f"{name}_again", lambda: dflow.save(name, program.state))
    predict = dflow.jit(lambda x: x @ program.w + program.b)
    dflow.export(predict, jax.ShapeDtypeStruct((2, 4), np.float32)).save(f"{name}-export")
    if spec is None and not options:
        dflow.save(f"{name}.safetensors", [program.w, program.b])
        print(name, "restored", dflow.restore(f"{name}.safetensors", [program.w, program.b]).restored)
        attempt("behind", lambda: index and dflow.save("behind", program.w))
    if index == 0 and "fully_sharded" not in options:
        dflow.save(f"{name}-alone", program.state)
        dflow.export(predict, jax.ShapeDtypeStruct((2, 4), np.float32)).save(f"{name}-export-alone")

for kind in MAKERS:
    print(kind, "gave", sum_by_optimizer(AllReduce(cluster), kind))
print("hybrid gave", TableProgram(cluster, dflow.distributed.Hybrid(cluster)).train())
program = Program(AllReduce(cluster), "refusals")
run, x = program.strategy.run, np.ones((2, 4), np.float32)
step = dflow.jit(lambda x, scale=1.0: (x @ program.w).sum() * scale)
attempt("ends", lambda: len(list(run(step, [x] * (3 - index), steps=9, name="ends"))))
attempt("shapes", lambda: list(run(step, [np.ones((2 + 2 * index, 4), np.float32)], steps=9, name="shapes")))
attempt("scalars", lambda: list(run(step, [(x, np.float32(index))], steps=9, name="scalars")))
attempt("rows", lambda: list(run(step, [x[:1]], steps=9, name="rows")))
mine = dflow.Variable(np.zeros(4, np.float32), name="mine")
own = dflow.Optimizer(optax.sgd(0.1), [mine], name="own")
attempt("own", lambda: list(run(dflow.jit(lambda x: own.apply([x.sum(0)])), [x], steps=1, name="own")))


def differ():
    with program.strategy.variables():
        dflow.Variable(np.ones(2, np.float32), name="same")
        dflow.Variable(np.full(2, index, np.float32), name="different")


attempt("values", differ)
noise = np.arange(4, dtype=np.float32) + index
attempt("constants", lambda: list(run(dflow.jit(lambda x: x @ program.w.read() @ program.w.T + noise), [x], steps=1)))
total = dflow.jit(lambda x: (x @ program.w).sum())


def evaluates():
    for number, result in enumerate(run(step, [x] * 4, steps=4, name="evaluates")):
        if index == number == 1:
            total(x)  # of this worker alone: the variable is whole in each
            total(program.strategy._on.divided(x))


attempt("evaluates", evaluates)
attempt("writes", lambda: program.b.assign(np.full(8, index, np.float32)))
queue = dflow.FIFOQueue(4, jax.ShapeDtypeStruct((2, 4), np.float32))
for number in range(4):
    queue.enqueue(x * (number + index))
attempt("queue", lambda: list(run(dflow.jit(lambda: (queue.dequeue() @ program.w).sum()), [()], steps=1)))
attempt("remedy", lambda: [float(one) for one in run(step, (queue.dequeue() for _ in range(2)), steps=2)][1])
attempt("alone", lambda: float((np.concatenate([x, x * 2]) @ program.w.read()).sum()))
across = AllReduce(cluster, axes={"model": 2, "data": -1})
attempt("parts", lambda: list(across.run(step, [index * x], steps=1, name="parts")))
cluster.close()
"""
)


def equals_alone(name: str, saved: Path) -> list[float]:
    """Train a program in this process, compare its state with the saved one, and return the losses."""
    program = Program(dflow.distributed.AllReduce(dflow.connect()), name)
    losses = program.train()
    state = [program.w, program.b, program.generator.key, program.optimizer.slots]
    trained = jax.tree.leaves(dflow.read(state))
    dflow.restore(saved, program.state)
    for alone, together in zip(trained, jax.tree.leaves(dflow.read(state)), strict=True):
        np.testing.assert_allclose(alone, together, rtol=2e-4, atol=1e-6)
    return losses


def are_equal_when_saved_alone(name: str, folder: Path) -> None:
    """Compare the exports, and the files of worker 0 alone, with the checkpoint of all workers."""
    x, names = np.ones((2, 4), np.float32), {f"{name}/w": (4, 8), f"{name}/b": (8,)}
    saved = [folder / name, *folder.glob(f"{name}-alone"), *folder.glob(f"{name}.safetensors")]
    exported = [*folder.glob(f"{name}-export*")]
    can_alone = name in ("replicated", "parallel")
    assert len(saved) == 1 + can_alone + (name == "replicated"), saved
    assert len(exported) == 1 + can_alone, exported
    found = []
    for path in saved:
        w, b = held = [dflow.Variable(np.zeros(shape, np.float32), name=name) for name, shape in names.items()]
        assert len(dflow.restore(path, held, ignore=["unexpected"]).restored) == 2
        found.append(x @ w.read() + b.read())
    found += [dflow.load(path, prefix=f"{path.name}/")(x) for path in exported]
    for one in found[1:]:
        np.testing.assert_allclose(found[0], one, rtol=1e-5)


def test_two_processes_do_what_one_does_with_all_their_batches(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PAIR)
    words = ("-m", "dflow", "launch", "--all-tables", "--ps", "1", "--workers", "2", "train.py")
    # Nothing is at the proxy's address: the workers' own connections do not use it.
    with Spawned(*words, cwd=tmp_path, JAX_NUM_CPU_DEVICES="2", http_proxy="http://127.0.0.1:9") as launched:
        status, output = launched.finish()
    lines = [re.findall(rf"^\[worker:{index}\] (\w+) (\w+) (.*)$", output, re.M) for index in (0, 1)]
    found = [{(what, how): text for what, how, text in said} for said in lines]
    # The runs that end early are short of their steps.
    assert status == 1, output
    one = found[0]
    assert one["replicated", "has"] == "part (0, 2) P(None, None) P(None,)"
    assert one["sharded", "has"] == "part (0, 2) P(None, 'data') P('data',)"
    assert one["parallel", "has"] == "part (0, 2) P(None, 'model') P(None,)"
    assert one["across", "has"] == "part (0, 1) P('model', 'data') P('data',)"
    for name in ("replicated", "sharded", "parallel", "across"):
        losses = equals_alone(name, tmp_path / name)
        are_equal_when_saved_alone(name, tmp_path)
        np.testing.assert_allclose(json.loads(one[name, "gave"]), losses, rtol=1e-5)
        assert found[1][name, "gave"] == one[name, "gave"]
        assert all("CheckpointExists" in told[f"{name}_again", "raised"] for told in found)
    assert "('replicated/w', 'replicated/b')" in one["replicated", "restored"]
    behind = "worker:1 waits for dflow.save('behind') by worker:0, which has gone on without it / "
    assert f"{behind}  call it on all workers, or on worker:0 alone" in found[1]["behind", "raised"]
    standalone = dflow.connect()
    for kind in MAKERS:
        alone = sum_by_optimizer(dflow.distributed.AllReduce(standalone), kind)
        np.testing.assert_allclose([float(told[kind, "gave"]) for told in found], alone, rtol=1e-4)
    sums = TableProgram(standalone, dflow.distributed.Hybrid(standalone)).train()
    np.testing.assert_allclose(json.loads(one["hybrid", "gave"]), sums, rtol=1e-5)
    assert found[1]["hybrid", "gave"] == one["hybrid", "gave"]
    assert re.search(r"table_1 +ps:0 -> worker:\* +8 +8", output), output  # rows alone, of each step once
    for index in (0, 1):
        told = found[index]
        assert told["ends", "gave"] == "2"
        assert (
            "step 0 of run 'shapes': expected the same on all workers, got worker:0: f32[2,4] in"
            in told["shapes", "raised"]
        )
        assert "worker:1: f32[4,4] in" in told["shapes", "raised"]
        assert "float32 0.0" in told["scalars", "raised"]
        assert (
            "a multiple of 2, the number of devices of this process along 'data', got f32[1,4]"
            in told["rows", "raised"]
        )
        assert "variable 'mine' of 'own' lives in this process" in told["own", "raised"]
        assert "make it within strategy.variables()" in told["own", "raised"]
        assert "got as variable 1: worker:0: 'different' f32[2] of checksum" in told["values", "raised"]
        assert "worker:0: const_0 f32[4] [0., 1., 2., 3.], used at train.py:" in told["constants", "raised"]
        assert (
            "different points of the program: worker:0 at step 2 of run 'evaluates', worker:1 at a call of"
            in (told["evaluates", "raised"])
        )
        assert "a write to variable 'refusals/b' outside of steps: expected the same value" in told["writes", "raised"]
        assert "take from the queue in the loop, as this worker's part of the batch" in told["queue", "raised"]
        np.testing.assert_allclose(float(told["remedy", "gave"]), float(told["alone", "gave"]), rtol=1e-5)
        assert "step 0 of run 'parts', part 0 of the batch: expected the same on all" in told["parts", "raised"]
    assert output.count("run 'ends' ends after 2 of 9 steps: the batches of worker:1 have ended") == 2
    assert output.count("this worker's batch for the next step is not used") == 1


@pytest.mark.parametrize("kind", ["AllReduce", "Hybrid"])
def test_a_cluster_without_collectives_is_refused(worker: Cluster, kind: str) -> None:
    fact = rf"{kind}: expected a cluster with collectives(.|\n)*connect\(collectives=True\)"
    with pytest.raises(StrategyError, match=fact):
        getattr(dflow.distributed, kind)(worker)


def test_a_step_over_variables_of_other_tasks_is_refused(worker: Cluster) -> None:
    with worker.parameter_servers():
        count = dflow.Variable(0, name="count")
    add = dflow.jit(count.assign_add)
    add(1)
    mesh = ProcessMesh({"data": -1}, "data", fully_sharded=False)
    fact = r"got one with variables or queues on other tasks(.|\n)*train by Hybrid"
    with pytest.raises(StrategyError, match=fact), mesh.shared_step(ALONE, "step 0", is_one_call=True):
        add(1)
    add(1)
    assert int(count.read()) == 2


def test_the_only_process_of_a_group_has_its_variables_on_one_device() -> None:
    mesh = ProcessMesh({"data": -1}, "data", fully_sharded=True)
    with mesh.variables(None, dflow.connect().store):
        kernel = dflow.Variable(np.ones(2, np.float32), name="only")
        optimizer = dflow.Optimizer(optax.sgd(1.0), [kernel], name="of only")
    with mesh.shared_step(ALONE, "step 0", is_one_call=True):
        dflow.jit(lambda: optimizer.apply([jnp.ones(2)]))()
    assert kernel.read().tolist() == [0, 0]


def test_copies_in_each_process_have_no_spec() -> None:
    strategy = dflow.distributed.Hybrid(dflow.connect())
    fact = r"'divided': sharding: expected None, for a copy in each process, got P"
    with pytest.raises(DeviceError, match=fact), strategy.variables():
        dflow.Variable(np.zeros(2, np.float32), name="divided", sharding=jax.sharding.PartitionSpec("data"))


def test_collectives_are_not_started_after_the_first_use_of_a_device() -> None:
    jax.devices()
    with pytest.raises(StrategyError, match=r"expected a process that has used no device yet(.|\n)*before the first"):
        dflow.connect("127.0.0.1:1", index=0, collectives=True)
    assert dflow.connect(collectives=True).is_standalone


def test_the_sizes_of_a_mesh_fill_it() -> None:
    assert _sizes({"data": -1, "model": 2}, 8) == (4, 2)
    assert _sizes({"data": 8}, 8) == (8,)
    for axes in ({"data": 3}, {"data": -1, "model": 3}, {"data": -1, "model": -1}, {"data": 0}, {"data": 4}):
        with pytest.raises(StrategyError, match=r"expected sizes whose product is 8, the number of devices .*, got"):
            _sizes(axes, 8)


def test_the_axis_of_batches_is_one_of_the_mesh() -> None:
    with pytest.raises(StrategyError, match=r"batch_axis: expected one of \['model'\], got 'data'"):
        dflow.distributed.AllReduce(dflow.connect(), axes={"model": -1})


@pytest.mark.parametrize("first", [-1, 6])
def test_a_run_begins_at_one_of_its_steps(first: int) -> None:
    strategy = dflow.distributed.AllReduce(dflow.connect())
    with pytest.raises(StrategyError, match=rf"first: expected a step from 0 to 5, got {first}"):
        list(strategy.run(lambda x: x, [1], steps=5, first=first))
    assert list(strategy.run(lambda x: x, lambda number: number, steps=5, first=3)) == [3, 4]


def test_steps_after_a_return_to_a_snapshot_are_counted() -> None:
    told: list[RoundsDone] = []
    coordinator, steps = SimpleNamespace(tell=told.append), SimpleNamespace(undone=2)
    cluster: Any = SimpleNamespace(task="/job:worker/task:0", steps=steps, coordinator=coordinator)
    progress = StepProgress(cluster, "run", total=10, done=4)
    progress.reached(5)
    progress.note(4, jnp.float32(1))
    progress.report()
    assert [(one.rounds, one.steps, one.undone) for one in told] == [(5, 1, 2)]
