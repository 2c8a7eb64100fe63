"""Restarts of tasks that ended, decided from events alone, so no test waits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflow.distributed.launching.restarts import LONGEST_PAUSE_S, STEADY_S, Restarts, restart_limit


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
