"""A client of the Open Inference Protocol over http.client, for tests; it shares no code with the server."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import numpy as np

DEADLINE_S = 60.0
NAMES = {"bool": "BOOL", "bfloat16": "BF16", **{f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)}}


def name_of(dtype: Any) -> str:
    """Return the protocol's name of a dtype."""
    return NAMES.get(np.dtype(dtype).name, np.dtype(dtype).name.upper())


def json_input(name: str, array: Any) -> dict[str, Any]:
    """Return an input with its values as a list."""
    array = np.asarray(array)
    values = (array.astype(np.float64) if name_of(array.dtype)[0] in "FB" and array.dtype != bool else array).tolist()
    return {"name": name, "datatype": name_of(array.dtype), "shape": list(array.shape), "data": values}


def json_request(**arrays: Any) -> bytes:
    """Return a request with these inputs in JSON."""
    return json.dumps({"inputs": [json_input(name, array) for name, array in arrays.items()]}).encode()


def binary_request(**arrays: Any) -> tuple[bytes, dict[str, str]]:
    """Return a request with these inputs as bytes, which wants binary outputs, and its headers."""
    inputs = [
        {**json_input(name, array), "parameters": {"binary_data_size": np.asarray(array).nbytes}}
        for name, array in arrays.items()
    ]
    for one in inputs:
        del one["data"]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    body = head + b"".join(np.asarray(array).tobytes() for array in arrays.values())
    return body, {"Inference-Header-Content-Length": str(len(head))}


def call(
    url: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None, method: str | None = None
) -> tuple[int, Any, dict[str, str]]:
    """Return the status, the body (decoded, if it is JSON) and the headers of an answer."""
    host = urlsplit(url)
    connection = http.client.HTTPConnection(str(host.hostname), host.port, timeout=DEADLINE_S)
    try:
        connection.request(method or ("GET" if body is None else "POST"), path, body, headers or {})
        answer = connection.getresponse()
        content = answer.read()
        found = {key.lower(): value for key, value in answer.getheaders()}
        is_json = found.get("content-type") == "application/json"
        return answer.status, json.loads(content) if is_json else content, found
    finally:
        connection.close()


def infer(url: str, model: str, body: bytes, **headers: str) -> tuple[int, Any, dict[str, str]]:
    """Send an inference request."""
    return call(url, f"/v2/models/{model}/infer", body, headers)
