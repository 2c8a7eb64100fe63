"""The table of tasks below the scrolling lines, as text."""

from dflow.cli.closing_summary import closing_summary
from dflow.cli.status_view import launch_view
from dflow.cli.tables import launch_table
from dflow.distributed.launching.launcher import TaskRow
from dflow.distributed.wire.messages.status import Status, WorkerProgress
from tests.dflow.cli.printed import console, lines_of, printed

ROWS = [
    TaskRow("coordinator", "running", 0, ""),
    TaskRow("ps:0", "running", 0, ""),
    TaskRow("worker:0", "running", 2, "[not markup] \x1b[31mloss\x1b[0m 0.25"),
    TaskRow("worker:1", "again in 4 s", 1, "a line that is far longer than a terminal of this width has room for"),
    TaskRow("worker:2", "finished", 0, "done"),
]


def shown(rows: list[TaskRow], rates: dict[str, float], most: int = 10) -> list[str]:
    return lines_of(printed(launch_table(rows, rates, most=most), width=72))


def test_each_task_has_its_state_restarts_rate_and_last_line() -> None:
    assert shown(ROWS, {"worker:0": 12.34}) == [
        " task          state          restarts   steps/s   last line",
        " ──────────────────────────────────────────────────────────────────────",
        " coordinator   running",
        " ps:0          running",
        " worker:0      running               2      12.3   [not markup] loss 0…",
        " worker:1      again in 4 s          1             a line that is far …",
        " worker:2      finished                            done",
    ]


def test_what_does_not_fit_is_counted_and_trouble_comes_first() -> None:
    many = [*(TaskRow(f"worker:{index}", "running", 0, "") for index in range(40)), ROWS[3], ROWS[4]]
    lines = shown(many, {}, most=4)
    assert [line.split()[0] for line in lines[2:]] == ["worker:1", "worker:0", "worker:1", "39"]
    assert lines[-1].split(maxsplit=2) == ["39", "more", "38 running, 1 finished"]


def test_the_terminal_shows_lines_the_table_above_the_progress_and_the_summary() -> None:
    made, file = console(100, height=40, force_terminal=True)
    with launch_view(made, closing_summary) as view:
        view.show_line("worker:0", "hello")
        for now_s, steps in ((1.0, 10), (3.0, 40)):
            workers = (WorkerProgress("/job:worker/task:0", steps, 0.05, {}),)
            now = Status(now_s, (), (), workers, steps, 100, (), (), {"accuracy": 0.5})
            view.show_status(now, ROWS)
        view.show_status(None, ROWS)
        view.show_end(now, {})
    text = file.getvalue()
    assert text.index("hello") < text.rindex(" 15.0 ") < text.rindex("worker:2")
    assert text.rindex("worker:2") < text.rindex("the coordinator does not answer") < text.index("accuracy")
