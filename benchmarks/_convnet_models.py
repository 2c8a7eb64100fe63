"""The four networks of the paper's Table 1, each defined once as layers and run by JAX or by PyTorch.

They are the networks of Chintala's convnet-benchmarks: AlexNet of one tower, Overfeat's fast model, OxfordNet (VGG-A),
and GoogleNet without its auxiliary heads; no dropout and no local normalisation, as there. Parameters are a dict of
arrays by layer name; convolutions take images of [batch, height, width, channel], `f32[n, h, w, 3]`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

CLASSES = 1000
#: Learning rate of gradient descent; small, so that nothing overflows.
RATE = 1e-4

Params = Mapping[str, Any]
#: Height, width and channels of a value between layers; for a flat value, only channels.
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Conv:
    """A convolution with a bias, then a relu."""

    out: int
    size: int
    stride: int = 1
    pad: int = 0


@dataclass(frozen=True)
class Pool:
    """The maximum of windows."""

    size: int
    stride: int
    pad: int = 0


@dataclass(frozen=True)
class Mean:
    """The mean of each channel."""


@dataclass(frozen=True)
class Dense:
    """A matrix and a bias, then a relu unless it is the last."""

    out: int
    relu: bool = True


@dataclass(frozen=True)
class Branches:
    """Layers side by side, their channels one after the other."""

    towers: tuple[tuple[Layer, ...], ...]


Layer = Conv | Pool | Mean | Dense | Branches


@dataclass(frozen=True)
class Network:
    """A network; `batch` is the paper's batch size, `image` the height and width of its images."""

    name: str
    layers: tuple[Layer, ...]
    batch: int
    image: int = 224

    def narrowed(self, by: int, image: int) -> Network:
        """Return the same network with smaller images and a fraction of the channels, for tests."""
        return replace(self, layers=tuple(_narrowed(layer, by) for layer in self.layers), image=image)


