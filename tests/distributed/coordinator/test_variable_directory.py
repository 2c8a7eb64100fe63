import msgspec
from hypothesis import given
from hypothesis import strategies as st

from dflow.distributed.coordinator.durable_records import DurableRecords, apply_changes
from dflow.distributed.coordinator.membership import Membership
from dflow.distributed.coordinator.variable_directory import VariableDirectory
from dflow.distributed.wire.messages.basic import Failure
from dflow.distributed.wire.messages.placement import Placed, PlaceVariable
from dflow.distributed.wire.messages.roster import Join

TASKS = ("/job:ps/task:0", "/job:ps/task:1")


class Members(Membership):
    """Two expected tasks; `run` starts their processes."""

    def __init__(self, **processes: str) -> None:
        super().__init__(DurableRecords(), {"ps": 2})
        for task, process in processes.items():
            self.run(int(task.removeprefix("ps")), process)

    def run(self, index: int, incarnation: str) -> None:
        self.join(1.0, self.version, Join(TASKS[index], f"h:{self.version}", incarnation))

    def kill(self, index: int) -> None:
        self.leave(7.0, TASKS[index], "killed")


def made() -> VariableDirectory:
    return VariableDirectory(Members(), DurableRecords())


def ask(name: str, size_bytes: int = 4, near: str = "", shape: tuple[int, ...] = (1,)) -> PlaceVariable:
    return PlaceVariable(name, "float32", shape, size_bytes, "ps", near)


def test_near_shares_the_task_and_its_bytes_count() -> None:
    directory = made()
    directory.place(ask("w", 10))
    assert directory.place(ask("w/momentum", 10, near="w")) == Placed(TASKS[0])
    assert directory.place(ask("b", 15)) == Placed(TASKS[1])
    assert directory.place(ask("c", 1)) == Placed(TASKS[1])


def test_near_something_unknown_is_refused() -> None:
    refusal = made().place(ask("slot", near="w"))
    assert isinstance(refusal, Failure)
    assert refusal.kind == "VariableError"
    assert "'slot' was to share the task of 'w', which is not placed" in refusal.text


def test_another_type_under_one_name_is_refused_with_both_types() -> None:
    directory = made()
    directory.place(ask("w", shape=(3,)))
    refusal = directory.place(ask("w", shape=(4,)))
    assert isinstance(refusal, Failure)
    assert refusal.kind == "VariableError"
    assert "'w' is float32[3] and was asked for as float32[4]" in refusal.text


def test_a_job_without_tasks_is_refused_with_the_jobs_there_are() -> None:
    members = Membership(DurableRecords(), {"worker": 1, "eval": 1})
    refusal = VariableDirectory(members, DurableRecords()).place(ask("w"))
    assert isinstance(refusal, Failure)
    assert refusal.kind == "DeviceError"
    fact = (
        "'w' was to be placed on job 'ps', which has no task that is live or expected; the jobs there are: eval, worker"
    )
    assert fact in refusal.text


@given(st.lists(st.integers(0, 1000)))
def test_no_task_holds_more_than_another_by_over_the_largest_variable(sizes: list[int]) -> None:
    directory = made()
    for number, size in enumerate(sizes):
        directory.place(ask(str(number), size))
    loads = [sum(v.size_bytes for v in directory.variables() if v.task == task) for task in TASKS]
    assert abs(loads[0] - loads[1]) <= max(sizes, default=0)


def test_a_name_that_was_given_up_is_free_and_stays_so_for_a_directory_of_the_same_records() -> None:
    records = DurableRecords()
    directory = VariableDirectory(Members(), records)
    directory.place(ask("w", 100))
    directory.place(ask("b", 10))
    directory.give_up("w")
    directory.give_up("nothing")
    assert directory.place(ask("w", 1, shape=(5,))) == Placed(TASKS[0])
    rows: dict[str, bytes] = {}
    apply_changes(rows, records.take_changes())
    again = VariableDirectory(Members(), DurableRecords(rows))
    assert [info.name for info in again.variables()] == ["b", "w"]
    assert again.variables() == directory.variables()


