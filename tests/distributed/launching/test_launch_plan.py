"""The program and environment of each task of a launch."""

import pytest

from dflow.distributed.detection.cluster_spec import COORDINATOR
from dflow.distributed.launching.launch_plan import LaunchPlan, Setting
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
    assert program.environment == {**role, "A": "all"}
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