def _narrowed(layer: Layer, by: int) -> Layer:
    if isinstance(layer, (Conv, Dense)):
        return replace(layer, out=max(2, layer.out // by))
    if isinstance(layer, Branches):
        return Branches(tuple(tuple(_narrowed(inner, by) for inner in tower) for tower in layer.towers))
    return layer


def _same(out: int) -> Conv:
    return Conv(out, 3, pad=1)


def _inception(one: int, three: tuple[int, int], five: tuple[int, int], pooled: int) -> Branches:
    return Branches(
        (
            (Conv(one, 1),),
            (Conv(three[0], 1), Conv(three[1], 3, pad=1)),
            (Conv(five[0], 1), Conv(five[1], 5, pad=2)),
            (Pool(3, 1, pad=1), Conv(pooled, 1)),
        )
    )


_HEAD = (Dense(4096), Dense(4096), Dense(CLASSES, relu=False))

ALEXNET = Network(
    "AlexNet",
    (
        *(Conv(64, 11, 4, 2), Pool(3, 2), Conv(192, 5, pad=2), Pool(3, 2)),
        *(_same(384), _same(256), _same(256), Pool(3, 2), *_HEAD),
    ),
    batch=128,
)

OVERFEAT = Network(
    "Overfeat",
    (
        *(Conv(96, 11, 4), Pool(2, 2), Conv(256, 5), Pool(2, 2), _same(512), _same(1024), _same(1024), Pool(2, 2)),
        *(Dense(3072), Dense(4096), Dense(CLASSES, relu=False)),
    ),
    batch=128,
    image=231,
)

OXFORDNET = Network(
    "OxfordNet",
    (
        *(_same(64), Pool(2, 2), _same(128), Pool(2, 2), _same(256), _same(256), Pool(2, 2)),
        *(_same(512), _same(512), Pool(2, 2), _same(512), _same(512), Pool(2, 2), *_HEAD),
    ),
    batch=64,
)

GOOGLENET = Network(
    "GoogleNet",
    (
        *(Conv(64, 7, 2, 3), Pool(3, 2, 1), Conv(64, 1), _same(192), Pool(3, 2, 1)),
        *(_inception(64, (96, 128), (16, 32), 32), _inception(128, (128, 192), (32, 96), 64), Pool(3, 2, 1)),
        *(_inception(192, (96, 208), (16, 48), 64), _inception(160, (112, 224), (24, 64), 64)),
        *(_inception(128, (128, 256), (24, 64), 64), _inception(112, (144, 288), (32, 64), 64)),
        *(_inception(256, (160, 320), (32, 128), 128), Pool(3, 2, 1)),
        *(_inception(256, (160, 320), (32, 128), 128), _inception(384, (192, 384), (48, 128), 128)),
        *(Mean(), Dense(CLASSES, relu=False)),
    ),
    batch=128,
)

NETWORKS = (ALEXNET, OVERFEAT, OXFORDNET, GOOGLENET)


def shape_after(layer: Layer, shape: Shape) -> Shape:
    """Return the shape of the layer's result."""
    if isinstance(layer, (Conv, Pool)):
        sides = ((side + 2 * layer.pad - layer.size) // layer.stride + 1 for side in shape[:2])
        return (*sides, layer.out if isinstance(layer, Conv) else shape[2])
    if isinstance(layer, Branches):
        ends = [shape_through(tower, shape) for tower in layer.towers]
        return (*ends[0][:2], sum(end[2] for end in ends))
    return (layer.out,) if isinstance(layer, Dense) else shape[-1:]


def shape_through(layers: Sequence[Layer], shape: Shape) -> Shape:
    """Return the shape of the result of consecutive layers."""
    for layer in layers:
        shape = shape_after(layer, shape)
    return shape


def weights(layers: Sequence[Layer], shape: Shape, name: str = "") -> Iterator[tuple[str, Shape, Shape]]:
    """Yield the name of each layer with weights, the shape of the weights, and the shape of the layer's input."""
    for number, layer in enumerate(layers):
        inner = f"{name}{number}"
        if isinstance(layer, Conv):
            yield inner, (layer.size, layer.size, shape[2], layer.out), shape
        elif isinstance(layer, Dense):
            yield inner, (math.prod(shape), layer.out), shape
        elif isinstance(layer, Branches):
            for tower, within in enumerate(layer.towers):
                yield from weights(within, shape, f"{inner}/{tower}/")
        shape = shape_after(layer, shape)


def initial(network: Network, seed: int = 0, dtype: Any = np.float32) -> dict[str, np.ndarray[Any, Any]]:
    """Draw parameters by He initialisation, with zero biases."""
    random = np.random.default_rng(seed)
    drawn = {}
    for name, shape, _ in weights(network.layers, (network.image, network.image, 3)):
        scale = math.sqrt(2 / math.prod(shape[:-1]))
        drawn[f"{name}/w"] = (scale * random.standard_normal(shape, np.float32)).astype(dtype)
        drawn[f"{name}/b"] = np.zeros(shape[-1], dtype)
    return drawn


def batch_of(network: Network, size: int, seed: int = 1, dtype: Any = np.float32) -> tuple[Any, Any]:
    """Draw images `[size, image, image, 3]` and labels `i32[size]` from a seed."""
    random = np.random.default_rng(seed)
    images = random.standard_normal((size, network.image, network.image, 3), np.float32).astype(dtype)
    return images, random.integers(0, network.layers[-1].out, size).astype(np.int32)  # type: ignore[union-attr]


def loss(layers: Sequence[Layer], params: Params, images: Any, labels: Any) -> Any:
    """The mean cross-entropy, f32[]."""
    logits = _through(layers, params, images, "").astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return (jax.nn.logsumexp(logits, axis=1) - chosen).mean()


def _through(layers: Sequence[Layer], params: Params, x: Any, name: str) -> Any:
    for number, layer in enumerate(layers):
        x = _apply(layer, params, x, f"{name}{number}")
    return x


def _apply(layer: Layer, params: Params, x: Any, name: str) -> Any:
    if isinstance(layer, Conv):
        return jax.nn.relu(_convolved(x, params[f"{name}/w"], layer) + params[f"{name}/b"])
    if isinstance(layer, Pool):
        return _pooled(_pooled(x, layer, 1), layer, 2)
    if isinstance(layer, Mean):
        return x.mean((1, 2))
    if isinstance(layer, Branches):
        ends = [_through(tower, params, x, f"{name}/{place}/") for place, tower in enumerate(layer.towers)]
        return jnp.concatenate(ends, axis=-1)
    y = x.reshape(x.shape[0], -1) @ params[f"{name}/w"] + params[f"{name}/b"]
    return jax.nn.relu(y) if layer.relu else y


def _convolved(x: Any, weights: Any, layer: Conv) -> Any:
    if (layer.size, layer.stride, layer.pad) == (1, 1, 0):
        # A product of matrices, which takes GoogleNet's step a tenth less time on a CPU.
        return x @ weights[0, 0]
    strides, pads = (layer.stride,) * 2, ((layer.pad,) * 2,) * 2
    return jax.lax.conv_general_dilated(x, weights, strides, pads, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _pooled(x: Any, layer: Pool, axis: int) -> Any:
    """Maximum of windows along one axis, as a maximum of slices: the gradient of XLA's windows is slow on a CPU."""
    pads = [(0, 0, 0)] * x.ndim
    pads[axis] = (layer.pad, layer.pad, 0)
    x = jax.lax.pad(x, jnp.array(-jnp.inf, x.dtype), pads)
    last = x.shape[axis] - layer.size
    slices = (jax.lax.slice_in_dim(x, at, at + last + 1, layer.stride, axis) for at in range(layer.size))
    return functools.reduce(jnp.maximum, slices)
