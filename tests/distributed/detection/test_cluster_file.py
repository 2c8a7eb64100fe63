from pathlib import Path

import pytest

from dflow.distributed.detection.cluster_file import parse_cluster_file, read_cluster_file
from dflow.tracing.errors import ConfigError


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('coordinator = "h:7"\n[jobs]\nps = 2\nworker = ["a", "b:1"]\n[security]\nsecret_file = "s"\n')
    file = read_cluster_file(str(path))
    assert file.counts == {"ps": 2, "worker": 2}
    spec = file.spec("worker", 1)
    assert (spec.coordinator, spec.task, spec.listens) == ("h:7", "/job:worker/task:1", "b:1")
    assert spec.security.secret_file == tmp_path / "s"
    assert file.spec("ps", 0).listens == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("coordinator", "the cluster file c.toml is no TOML: "),
        ("[jobs]\nps = 1", "c.toml has coordinator = None; write where it listens"),
        ('coordinator = "h"', "has coordinator = 'h'; write where it listens"),
        (
            'coordinator = "h:7"\nworkers = 3',
            "c.toml has 'workers', which means nothing; legal are coordinator, jobs, s",
        ),
        ('coordinator = "h:7"\njobs = 3', "jobs and security are tables"),
        ('coordinator = "h:7"\n[jobs]\nps = -1', "ps = -1; write how many tasks there are, or a list"),
        ('coordinator = "h:7"\n[jobs]\nps = true', "ps = True; write how many"),
        ('coordinator = "h:7"\n[jobs]\nps = [""]', "write how many tasks there are, or a list"),
        ('coordinator = "h:7"\n[security]\nkey = "x"', r"c.toml \[security\] has 'key', which means nothing"),
        ('coordinator = "h:7"\n[security]\nsecret_file = 3', "secret_file = 3; write a path"),
    ],
)
def test_a_mistake_is_named_with_the_file(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_cluster_file("c.toml", text)


def test_a_task_that_is_not_in_the_file_is_refused() -> None:
    file = parse_cluster_file("c.toml", 'coordinator = "h:7"\n[jobs]\nps = 2')
    with pytest.raises(ConfigError, match=r"c\.toml has 2 tasks of job 'ps', numbered from 0, and no ps:2"):
        file.spec("ps", 2)
    with pytest.raises(ConfigError, match=r"c\.toml has no job 'worker'; it has ps"):
        file.spec("worker", 0)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory"):
        read_cluster_file(str(tmp_path / "none.toml"))
