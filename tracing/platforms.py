"""The platforms that devices are of, and what people call them."""

from __future__ import annotations

from collections.abc import Mapping

#: What programs are lowered for.
LOWERED_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

#: What a user may say, and which platforms it means.
PLATFORMS: Mapping[str, tuple[str, ...]] = {
    "cpu": ("cpu",),
    "cuda": ("cuda",),
    "rocm": ("rocm",),
    "gpu": ("cuda", "rocm"),
    "tpu": ("tpu",),
}
