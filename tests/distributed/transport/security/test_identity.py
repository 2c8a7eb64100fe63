from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflow.distributed.transport.security.identity import Identity, identities_of, parse_identity, require_admitted
from dflow.tracing.errors import SecurityError

JOBS = st.from_regex(r"[A-Za-z][A-Za-z0-9_]{0,8}", fullmatch=True)
INDICES = st.integers(0, 999_999_999)
IDENTITIES = st.builds(Identity, JOBS, st.none() | INDICES)


def admits(identities: list[Identity], name: str) -> bool:
    """Whether a certificate for `identities` admits `name`."""
    try:
        require_admitted(identities, name)
    except SecurityError:
        return False
    return True


@given(IDENTITIES)
def test_an_identity_comes_back_from_its_uri_and_its_text(identity: Identity) -> None:
    assert identities_of([identity.uri]) == (identity,)
    assert parse_identity(str(identity)) == identity


@given(st.lists(IDENTITIES, max_size=4), JOBS, INDICES)
def test_a_task_is_admitted_by_its_number_or_its_job_alone(identities: list[Identity], job: str, index: int) -> None:
    expected = Identity(job) in identities or Identity(job, index) in identities
    assert admits(identities, f"/job:{job}/task:{index}") == expected
    assert admits([*identities, Identity(job)], f"/job:{job}/task:{index}")


@given(st.lists(IDENTITIES, max_size=4), st.text(max_size=30))
def test_a_name_of_no_task_is_admitted_by_exactly_itself(identities: list[Identity], name: str) -> None:
    if not name.startswith("/job:"):
        assert admits(identities, name) == (Identity(name) in identities)


@pytest.mark.parametrize(
    "uri",
    [
        "dflow://job/worker/task/",
        "dflow://job/worker/task/03",
        "dflow://job/worker/task/-1",
        "dflow://job/worker/task/3/",
        "dflow://job/worker/task/3\n",
        "dflow://job/worker/task/٣",
        "dflow://job//task/3",
        "dflow://job/",
        "DFLOW://job/worker",
        "https://job/worker",
        "xdflow://job/worker",
    ],
)
def test_a_uri_of_another_form_names_no_one(uri: str) -> None:
    assert identities_of([uri]) == ()
