import contextlib
import threading
from pathlib import Path

from dflow.distributed.launching.run_logs import RunLogs


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


def test_a_first_line_that_is_too_large_puts_no_empty_file_aside(tmp_path: Path) -> None:
    with contextlib.closing(RunLogs(tmp_path, max_bytes=8)) as logs:
        logs.write("worker:0", "a line longer than all")
        assert [path.name for path in tmp_path.iterdir()] == ["worker-0.log"]


def test_a_second_run_in_the_folder_goes_on(tmp_path: Path) -> None:
    for line in ("first", "second"):
        with contextlib.closing(RunLogs(tmp_path)) as logs:
            logs.write("worker:0", line)
    assert (tmp_path / "worker-0.log").read_text() == "first\nsecond\n"


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
