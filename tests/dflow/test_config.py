import re
from pathlib import Path

import pytest

from dflow.config import Config, from_environment
from dflow.tracing.errors import ConfigError


def test_nothing_set_gives_the_defaults() -> None:
    assert from_environment({}) == from_environment({"DFLOW_CHECK": "", "DFLOW_DUMP": ""}) == Config(False, None)


@pytest.mark.parametrize(("text", "value"), [("0", False), ("1", True)])
def test_a_switch_is_0_or_1(text: str, value: bool) -> None:
    assert from_environment({"DFLOW_CHECK": text}).check is value


@pytest.mark.parametrize("text", ["yes", "true", "2", " "])
def test_another_value_is_refused_with_the_legal_ones(text: str) -> None:
    with pytest.raises(ConfigError, match=f"DFLOW_CHECK is {text!r}; the legal values are 0 and 1"):
        from_environment({"DFLOW_CHECK": text})


def test_a_budget_is_a_number_of_seconds() -> None:
    assert from_environment({"DFLOW_PLACEMENT_S": "0.5"}).placement_s == 0.5


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon"])
def test_a_budget_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"DFLOW_PLACEMENT_S is {text!r}; the legal values are numbers of seconds"):
        from_environment({"DFLOW_PLACEMENT_S": text})


def test_a_folder_is_a_path_and_other_variables_are_left_alone() -> None:
    found = from_environment({"DFLOW_DUMP": "some/where", "DFLOW_COORDINATOR": "127.0.0.1:1", "CHECK": "x"})
    assert found == Config(dump=Path("some/where"))


def test_a_misspelt_variable_is_warned_of_with_the_name_it_is_near_to() -> None:
    message = "DFLOW_COORDINATER is set, but dflow reads no variable of that name; did you mean DFLOW_COORDINATOR?"
    with pytest.warns(UserWarning, match=re.escape(message)):
        from_environment({"DFLOW_COORDINATER": "127.0.0.1:1"})
