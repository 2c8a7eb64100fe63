"""`jax.lax`, with variables accepted wherever it takes arrays."""

import jax.lax

from dflow.functional import mirrored

__getattr__ = mirrored(__name__, jax.lax)
