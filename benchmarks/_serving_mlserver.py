"""Runtimes of MLServer; see `benchmarks/serving.py` and `benchmarks/serving_names.py`.

They run in an environment of MLServer and JAX, whose Python need not have dflow: `values.npz` has the variables.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from _serving_names_model import NamesModel  # type: ignore[import-not-found]  # in the folder of this file
from mlserver import MLModel
from mlserver.codecs import NumpyCodec, StringCodec
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


class Names(MLModel):  # type: ignore[misc]
    """The model of names."""

    async def load(self) -> bool:
        """Compile the programs."""
        self._call = NamesModel(Path(self.settings.parameters.uri))
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Answer one request, or several that the server has gathered."""
        [given] = payload.inputs
        scores = self._call(StringCodec.decode_input(given), given.shape[0])
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("result", scores)])
