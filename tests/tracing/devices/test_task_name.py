import pytest

from dflow.tracing.devices.task_name import full_task_name, short_task_name, split_task_name, task_name
from dflow.tracing.errors import DeviceError


def test_a_name_and_its_parts() -> None:
    assert task_name("ps", 3) == "/job:ps/task:3"
    assert split_task_name("/job:ps/task:3") == ("ps", 3)
    assert short_task_name("/job:ps/task:3") == "ps:3"
    assert full_task_name("ps:3") == full_task_name("/job:ps/task:3") == "/job:ps/task:3"
    assert short_task_name("the coordinator") == "the coordinator"


@pytest.mark.parametrize("bad", ["ps:3", "/job:ps/task:", "/job:p s/task:1", "/job:ps/task:1/"])
def test_a_text_that_is_no_name_of_a_task_is_refused(bad: str) -> None:
    with pytest.raises(DeviceError, match="is not the name of a task; write /job:<job>/task:<index>"):
        split_task_name(bad)
