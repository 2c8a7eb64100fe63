"""Shares of GPUs and cores for each worker."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflow.distributed.launching.shares import VISIBLE, Share, core_shares, gpu_shares, visible_gpus
from dflow.tracing.errors import ConfigError

FOUR = ("0", "1", "2", "3")


@pytest.mark.parametrize(
    ("environment", "gpus"),
    [
        ({}, ("0", "1")),
        ({VISIBLE: "3, GPU-8f2"}, ("3", "GPU-8f2")),
        ({VISIBLE: ""}, ()),
        ({VISIBLE: "-1"}, ()),
        ({"JAX_PLATFORMS": "cpu"}, ()),
        ({"JAX_PLATFORMS": "cuda,cpu", VISIBLE: "1"}, ("1",)),
    ],
)
def test_the_gpus_are_those_that_the_environment_leaves(
    tmp_path: Path, environment: dict[str, str], gpus: tuple[str, ...]
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus(environment, tmp_path) == gpus


def test_workers_that_share_a_gpu_share_its_memory() -> None:
    memory = {"XLA_CLIENT_MEM_FRACTION": "0.450"}
    assert gpu_shares(("0", "1"), 3, None, {}) == [
        {VISIBLE: "0", **memory},
        {VISIBLE: "1", **memory},
        {VISIBLE: "0", **memory},
    ]
    assert gpu_shares(("0",), 2, None, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.2"}) == [{VISIBLE: "0"}] * 2


def test_without_gpus_nothing_is_set_and_0_keeps_to_the_cpu() -> None:
    assert gpu_shares((), 2, None, {}) == [{}, {}]
    assert gpu_shares(FOUR, 2, 0, {}) == [{VISIBLE: "", "JAX_PLATFORMS": "cpu"}] * 2


def test_too_few_gpus_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="3 tasks with 2 GPUs each need 6, but this process sees 4: 0, 1, 2, 3"):
        gpu_shares(FOUR, 3, 2, {})
    with pytest.raises(ConfigError, match="2 tasks with 1 GPUs each need 2, but this process sees 0\n"):
        gpu_shares((), 2, 1, {})


@given(st.integers(1, 9), st.integers(1, 20))
def test_gpus_are_dealt_so_that_nobody_goes_without(gpus: int, tasks: int) -> None:
    shares = gpu_shares([str(number) for number in range(gpus)], tasks, None, {})
    if tasks == 1:
        return
    dealt = [name for share in shares for name in share[VISIBLE].split(",")]
    assert all(share[VISIBLE] for share in shares)
    if gpus >= tasks:
        assert len(dealt) == len(set(dealt)) == tasks * (gpus // tasks)
    else:
        busiest = max(dealt.count(name) for name in dealt)
        assert float(shares[0]["XLA_CLIENT_MEM_FRACTION"]) * busiest <= 0.91


def test_each_of_several_workers_starts_its_part_of_the_threads() -> None:
    [share, other] = core_shares(range(8), 2, None, {"OMP_NUM_THREADS": "1"})
    assert share == other == Share({"NPROC": "4", "OPENBLAS_NUM_THREADS": "4", "MKL_NUM_THREADS": "4"})
    assert core_shares(range(2), 3, None, {})[0].environment["NPROC"] == "1"
    assert core_shares(range(8), 1, None, {}) == [Share()]


def test_cores_of_its_own_are_given_to_one_worker_only() -> None:
    shares = core_shares([1, 2, 4, 5], 2, 2, {})
    assert [share.cores for share in shares] == [(1, 2), (4, 5)]
    assert shares[0].environment["NPROC"] == "2"
    with pytest.raises(ConfigError, match="3 tasks with 2 cores each need 6, but this process may use 4"):
        core_shares([1, 2, 4, 5], 3, 2, {})
