"""A model of NVIDIA's Triton, in its backend for Python; see `benchmarks/serving_names.py`.

It runs in an environment that has JAX. `triton_python_backend_utils` is part of the server.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as utils  # type: ignore[import-not-found]
from _serving_names_model import NamesModel  # type: ignore[import-not-found]  # in the folder of this file


class TritonPythonModel:
    """The name that the backend looks for."""

    def initialize(self, args: Any) -> None:
        """Compile the programs."""
        parameters = json.loads(args["model_config"])["parameters"]
        self._model = NamesModel(Path(parameters["folder"]["string_value"]), of_bytes=True)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer the requests that the server has gathered, by one call."""
        given = [utils.get_input_tensor_by_name(request, "names").as_numpy() for request in requests]
        together = np.concatenate(given)
        scores = self._model(together.reshape(-1).tolist(), len(together))
        parts = np.split(scores, np.cumsum([len(one) for one in given])[:-1])
        return [utils.InferenceResponse([utils.Tensor("result", part[:, None])]) for part in parts]
