"""Keras models on JAX whose variables are dflow's, so that they train alone and on a cluster.

A separate package, because Keras is an optional library, so only `import dflow.keras` imports it.
"""

from dflow.keras.backend import require_keras_on_jax

require_keras_on_jax()

from dflow.keras.metric_state import metric_state  # noqa: E402
from dflow.keras.model import Model  # noqa: E402
from dflow.keras.sharded_embedding import ShardedEmbedding  # noqa: E402

__all__ = ["Model", "ShardedEmbedding", "metric_state"]
