"""The platforms that devices are of, and what people call them."""

from __future__ import annotations

from collections.abc import Mapping

#: What programs are lowered for.
LOWERED_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

#: The platforms that each name in user code stands for.
PLATFORMS: Mapping[str, tuple[str, ...]] = {
    "cpu": ("cpu",),
    "cuda": ("cuda",),
    "rocm": ("rocm",),
    "gpu": ("cuda", "rocm"),
    "tpu": ("tpu",),
}
