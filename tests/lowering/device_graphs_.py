"""Random graphs and programs over several devices keep their meaning.

`tests/dflow/test_several_devices.py` runs this with eight devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import SingleDeviceSharding

from dflow.lowering.local import LocalHome
from dflow.lowering.pipeline import ALONE
from dflow.lowering.values.devices import device_named
from dflow.tracing.devices.device_name import split_device_name
from dflow.tracing.ir.graph import Graph
from dflow.tracing.state.resources import Variable
from tests.effort import examples
from tests.graphs_ import Case, cases
from tests.lowering.meaning import DEVICES, PLACES, assert_equal_states, assert_equal_values
from tests.lowering.one_process import Cluster
from tests.lowering.stateful_graphs import some_inputs, some_state, stateful_graphs
from tests.programs.made import ARGUMENTS
from tests.reference.interpret import interpret

SEEDS = st.integers(0, 2**16)


@settings(max_examples=examples(60))
@given(graph=stateful_graphs(PLACES), seed=SEEDS)
def test_tasks_with_devices_do_what_a_graph_means(graph: Graph, seed: int) -> None:
    inputs, state = some_inputs(graph), some_state(graph)
    cluster = Cluster(graph, state, devices=DEVICES)
    for step in range(2):
        wanted, state = interpret(graph, inputs, state)
        assert_equal_values(cluster.run(inputs, seed + step), wanted)
        assert_equal_states(cluster.state(), state)


def held(home: LocalHome, case: Case) -> Mapping[str, Variable]:
    """Return the variables of a case by their names in its graph, after their values are in the store, on their
    devices.
    """
    variables = {}
    for ref, variable in zip(case.graph.refs, case.traced.variables, strict=True):
        _, local = split_device_name(variable.device or "")
        place = SingleDeviceSharding(device_named(local)) if local else None
        home.store.create(variable.key, variable.type, lambda name=ref.name: case.state[name], place)
        variables[ref.name] = variable
    return variables


@settings(max_examples=examples(30))
@given(case=cases(devices=DEVICES))
def test_a_process_with_devices_does_what_a_program_means(case: Case) -> None:
    home = LocalHome()
    variables = held(home, case)
    run: Any = home.runner(case.traced, check=True, observe=None)
    state = case.state
    for _ in range(2):
        wanted, state = interpret(case.graph, case.inputs, state)
        assert_equal_values(run(ARGUMENTS), wanted)
        assert_equal_states({name: home.store.read(variable.key) for name, variable in variables.items()}, state)
        for name, variable in variables.items():
            [device] = home.store.read(variables[name].key).devices()
            assert split_device_name(variable.device or f"{ALONE}/device:cpu:0")[1] == f"cpu:{device.id}"
