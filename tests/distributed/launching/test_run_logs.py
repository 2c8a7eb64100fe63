import contextlib
import subprocess
import sys
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


def test_a_full_disk_costs_lines_and_says_so_once(tmp_path: Path) -> None:
    path = tmp_path / "launcher.log"
    path.symlink_to("/dev/full")
    with contextlib.closing(RunLogs(tmp_path)) as logs:
        assert logs.write("launcher", "one") == (
            f"{path} cannot be written: No space left on device; its lines are only shown here"
        )
        assert logs.write("launcher", "two") == ""
        assert logs.write("worker:0", "of another file") == ""
        logs.close()
        path.unlink()
        assert logs.write("launcher", "three") == f"{path} is written again; 2 lines are missing in it"
        assert logs.write("launcher", "four") == ""
    assert path.read_text() == "... 2 lines are missing here: the file could not be written\nthree\nfour\n"
    assert (tmp_path / "worker-0.log").read_text() == "of another file\n"


def test_a_line_that_fits_in_part_is_left_out_whole(tmp_path: Path) -> None:
    script = """
import resource, sys
from pathlib import Path
from dflow.distributed.launching.run_logs import RunLogs
logs = RunLogs(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
print(logs.write("worker:0", "whole"), logs.write("worker:0", "too long"))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
logs.write("worker:0", "later")
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "worker-0.log cannot be written: File too large" in done.stdout
    assert (tmp_path / "worker-0.log").read_text() == (
        "whole\n... 1 lines are missing here: the file could not be written\nlater\n"
    )
