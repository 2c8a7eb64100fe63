import re
from pathlib import Path

import pytest

from dflow.config import Config, from_environment
from dflow.tracing.errors import ConfigError


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Config(False, None)),
        ({"DFLOW_CHECK": "", "DFLOW_DUMP": ""}, Config(False, None)),
        ({"DFLOW_CHECK": "0"}, Config(False)),
        ({"DFLOW_CHECK": "1"}, Config(True)),
        ({"DFLOW_PLACEMENT_S": "0.5"}, Config(placement_s=0.5)),
        (
            {"DFLOW_DUMP": "some/where", "DFLOW_JOB": "ps", "CHECK": "x"},
            Config(dump=Path("some/where")),
        ),
    ],
)
def test_settings_are_read_from_variables(environment: dict[str, str], expected: Config) -> None:
    assert from_environment(environment) == expected


@pytest.mark.parametrize(
    ("name", "text", "legal"),
    [
        *(("DFLOW_CHECK", text, "0 and 1") for text in ("yes", "true", "2", " ")),
        *(("DFLOW_PLACEMENT_S", text, "numbers of seconds") for text in ("0", "-1", "nan", "inf", "soon")),
    ],
)
def test_another_value_is_refused_with_the_legal_ones(name: str, text: str, legal: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {text!r}; the legal values are {legal}"):
        from_environment({name: text})


def test_a_misspelt_variable_is_warned_of_with_the_name_it_is_near_to() -> None:
    message = "DFLOW_COORDINATER is set, but dflow reads no variable of that name; did you mean DFLOW_COORDINATOR?"
    with pytest.warns(UserWarning, match=re.escape(message)):
        from_environment({"DFLOW_COORDINATER": "127.0.0.1:1"})
