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


def test_a_fault_of_its_own_gives_1_and_the_first_text(tmp_path: Path) -> None:
    extra = "threading.Thread(target=lambda: (stop.stop('lost'), stop.stop('again'))).start()"
    with Spawned("-c", WAIT.format(extra=extra), cwd=tmp_path) as spawned:
        assert spawned.finish() == (0, "ready\n(1, 'lost')\n")


def test_without_a_signal_the_wait_ends_at_its_time(tmp_path: Path) -> None:
    with Spawned("-c", WAIT.format(extra="print(stop.wait(0.01)); stop.stop('over')"), cwd=tmp_path) as spawned:
        assert spawned.finish() == (0, "ready\nNone\n(1, 'over')\n")


def test_a_signal_with_a_handler_of_its_own_ends_no_wait(tmp_path: Path) -> None:
    extra = "import signal; signal.signal(signal.SIGUSR2, lambda *_: stop.stop('told'))"
    with Spawned("-c", WAIT.format(extra=extra + "; signal.raise_signal(signal.SIGUSR2)"), cwd=tmp_path) as spawned:
        assert spawned.finish() == (0, "ready\n(1, 'told')\n")
