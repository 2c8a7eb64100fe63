"""`jax.nn`, with variables accepted wherever it takes arrays."""

import jax.nn

from dflow.functional import mirrored

__getattr__ = mirrored(__name__, jax.nn)
