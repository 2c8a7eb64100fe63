"""`make gpu-check`: run the tests and benchmarks for a GPU, if there is one.

These are the tests marked `device`, then the benchmarks `call_cost` and `convnets`. Without a GPU it prints that, and
succeeds without a check. `--on cpu` runs the same on the CPU, with one round and one network for the benchmarks: that
checks this file, and no GPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence

#: JAX's names for GPUs, and the setting that keeps the CPU available too.
GPUS = {"gpu": "cuda,cpu", "cuda": "cuda,cpu", "rocm": "rocm,cpu"}

SMALL = ("--rounds", "1")


def commands(on: str) -> list[list[str]]:
    """The commands in order, as names of Python modules with arguments."""
    is_small = on == "cpu"
    return [
        ["pytest", "-m", "device", "-q", "tests"],
        ["benchmarks.call_cost", *(SMALL if is_small else ())],
        ["benchmarks.convnets", *((*SMALL, "--compile", "0", "--networks", "AlexNet") if is_small else ())],
    ]


def environment(on: str) -> dict[str, str]:
    """Settings of the commands. GPUs multiply matrices in full precision, as NumPy does."""
    return {**os.environ, "JAX_PLATFORMS": GPUS.get(on, on), "JAX_DEFAULT_MATMUL_PRECISION": "highest"}


def backend() -> str:
    """The platform that JAX chooses here by default."""
    free = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    script = "import jax; print(jax.default_backend())"
    command = [sys.executable, "-c", script]
    told = subprocess.run(command, env=free, capture_output=True, text=True, timeout=120, check=False)
    return told.stdout.strip() if told.returncode == 0 else "cpu"


def has_gpu_without_plugin() -> bool:
    """Whether the system lists an NVIDIA GPU; called only when JAX has found none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    return subprocess.run([tool, "-L"], capture_output=True, timeout=60, check=False).returncode == 0


def run(words: Sequence[str], on: str) -> int:
    """Run one of the commands; return its exit status."""
    print(f"== {' '.join(words)}, on {on}", flush=True)
    return subprocess.run([sys.executable, "-m", *words], env=environment(on), check=False).returncode


def check(on: str | None, do: Callable[[Sequence[str], str], int] = run) -> int:
    """Run the checks on `on`, or on the GPU that JAX finds; return the exit status."""
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