def test_a_queue_goes_where_it_is_said_and_is_no_variable() -> None:
    directory = made()
    queue = PlaceVariable("q", "fifo queue<f32[]>, capacity 4", (), 16, "ps", kind="queue", on=TASKS[1])
    assert directory.place(queue) == Placed(TASKS[1])
    for other, kind, text in (
        (ask("q"), "VariableError", "queue 'q' is fifo queue<f32[]>, capacity 4 and was asked for as float32[1]"),
        (
            msgspec.structs.replace(queue, on=TASKS[0]),
            "DeviceError",
            f"queue 'q' is on {TASKS[1]} and was asked for on",
        ),
        (msgspec.structs.replace(queue, name="r", on="/job:ps/task:9"), "DeviceError", "none of the tasks there"),
    ):
        refusal = directory.place(other)
        assert isinstance(refusal, Failure)
        assert refusal.kind == kind
        assert text in refusal.text


def restarted(directory: VariableDirectory, records: DurableRecords, members: Members) -> VariableDirectory:
    rows: dict[str, bytes] = {}
    apply_changes(rows, records.take_changes())
    again = VariableDirectory(members, DurableRecords(rows))
    assert again.variables() == directory.variables()
    return again


def test_what_a_process_held_is_lost_to_every_later_asker_until_its_name_is_given_up() -> None:
    members, records = Members(ps0="a", ps1="b"), DurableRecords()
    directory = VariableDirectory(members, records)
    assert directory.place(ask("w")) == Placed(TASKS[0], "a")
    assert directory.place(ask("b")) == Placed(TASKS[1], "b")
    members.kill(0)
    gone = directory.place(ask("w"))
    assert isinstance(gone, Failure)
    assert gone == Failure("TaskLost", "variable 'w' is on ps:0, which is not there: ps:0 left at 7.0 s: killed")
    members.run(0, "c")
    for each in (directory, restarted(directory, records, members)):
        for request in (ask("w"), ask("w/slot", near="w")):
            lost = each.place(request)
            assert isinstance(lost, Failure)
            assert lost.kind == "TaskLost"
            assert lost.text == (
                "variable 'w' is lost: ps:0 left at 7.0 s: killed, and ps:0 has been started again without it\n"
                "  start the whole cluster again; see docs/reliability.md for variables that survive"
            )
        assert each.place(ask("b")) == Placed(TASKS[1], "b")
        assert each.place(ask("v")) == Placed(TASKS[0], "c")
    directory.give_up("w")
    assert directory.place(ask("w")) == Placed(TASKS[0], "c")


def test_a_run_has_the_host_of_the_newest_one_unless_that_has_lost_something() -> None:
    def run(name: str) -> str:
        placed = directory.place(PlaceVariable(name, "rounds", (), 0, "ps", kind="run", is_saved=False))
        return placed.text if isinstance(placed, Failure) else placed.task

    members = Members(ps0="a", ps1="b")
    directory = VariableDirectory(members, DurableRecords())
    assert run("first") == TASKS[0]
    directory.place(ask("w", 9))
    assert run("second") == TASKS[0], "though the other task has fewer bytes"
    members.kill(0)
    assert run("third") == TASKS[1]
    members.run(0, "c")
    assert run("fourth") == TASKS[1]
    assert "run 'first' is lost: ps:0 left" in run("first")


def test_a_process_that_was_given_up_and_came_back_has_what_it_held() -> None:
    members = Members(ps0="a")
    directory = VariableDirectory(members, DurableRecords())
    directory.place(ask("w"))
    members.kill(0)
    assert isinstance(directory.place(ask("w")), Failure)
    members.run(0, "a.2")
    assert directory.place(ask("w")) == Placed(TASKS[0], "a")


def test_what_is_placed_on_a_task_before_it_joins_is_held_by_its_first_process() -> None:
    members, records = Members(), DurableRecords()
    directory = VariableDirectory(members, records)
    assert directory.place(ask("w")) == Placed(TASKS[0])
    directory = restarted(directory, records, members)
    members.run(0, "a")
    directory.joined(TASKS[0])
    assert directory.place(ask("w")) == Placed(TASKS[0], "a")
    members.kill(0)
    members.run(0, "b")
    directory.joined(TASKS[0])
    assert isinstance(directory.place(ask("w")), Failure)


def test_a_task_holds_state_while_the_process_lives_on_which_it_was_placed() -> None:
    members = Members(ps0="first")
    directory = VariableDirectory(members, DurableRecords())
    assert not directory.holds_state(TASKS[0])
    directory.place(ask("w"))
    assert directory.holds_state(TASKS[0])
    assert not directory.holds_state(TASKS[1])
    members.kill(0)
    members.run(0, "second")
    directory.joined(TASKS[0])
    assert not directory.holds_state(TASKS[0]), "the new process has none of it"
    directory.give_up("w")
    directory.place(ask("w"))
    assert directory.holds_state(TASKS[0])
