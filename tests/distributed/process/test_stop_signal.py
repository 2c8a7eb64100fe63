import signal
from pathlib import Path

import pytest

from tests.distributed.processes import Spawned

WAIT = """
import threading
from dflow.distributed.process.stop_signal import StopSignal
stop = StopSignal()
print("ready")
{extra}
print(stop.wait_for_exit_status())
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_gives_its_exit_status(tmp_path: Path, number: signal.Signals, status: int) -> None:
    with Spawned("-c", WAIT.format(extra=""), cwd=tmp_path) as spawned:
        spawned.read_until("ready")
        spawned.process.send_signal(number)
        assert spawned.finish() == (0, f"ready\n({status}, '')\n")


@pytest.mark.parametrize(
    ("extra", "output"),
    [
        ("threading.Thread(target=lambda: (stop.stop('first'), stop.stop('again'))).start()", "(1, 'first')\n"),
        ("print(stop.wait(0.01)); stop.stop('over')", "None\n(1, 'over')\n"),
        (
            "import signal as s; s.signal(s.SIGUSR2, lambda *_: stop.stop('told')); s.raise_signal(s.SIGUSR2)",
            "(1, 'told')\n",
        ),
    ],
    ids=["fault", "deadline", "another signal"],
)
def test_without_such_a_signal_a_fault_or_the_deadline_ends_the_wait(tmp_path: Path, extra: str, output: str) -> None:
    with Spawned("-c", WAIT.format(extra=extra), cwd=tmp_path) as spawned:
        assert spawned.finish() == (0, f"ready\n{output}")
