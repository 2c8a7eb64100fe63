"""Keras computes by JAX in these tests, whichever file imports it first."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")
