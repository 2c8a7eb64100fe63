"""What a launch will start: tasks and hosts, shares of a machine, restarts; and the logs of its tasks."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflow.distributed.detection.cluster_spec import COORDINATOR
from dflow.distributed.launching.launch_plan import LaunchPlan, Setting
from dflow.distributed.launching.restarts import LONGEST_PAUSE_S, STEADY_S, Restarts, restart_limit
from dflow.distributed.launching.run_logs import RunLogs
from dflow.distributed.launching.shares import VISIBLE, Share, core_shares, gpu_shares, visible_gpus
from dflow.distributed.launching.ssh_hosts import HostPart, SshHost, placed, read_hosts
from dflow.tracing.errors import ConfigError, DeviceError

PLAN = LaunchPlan(
    "train.py",
    ("--lr", "3"),
    stock={"ps": 2},
    jobs={"worker": 2, "evaluator": 1},
    environment=(Setting("A", "all"), Setting("A", "of workers", "worker"), Setting("A", "of one", "worker", 1)),
)


def test_tasks_are_those_of_the_jobs() -> None:
    assert PLAN.servers == ("/job:ps/task:0", "/job:ps/task:1")
    assert PLAN.workers == ("/job:worker/task:0", "/job:worker/task:1", "/job:evaluator/task:0")


def test_a_worker_runs_the_script_and_knows_who_it_is() -> None:
    program = PLAN.program("/job:evaluator/task:0", "127.0.0.1:7")
    assert program.words == ("train.py", "--lr", "3")
    role = {"DFLOW_COORDINATOR": "127.0.0.1:7", "DFLOW_JOB": "evaluator", "DFLOW_INDEX": "0"}
    assert program.environment == {**role, "A": "all", "DFLOW_RESTARTED": "none"}
    restarted = replace(PLAN, restarts={"worker": 3, "ps": 1, "evaluator": 0})
    assert restarted.program("/job:worker/task:0", "x").environment["DFLOW_RESTARTED"] == "ps,worker"
    assert program.defaults == {}


def test_servers_run_dflow_itself_and_leave_accelerators_alone() -> None:
    program = PLAN.program("/job:ps/task:1", "127.0.0.1:7")
    assert program.words == ("-P", "-m", "dflow", "task", "--job", "ps", "--index", "1")
    assert program.environment["DFLOW_COORDINATOR"] == "127.0.0.1:7"
    assert program.defaults == {"JAX_PLATFORMS": "cpu"}
    words = " ".join(PLAN.program(COORDINATOR, "").words)
    assert words.endswith("coordinator --job ps=2 --job worker=2 --job evaluator=1")
    assert PLAN.program(COORDINATOR, "127.0.0.1:7").words[-1] == "127.0.0.1:7"


def test_the_narrower_and_later_setting_wins() -> None:
    found = {task: PLAN.program(task, "x").environment["A"] for task in (COORDINATOR, *PLAN.servers, *PLAN.workers)}
    assert list(found.values()) == ["all", "all", "all", "of workers", "of one", "all"]


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("A=1", Setting("A", "1")),
        ("A=", Setting("A", "")),
        ("A=b:c=d", Setting("A", "b:c=d")),
        ("ps:A=1", Setting("A", "1", "ps")),
        ("worker:12:A=1", Setting("A", "1", "worker", 12)),
    ],
)
def test_a_setting_is_read(text: str, setting: Setting) -> None:
    assert Setting.parse(text) == setting


@pytest.mark.parametrize("text", ["A", "=1", "worker:x:A=1", "9A=1"])
def test_a_setting_without_a_name_and_a_value_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="sets no environment variable; write NAME=VALUE, worker:NAME=VALUE"):
        Setting.parse(text)


def test_a_name_that_is_no_job_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no job 'wroker' in this launch; its jobs are ps, worker, coord"):
        LaunchPlan("x.py", restarts={"wroker": 1})
    with pytest.raises(ConfigError, match="there is no job 'evaluator' in this launch"):
        LaunchPlan("x.py", environment=(Setting("A", "1", "evaluator"),))
    with pytest.raises(ConfigError, match="A is set for worker:1, but worker has 1 tasks, numbered from 0"):
        LaunchPlan("x.py", environment=(Setting("A", "1", "worker", 1),))


def test_a_job_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="job 'ps' is given both for stock tasks and for the script"):
        LaunchPlan("x.py", jobs={"ps": 1})
    with pytest.raises(ConfigError, match="a job cannot be called 'coordinator'"):
        LaunchPlan("x.py", jobs={"coordinator": 1})
    with pytest.raises(DeviceError, match="'gpu' is a platform"):
        LaunchPlan("x.py", jobs={"gpu": 1})


# The file of hosts of `dflow launch --on ssh`, and the host of each task.


def hosts_of(folder: Path, text: str) -> tuple[SshHost, ...]:
    (folder / "hosts").write_text(text)
    return read_hosts(folder / "hosts")


def test_a_file_lists_hosts_with_their_settings(tmp_path: Path) -> None:
    text = "# ours\nnode1 slots=2\n\nme@10.0.0.2 port=2222   # spare\n::1 user=you slots=0\n"
    assert hosts_of(tmp_path, text) == (
        SshHost("node1", 2),
        SshHost("10.0.0.2", 1, "me", 2222),
        SshHost("::1", 0, "you"),
    )


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "expected at least one host, got none"),
        ("a\na slots=2", "hosts:2: a is there already"),
        ("a slots=many", "hosts:1: expected slots=N, user=NAME or port=N, got 'slots=many'"),
        ("a max_slots=2", "got 'max_slots=2'"),
        ("a 2", "got '2'"),
        ("-oProxyCommand=x", "hosts:1: expected the name of a host, got '-oProxyCommand=x'"),
        ("a;b", "expected the name of a host, got 'a;b'"),
        ("-x@a", "got 'user=-x'"),
    ],
)
def test_a_malformed_line_is_an_error_that_names_it(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(ConfigError) as raised:
        hosts_of(tmp_path, text)
    assert error in str(raised.value)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hosts cannot be read: No such file"):
        read_hosts(tmp_path / "hosts")


def test_scripts_fill_the_slots_and_servers_go_round(tmp_path: Path) -> None:
    a, b = hosts = hosts_of(tmp_path, "a slots=2\nb slots=2")
    assert placed(hosts, ["ps0", "ps1", "ps2"], ["w0", "w1", "w2"]) == {
        "w0": HostPart(a, 0, 2),
        "w1": HostPart(a, 1, 2),
        "w2": HostPart(b, 0, 1),
        "ps0": HostPart(a),
        "ps1": HostPart(b),
        "ps2": HostPart(a),
    }


def test_servers_go_to_hosts_without_slots(tmp_path: Path) -> None:
    a, b = hosts = hosts_of(tmp_path, "a\nb slots=0")
    assert placed(hosts, ["ps0", "ps1"], ["w0"]) == {"w0": HostPart(a, 0, 1), "ps0": HostPart(b), "ps1": HostPart(b)}


def test_too_few_slots_are_an_error_with_both_numbers(tmp_path: Path) -> None:
    hosts = hosts_of(tmp_path, "a slots=2\nb")
    with pytest.raises(ConfigError, match="expected slots for 4 tasks that run the script, got 3 on 2 hosts"):
        placed(hosts, [], ["w0", "w1", "w2", "w3"])


# Shares of GPUs and cores for each worker.


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


# Restarts of tasks that ended, decided from events alone, so no test waits.


def pauses(limit: int, *ends: tuple[int, float]) -> list[float | None]:
    restarts = Restarts(limit)
    return [restarts.pause_s(status, ran_s) for status, ran_s in ends]


@pytest.mark.parametrize(("text", "limit"), [("never", 0), ("on-failure", 3), ("on-failure:12", 12)])
def test_a_policy_is_read(text: str, limit: int) -> None:
    assert restart_limit(text) == limit


@pytest.mark.parametrize("text", ["", "always", "on-failure:", "on-failure:-1", "never:2"])
def test_another_text_is_refused_with_what_is_legal(text: str) -> None:
    with pytest.raises(ValueError, match="is no restart policy; give never, on-failure or on-failure:5"):
        restart_limit(text)


@given(
    st.integers(0, 9),
    st.lists(st.tuples(st.sampled_from([0, 1, -9]), st.sampled_from([0.0, 1.0, STEADY_S])), max_size=20),
)
def test_no_more_than_the_limit_in_a_row_and_never_after_a_good_end(limit: int, ends: list[tuple[int, float]]) -> None:
    in_a_row = 0
    for (status, ran_s), pause_s in zip(ends, pauses(limit, *ends), strict=True):
        in_a_row = 0 if ran_s >= STEADY_S else in_a_row
        assert (pause_s is not None) == (status != 0 and in_a_row < limit)
        if pause_s is not None:
            assert pause_s == (min(2.0 ** (in_a_row - 1), LONGEST_PAUSE_S) if in_a_row else 0.0)
            in_a_row += 1


def test_each_task_has_a_file_with_its_lines_at_once(tmp_path: Path) -> None:
    with contextlib.closing(RunLogs(tmp_path / "new" / "run")) as logs:
        logs.write("worker:0", "one")
        logs.write("ps:1", "\N{GREEK SMALL LETTER ALPHA} \udcff")
        logs.write("worker:0", "two")
        assert (tmp_path / "new/run/worker-0.log").read_text() == "one\ntwo\n"
        assert (tmp_path / "new/run/ps-1.log").read_text() == "\N{GREEK SMALL LETTER ALPHA} \\udcff\n"


def test_a_file_that_would_be_too_large_is_put_aside_once(tmp_path: Path) -> None:
    with contextlib.closing(RunLogs(tmp_path, max_bytes=8)) as logs:
        logs.write("worker:0", "aaa")
        logs.write("worker:0", "bbb")
        assert (tmp_path / "worker-0.log").read_text() == "aaa\nbbb\n"
        for line in ("ccc", "ddd", "eee", "a line longer than all"):
            logs.write("worker:0", line)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["worker-0.log", "worker-0.log.1"]
        assert (tmp_path / "worker-0.log.1").read_text() == "eee\n"
        assert (tmp_path / "worker-0.log").read_text() == "a line longer than all\n"


def test_lines_of_many_threads_stay_whole(tmp_path: Path) -> None:
    with contextlib.closing(RunLogs(tmp_path)) as logs:
        threads = [
            threading.Thread(target=lambda text=text: [logs.write("worker:0", text * 50) for _ in range(100)])
            for text in "abcd"
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = (tmp_path / "worker-0.log").read_text().splitlines()
    assert len(lines) == 400
    assert {len(set(line)) for line in lines} == {1}


def test_a_full_disk_costs_lines_and_says_so_once(tmp_path: Path) -> None:
    path = tmp_path / "launcher.log"
    path.symlink_to("/dev/full")
    with contextlib.closing(RunLogs(tmp_path)) as logs:
        assert logs.write("launcher", "one") == (
            f"{path} cannot be written: No space left on device; its lines are only shown here"
        )
        assert logs.write("launcher", "two") == ""
        assert logs.write("worker:0", "of another file") == ""
        logs.close()
        path.unlink()
        assert logs.write("launcher", "three") == f"{path} is written again; 2 lines are missing in it"
        assert logs.write("launcher", "four") == ""
    assert path.read_text() == "... 2 lines are missing here: the file could not be written\nthree\nfour\n"
    assert (tmp_path / "worker-0.log").read_text() == "of another file\n"


def test_a_line_that_fits_in_part_is_left_out_whole(tmp_path: Path) -> None:
    script = """
import resource, sys
from dataclasses import replace
from pathlib import Path
from dflow.distributed.launching.run_logs import RunLogs
logs = RunLogs(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
print(logs.write("worker:0", "whole"), logs.write("worker:0", "too long"))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
logs.write("worker:0", "later")
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "worker-0.log cannot be written: File too large" in done.stdout
    assert (tmp_path / "worker-0.log").read_text() == (
        "whole\n... 1 lines are missing here: the file could not be written\nlater\n"
    )
