from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dflow.distributed.transport.security.throttle import Throttle, on_one_line


@given(st.lists(st.floats(0, 3), max_size=60), st.integers(1, 5))
def test_no_period_says_more_than_its_burst_and_nothing_is_uncounted(waits: list[float], burst: int) -> None:
    now = [0.0]
    throttle = Throttle(burst, 2.0, clock=lambda: now[0])
    said: list[float] = []
    counted = 0
    for wait in waits:
        now[0] += wait
        text = throttle.ask()
        if text is not None:
            said.append(now[0])
            counted += 1 + (int(text.split()[0][1:]) if text else 0)
    # A period may begin in the middle of this window, hence twice the burst.
    assert all(sum(start <= one < start + 2.0 for one in said) <= 2 * burst for start in said)
    assert len(waits) - counted == throttle._unsaid


def test_lines_left_out_are_counted_with_the_next_one() -> None:
    now = [0.0]
    throttle = Throttle(1, 1.0, clock=lambda: now[0])
    assert [throttle.ask() for _ in range(3)] == ["", None, None]
    now[0] = 1.0
    assert throttle.ask() == " (2 more like it were not logged)"


@given(st.text(max_size=50))
def test_a_logged_text_is_one_line_that_can_be_printed(text: str) -> None:
    shown = on_one_line(text)
    assert shown.isprintable()
    assert (shown == text) == text.isprintable()


def test_a_long_text_is_cut() -> None:
    assert on_one_line("x" * 5000) == "x" * 1000 + " ... (4000 more characters)"
