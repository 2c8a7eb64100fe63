"""The use of the processor by this process and by kind of thread."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from dflow.distributed.observe.processor_use import processor_time, processor_use, thread_time, time_of_others
from tests.distributed.waiting import until


def test_the_time_of_other_threads_is_theirs_alone_without_those_that_have_ended() -> None:
    times_s = {11: 1.0, 12: 2.0, 14: 4.0}

    def time_of(thread: int) -> float:
        if thread not in times_s:
            raise OSError("there is no such thread")
        return times_s[thread]

    assert time_of_others([11, 12, 13, 14], {11}, time_of) == 6.0


def test_the_kinds_of_threads_add_up_to_the_time_of_the_process() -> None:
    before_s, _ = processor_time()
    python_s, other_s, _ = processor_use()
    after_s, _ = processor_time()
    assert before_s <= python_s + other_s <= after_s
    assert other_s >= 0


def test_the_time_of_a_thread_is_that_of_its_own_clock() -> None:
    before_s = time.thread_time()
    found_s = thread_time(threading.get_native_id())
    assert before_s <= found_s <= time.thread_time()


def test_a_thread_that_has_ended_has_no_time() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    native_id = thread.native_id
    assert native_id is not None
    # The system's thread ends a moment after Python's.
    until(lambda: not Path(f"/proc/self/task/{native_id}").exists())
    with pytest.raises(OSError, match="Invalid argument"):
        thread_time(native_id)


def test_each_wait_for_another_thread_is_a_wake_up() -> None:
    _, before = processor_time()
    for _ in range(100):
        begun = threading.Event()
        thread = threading.Thread(target=begun.wait)
        thread.start()
        begun.set()
        thread.join()
    _, after = processor_time()
    assert after > before
