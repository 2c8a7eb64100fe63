"""`make gpu-check`: what is worth running on a GPU, where one is at hand.

The tests marked `device`, then the benchmarks `call_cost` and `convnets`. Without a GPU it says so and ends well,
having checked nothing. `--on cpu` runs the same on the CPU, the benchmarks with one round and one network: that is a
check of this file, and of no GPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence

#: What JAX calls GPUs, and what it is told to use so that the CPU stays at hand too.
GPUS = {"gpu": "cuda,cpu", "cuda": "cuda,cpu", "rocm": "rocm,cpu"}

SMALL = ("--rounds", "1")


def commands(on: str) -> list[list[str]]:
    """What is run, one after the other, by the modules of Python that they are."""
    is_small = on == "cpu"
    return [
        ["pytest", "-m", "device", "-q", "tests"],
        ["benchmarks.call_cost", *(SMALL if is_small else ())],
        ["benchmarks.convnets", *((*SMALL, "--compile", "0", "--networks", "AlexNet") if is_small else ())],
    ]


def environment(on: str) -> dict[str, str]:
    """The settings of the commands. On GPUs matrices are multiplied as NumPy does, not with shorter numbers."""
    return {**os.environ, "JAX_PLATFORMS": GPUS.get(on, on), "JAX_DEFAULT_MATMUL_PRECISION": "highest"}


def backend() -> str:
    """What JAX runs on here when nobody tells it."""
    free = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    script = "import jax; print(jax.default_backend())"
    command = [sys.executable, "-c", script]
    told = subprocess.run(command, env=free, capture_output=True, text=True, timeout=120, check=False)
    return told.stdout.strip() if told.returncode == 0 else "cpu"


def has_gpu_without_plugin() -> bool:
    """Whether the system lists an NVIDIA GPU, which is only asked where JAX has found none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    return subprocess.run([tool, "-L"], capture_output=True, timeout=60, check=False).returncode == 0


def run(words: Sequence[str], on: str) -> int:
    """Run one of the commands; its exit status."""
    print(f"== {' '.join(words)}, on {on}", flush=True)
    return subprocess.run([sys.executable, "-m", *words], env=environment(on), check=False).returncode


def check(on: str | None, do: Callable[[Sequence[str], str], int] = run) -> int:
    """Run what there is to run on `on`, or on the GPU that JAX finds; the exit status."""
    found = on or backend()
    if on is None and found not in GPUS:
        if has_gpu_without_plugin():
            print("gpu-check: there is a GPU, but JAX has no plugin for it: pip install 'jax[cuda12]' into this Python")
            return 2
        print(f"gpu-check: JAX finds no GPU here, only {found}: nothing was checked")
        return 0
    failed = [words[0] for words in commands(found) if do(words, found)]
    print(f"gpu-check on {found}: {'failed: ' + ', '.join(failed) if failed else 'all passed'}")
    return 1 if failed else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", choices=["cpu", "cuda", "rocm"], help="do not look for a GPU, run on this")
    sys.exit(check(parser.parse_args().on))


if __name__ == "__main__":
    main()
