"""Parts of scripts whose steps count on each of two parameter tasks, so that a step lost or repeated on one is seen."""

from pathlib import Path

from tests.distributed.waiting import until

#: Joins the cluster and makes two counters, on different tasks, and the step that increments them.
COUNTERS = """
import jax.numpy as jnp
import dflow

cluster = dflow.connect()
with cluster.parameter_servers():
    count = dflow.Variable(lambda: jnp.zeros(()), name="count")
    other = dflow.Variable(lambda: jnp.zeros(64), name="other")

@dflow.jit
def step(x):
    count.assign_add(x)
    other.assign_add(x * jnp.ones(64))
    return {"loss": other.read().sum()}
"""

#: Reports both counters, and leaves.
REPORT = """
if cluster.elect("report"):
    cluster.report("count", float(count))
    cluster.report("other", float(other[63]))
cluster.close()
"""


def await_snapshot(folder: Path) -> None:
    """Wait until each task server has written its parts of the next two snapshots; the first of the two is complete."""

    def newest(index: int) -> int:
        found = (folder / "snapshots" / f"ps-{index}").glob("*")
        return max((int(part.name) for part in found if part.name.isdigit()), default=0)

    first = max(newest(0), newest(1))
    until(lambda: min(newest(0), newest(1)) >= first + 2)
