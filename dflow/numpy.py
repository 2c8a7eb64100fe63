"""`jax.numpy`, with variables accepted wherever it takes arrays."""

import jax.numpy

from dflow.functional import mirrored

__getattr__ = mirrored(__name__, jax.numpy)
