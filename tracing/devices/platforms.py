"""The platforms of devices, and the names that people use for them."""

from __future__ import annotations

from collections.abc import Mapping

#: The platforms that programs are lowered for.
LOWERED_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

#: The platforms that each name in user code stands for.
PLATFORMS: Mapping[str, tuple[str, ...]] = {
    "cpu": ("cpu",),
    "cuda": ("cuda",),
    "rocm": ("rocm",),
    "gpu": ("cuda", "rocm"),
    "tpu": ("tpu",),
}
