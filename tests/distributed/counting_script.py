"""Parts of scripts whose steps count on each parameter task, so that a step lost or repeated on one is seen."""

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
