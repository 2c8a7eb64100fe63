"""Run the networks of `_convnet_models.py` by PyTorch, with the same parameters. Only this file needs torch.

Images are [batch, channel, height, width] here, PyTorch's default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from benchmarks._convnet_models import RATE, Branches, Conv, Layer, Mean, Network, Params, Pool, weights


def place(dtype: Any) -> torch.Tensor:
    """Return an empty tensor of the dtype on the GPU, or else on the CPU: the other functions follow its device."""
    kind = torch.bfloat16 if np.dtype(dtype).name == "bfloat16" else torch.float32
    return torch.zeros((), dtype=kind, device="cuda" if torch.cuda.is_available() else "cpu")


def parameters(network: Network, params: Params, where: torch.Tensor) -> dict[str, torch.Tensor]:
    """Convert the parameters, f32, to PyTorch's layout: kernels [out, in, height, width], matrices [out, in]."""
    taken = {name: shape for name, _, shape in weights(network.layers, (network.image, network.image, 3))}
    found = {}
    for key, value in params.items():
        array = torch.from_numpy(value)
        shape = taken[key.rpartition("/")[0]]
        if array.ndim == 4:
            array = array.permute(3, 2, 0, 1)
        elif array.ndim == 2:
            if len(shape) == 3:  # PyTorch flattens with channels first
                array = array.reshape(*shape, -1).permute(2, 0, 1, 3).reshape(array.shape)
            array = array.T
        found[key] = array.contiguous().clone().to(where).requires_grad_()
    return found


def images_and_labels(images: Any, labels: Any, where: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert a batch to PyTorch's layout."""
    given = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
    return given.to(where), torch.from_numpy(labels).long().to(where.device)


def loss(layers: Sequence[Layer], params: Params, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy."""
    return functional.cross_entropy(_through(layers, params, images, "").float(), labels)


def training_step(
    network: Network, params: dict[str, torch.Tensor], *, compiled: bool
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a step of gradient descent that changes `params` and returns the loss before the update."""
    optimizer = torch.optim.SGD(params.values(), lr=RATE)

    def forward(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return loss(network.layers, params, images, labels)

    run = torch.compile(forward) if compiled else forward

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        value: torch.Tensor = run(images, labels)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return value.detach()

    return step


def _through(layers: Sequence[Layer], params: Params, x: torch.Tensor, name: str) -> torch.Tensor:
    for number, layer in enumerate(layers):
        x = _apply(layer, params, x, f"{name}{number}")
    return x


def _apply(layer: Layer, params: Params, x: torch.Tensor, name: str) -> torch.Tensor:
    if isinstance(layer, Conv):
        return functional.relu(functional.conv2d(x, params[f"{name}/w"], params[f"{name}/b"], layer.stride, layer.pad))
    if isinstance(layer, Pool):
        return functional.max_pool2d(x, layer.size, layer.stride, layer.pad)
    if isinstance(layer, Mean):
        return x.mean((2, 3))
    if isinstance(layer, Branches):
        ends = [_through(tower, params, x, f"{name}/{place}/") for place, tower in enumerate(layer.towers)]
        return torch.cat(ends, dim=1)
    y = functional.linear(x.flatten(1), params[f"{name}/w"], params[f"{name}/b"])
    return functional.relu(y) if layer.relu else y
