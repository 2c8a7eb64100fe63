"""`make gpu-check`: run the tests, examples and benchmarks for a GPU, if there is one.

These are the tests marked `device`, all examples, a launched cluster, and benchmarks: of calls, convolutional networks,
sparse and dense steps in one process and on a cluster, and, where there are two GPUs, of several devices. Without a GPU
it prints that, and succeeds without a check. `--on cpu` runs the same on the CPU with few steps and tiny benchmarks:
that checks this file, and no GPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: JAX's names for GPUs, and the setting that keeps the CPU available too.
GPUS = {"gpu": "cuda,cpu", "cuda": "cuda,cpu", "rocm": "rocm,cpu"}
#: Options of an example that make it short.
FEW_STEPS = {
    "actor_learner": ("--steps", "160"),
    "cartpole": ("--updates", "2"),
    "click_through": ("--steps", "20"),
    "clicks_from_parquet": ("--rows", "5000", "--every", "5"),
    "digits": ("--steps", "40"),
    "factorisation": ("--steps", "20"),
    "fine_tune": ("--steps", "5"),
    "generator": ("--steps", "20"),
    "image_classifier": ("--steps", "2", "--batch", "8"),
    "language_model": ("--steps", "10", "--vocabulary", "200"),
    "pallas_kernel": ("--steps", "2"),
    "recommend": ("--steps", "20"),
}
#: Benchmarks with their options on a GPU, whose memory is smaller than a host's.
BENCHMARKS = {
    "call_cost": (),
    "convnets": (),
    "embedding": ("--small",),
    "many_variables": (),
    "devices": (),
}


def commands(on: str, devices: int) -> list[list[str]]:
    """The commands in order, as names of Python modules with arguments. `devices` is the number of GPUs."""
    is_small = on == "cpu"
    examples = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
    measured = [name for name in BENCHMARKS if name != "devices" or is_small or devices > 1]
    launch = ["dflow", "launch", "--ps", "1", "--workers", "2", "examples/digits.py"]
    return [
        ["pytest", "-m", "device", "-q", "tests"],
        *([f"examples.{name}", *(FEW_STEPS[name] if is_small else ())] for name in examples),
        [*launch, *(FEW_STEPS["digits"] if is_small else ())],
        *(["benchmarks._tiny", name] if is_small else [f"benchmarks.{name}", *BENCHMARKS[name]] for name in measured),
    ]


def environment(on: str) -> dict[str, str]:
    """Settings of the commands. GPUs multiply matrices in full precision, as NumPy does, and processes share them."""
    own = {"JAX_PLATFORMS": GPUS.get(on, on), "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    if on in GPUS:
        own["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    return {**os.environ, **own}


def backend(platforms: str = "") -> tuple[str, int]:
    """The platform that JAX chooses here, by default or of `platforms`, and its number of devices."""
    free = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    script = "import jax; print(jax.default_backend(), jax.local_device_count())"
    command = [sys.executable, "-c", script]
    asked = free | ({"JAX_PLATFORMS": platforms} if platforms else {})
    told = subprocess.run(command, env=asked, capture_output=True, text=True, timeout=120, check=False)
    if told.returncode != 0:
        return "cpu", 1
    name, count = told.stdout.split()
    return name, int(count)


def has_gpu_without_plugin() -> bool:
    """Whether the system lists an NVIDIA GPU; called only when JAX has found none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    return subprocess.run([tool, "-L"], capture_output=True, timeout=60, check=False).returncode == 0


def run(words: Sequence[str], on: str) -> int:
    """Run one of the commands; return its exit status."""
    print(f"== {' '.join(words)}, on {on}", flush=True)
    return subprocess.run([sys.executable, "-m", *words], cwd=ROOT, env=environment(on), check=False).returncode


def check(on: str | None, do: Callable[[Sequence[str], str], int] = run) -> int:
    """Run the checks on `on`, or on the GPU that JAX finds; return the exit status."""
    found, count = backend(GPUS.get(on, on) if on else "")
    if on is None and found not in GPUS:
        if has_gpu_without_plugin():
            print("gpu-check: there is a GPU, but JAX has no plugin for it: pip install 'jax[cuda12]' into this Python")
            return 2
        print(f"gpu-check: JAX finds no GPU here, only {found}: nothing was checked")
        return 0
    on = on or found
    failed = [" ".join(words[:2]) for words in commands(on, count) if do(words, on)]
    left_out = "" if on == "cpu" or count > 1 else "; one GPU: no benchmark of several devices"
    print(f"gpu-check on {on}: {'failed: ' + ', '.join(failed) if failed else 'all passed'}{left_out}")
    return 1 if failed else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", choices=["cpu", "cuda", "rocm"], help="do not look for a GPU, run on this")
    sys.exit(check(parser.parse_args().on))


if __name__ == "__main__":
    main()
