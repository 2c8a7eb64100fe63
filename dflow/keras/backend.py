"""Checks that Keras is there, is new enough, and computes by JAX."""

from __future__ import annotations

import os
import sys

from dflow.tracing.errors import ConfigError

#: Keras's own variable: the backend of the first import of it.
_VARIABLE = "KERAS_BACKEND"
_OLDEST = (3, 12)
_REMEDY = 'set it before the first import of keras: os.environ["KERAS_BACKEND"] = "jax"'


def require_keras_on_jax() -> None:
    """Import Keras with the backend JAX, which is chosen here if neither an import nor the environment has chosen one.

    Raises ConfigError without Keras, for a version before 3.12, and for another backend.
    """
    if "keras" not in sys.modules and os.environ.setdefault(_VARIABLE, "jax") != "jax":
        raise ConfigError(f"dflow.keras: expected KERAS_BACKEND=jax, got {os.environ[_VARIABLE]}", _REMEDY)
    try:
        import keras
    except ModuleNotFoundError as error:
        if error.name != "keras":
            raise
        raise ConfigError("dflow.keras needs Keras, which is not installed", "pip install 'dflow[keras]'") from None
    if keras.config.backend() != "jax":
        raise ConfigError(f"dflow.keras: expected KERAS_BACKEND=jax, got {keras.config.backend()}", _REMEDY)
    if tuple(int(part) for part in keras.__version__.split(".")[:2]) < _OLDEST:
        raise ConfigError(f"dflow.keras: expected Keras 3.12 or newer, got {keras.__version__}", "pip install -U keras")
