"""A runtime of MLServer for the program of an export; see `benchmarks/serving.py`.

It runs in an environment of MLServer, whose Python need not have dflow: `values.npz` has the variables.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class Classifier(MLModel):  # type: ignore[misc]  # MLServer is not installed where types are checked
    """The classifier."""

    async def load(self) -> bool:
        """Compile the program."""
        folder = Path(self.settings.parameters.uri)
        program = jax.export.deserialize(bytearray((folder / "programs" / "classify").read_bytes()))
        held: dict[str, Any] = dict(np.load(folder.parent / "values.npz"))
        self._call = jax.jit(lambda x: program.call(held, {}, x)[0])
        self._call(np.zeros((1, 784), np.float32))
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Answer one request."""
        x = NumpyCodec.decode_input(payload.inputs[0]).astype(np.float32)
        y = NumpyCodec.encode_output("result", np.asarray(self._call(x)))
        return InferenceResponse(model_name=self.name, outputs=[y])
