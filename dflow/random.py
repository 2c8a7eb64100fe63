"""`jax.random`, with variables accepted wherever it takes arrays."""

import jax.random

from dflow.functional import mirrored

__getattr__ = mirrored(__name__, jax.random)
