"""The division of a machine's GPUs and cores among several processes.

Why: otherwise each process allocates memory on every GPU, and starts as many threads as there are cores. The second
process then runs out of memory, or all are slow.

The user's own settings of threads and memory fractions in the environment are kept.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dflow.tracing.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
_MEMORY = "XLA_CLIENT_MEM_FRACTION"
_OLD_MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"
#: Fraction of a GPU's memory for all processes that share it together.
SHARED_MEMORY = 0.9
#: Variables that set the number of threads of XLA's own pool, and of the libraries of linear algebra.
_THREADS = ("NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Share:
    """One process's share: `environment` to add to its own, and the `cores` that it is pinned to (empty: any)."""

    environment: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()


def even_shares(
    given: Mapping[str, str], tasks: int, gpus_per_task: int | None = None, cores_per_task: int | None = None
) -> list[Share]:
    """Return the share of each of `tasks` processes of this machine; `gpu_shares` and `core_shares` have the rules."""
    gpus = gpu_shares(visible_gpus(given), tasks, gpus_per_task, given)
    cores = core_shares(sorted(os.sched_getaffinity(0)), tasks, cores_per_task, given)
    return [replace(core, environment={**core.environment, **gpu}) for core, gpu in zip(cores, gpus, strict=True)]


def visible_gpus(environment: Mapping[str, str], device_files: Path = Path("/dev")) -> tuple[str, ...]:
    """Return the GPUs that a process with this environment may use, as `CUDA_VISIBLE_DEVICES` names them.

    Without that variable, all that have a file in `device_files`. No GPUs if JAX_PLATFORMS begins with cpu or tpu.
    """
    if environment.get("JAX_PLATFORMS", "").split(",")[0] in ("cpu", "tpu"):
        return ()
    said = environment.get(VISIBLE)
    if said is not None:
        names = [name.strip() for name in said.split(",")]
        return tuple(name for name in names if name and not name.startswith("-"))
    count = sum(re.fullmatch(r"nvidia[0-9]+", path.name) is not None for path in device_files.glob("nvidia*"))
    return tuple(str(number) for number in range(count))


def gpu_shares(gpus: Sequence[str], tasks: int, per_task: int | None, given: Mapping[str, str]) -> list[dict[str, str]]:
    """Return, for each of `tasks` processes, the environment that gives it its GPUs.

    per_task  number of GPUs that each process has for itself; 0 restricts the processes to the CPU. None divides the
              GPUs evenly; with fewer GPUs than processes, several processes share a GPU and its memory
    given     the environment that the processes have already
    raises    ConfigError when there are too few GPUs, with both numbers
    """
    if per_task == 0:
        return [{VISIBLE: "", "JAX_PLATFORMS": "cpu"}] * tasks
    if per_task is not None and per_task * tasks > len(gpus):
        raise ConfigError(
            f"{tasks} tasks with {per_task} GPUs each need {per_task * tasks}, but this process sees {len(gpus)}"
            f"{': ' + ', '.join(gpus) if gpus else ''}",
            "start fewer workers, or give each fewer GPUs",
        )
    if not gpus or (tasks == 1 and per_task is None):
        return [{}] * tasks
    each = per_task or len(gpus) // tasks
    if each:
        return [{VISIBLE: ",".join(gpus[each * number : each * (number + 1)])} for number in range(tasks)]
    sharers = -(-tasks // len(gpus))
    memory = {} if given.keys() & {_MEMORY, _OLD_MEMORY} else {_MEMORY: f"{SHARED_MEMORY / sharers:.3f}"}
    return [{VISIBLE: gpus[number % len(gpus)], **memory} for number in range(tasks)]


def core_shares(cores: Sequence[int], tasks: int, per_task: int | None, given: Mapping[str, str]) -> list[Share]:
    """Return, for each of `tasks` processes, the share that sets its number of threads and its cores.

    per_task  number of cores that each process has for itself. None pins no process; several processes then get
              len(cores) // tasks threads each, at least one
    given     the environment that the processes have already; its variables of threads are kept
    raises    ConfigError when there are too few cores, with both numbers
    """
    if per_task is None:
        threads = str(max(1, len(cores) // tasks)) if tasks > 1 else ""
        return [Share({name: threads for name in _THREADS if threads and name not in given})] * tasks
    if per_task * tasks > len(cores):
        raise ConfigError(
            f"{tasks} tasks with {per_task} cores each need {per_task * tasks}, but this process may use {len(cores)}",
            "start fewer workers, or give each fewer cores",
        )
    own = [tuple(cores[per_task * number : per_task * (number + 1)]) for number in range(tasks)]
    return [Share({name: str(per_task) for name in _THREADS if name not in given}, mine) for mine in own]
