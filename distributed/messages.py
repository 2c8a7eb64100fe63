"""What tasks, the coordinator and clients say to each other; nothing else.

Every message is a frozen struct, told apart by its tag. A message that answers another is sent as a reply to it
by the transport, so no message carries a request number. Arrays and programs travel as raw bytes behind the
message (its payload), never inside it. A task is named `/job:<job>/task:<index>`.
"""

from __future__ import annotations

import msgspec

PROTOCOL_VERSION = 3


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of every message."""


# Any connection.


class Hello(Message, frozen=True):
    """First on each connection, both ways: who speaks, and which protocol.

    `session`   what this connection carries on or begins; empty when it ends with the connection. As an answer, empty
                when the session that was to go on is not known
    `received`  how many frames of the session have arrived at the speaker
    `process`   which process speaks; see `transport.process_identity`
    `resumes`   whether the session is one that was begun over another connection
    `shares`    whether the speaker would send large payloads by memory that both see; done when both say so
    """

    name: str
    version: int = PROTOCOL_VERSION
    session: str = ""
    received: int = 0
    process: str = ""
    resumes: bool = False
    shares: bool = False


class Ok(Message, frozen=True):
    """A request was carried out; there is nothing to add."""


class Packed(Message, frozen=True):
    """The message is the payload, encoded and compressed."""


class Failure(Message, frozen=True):
    """A request was refused or failed. `kind` is the name of a class in `dflow.tracing.errors`."""

    kind: str
    text: str


# To a task.


class Introduce(Message, frozen=True):
    """The sender's life in the roster: the first message over a connection to a task. Answered by `Ok`."""

    life: int


class ArrayInfo(msgspec.Struct, frozen=True):
    """The dtype and shape of one of the arrays in a payload, which holds them one after the other."""

    dtype: str
    shape: tuple[int, ...]


class ProgramCall(msgspec.Struct, frozen=True):
    """The program number `program` on the values of these numbers."""

    program: int
    takes: tuple[int, ...]


class CreateVariable(msgspec.Struct, frozen=True):
    """A variable to create unless it is there.

    `arrays`  number of the message's arrays that its first value takes, after those of the variables before it
    `calls`   programs to run, in order
    `result`  number of the first value: values are numbered, these arrays first, then the results of each call
    `process` process of the task that shall hold it, by `Placed`; another one of the same name refuses

    Without arrays and calls there is no first value.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    arrays: int = 0
    calls: tuple[ProgramCall, ...] = ()
    result: int = 0
    process: str = ""


class CreateVariables(Message, frozen=True):
    """Create each of the variables unless it is there; answered by `VariablesCreated`.

    The payload holds the `arrays`, then exported programs, of `program_sizes` bytes, for the calls.
    """

    variables: tuple[CreateVariable, ...]
    arrays: tuple[ArrayInfo, ...] = ()
    program_sizes: tuple[int, ...] = ()


class VariablesCreated(Message, frozen=True):
    """The variables are there, except the `missing`, sent without a first value, and the `failures`, by their places.

    A variable that was there before, with the same dtype and shape, is unchanged.
    """

    missing: tuple[int, ...] = ()
    failures: dict[int, Failure] = {}


class ReadVariables(Message, frozen=True):
    """Answered by `Arrays`, which have the values of one moment."""

    keys: tuple[str, ...]


class WriteVariable(Message, frozen=True):
    """Replace the variable's value by the payload."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class SavedVariable(msgspec.Struct, frozen=True):
    """A variable to write: its `key`, the `name` of its array, and its `place` within the folder."""

    key: str
    name: str
    place: str


class SaveVariables(Message, frozen=True):
    """Write the values of one moment into the folder of a save, which every task sees; answered by `Ok`."""

    folder: str
    variables: tuple[SavedVariable, ...]


class ReadCheckpoint(Message, frozen=True):
    """Read values from a checkpoint, and keep them until `EndRestore`; answered by `Ok`.

    `number`     one that `origin` gives no other restore
    `id`         that of the checkpoint at `path`, which every task sees
    `variables`  from the names of arrays to the keys of variables
    """

    origin: str
    number: int
    path: str
    id: str
    variables: dict[str, str]


class EndRestore(Message, frozen=True):
    """Set variables to what was read for a restore, or let go of it; answered by `Ok`."""

    origin: str
    number: int
    is_set: bool


class RegisterPlan(Message, frozen=True):
    """Keep a plan for later runs; answered by `Registered`, or by `Wanted` when programs are missing.

    `plan` is a msgspec-encoded `dflow.lowering.plan.Plan`; the payload holds the exported programs one after the
    other, `program_sizes` bytes each. `programs` are the SHA-256 of all; by it a task that has a program knows one of
    size 0, which is not sent. It may be empty where all are.
    """

    plan: bytes
    program_sizes: tuple[int, ...]
    programs: tuple[bytes, ...] = ()


class Wanted(Message, frozen=True):
    """The programs of a plan, by their places, that the task does not have: send the plan again, with these."""

    programs: tuple[int, ...]


class Registered(Message, frozen=True):
    """The handle by which `RunPlan` names a registered plan."""

    handle: int


class ReleasePlan(Message, frozen=True):
    """One registration of a plan is no longer needed. Not answered."""

    handle: int


class RunPlan(Message, frozen=True):
    """Run a registered plan as part of a step; answered by `Ok` when it has ended."""

    handle: int
    origin: str
    step: int


class QueueInfo(msgspec.Struct, frozen=True, tag="queue"):
    """What makes a queue the queue it is; `seed` is a whole number in decimal, since it may be of any size."""

    kind: str
    capacity: int
    min_after_dequeue: int = 0
    seed: str = "0"


class AccumulatorInfo(msgspec.Struct, frozen=True, tag="accumulator"):
    """What makes an accumulator the accumulator it is; a `limit` of 0 is none."""

    reduction: str
    limit: int = 0


class CreateResource(Message, frozen=True):
    """Create a queue or an accumulator unless it is there; answered by `ResourceCreated`.

    `handle` is its type, as graphs print it: `queue<f32[2], i32[]>`; for `process` see `CreateVariable`.
    """

    name: str
    handle: str
    settings: QueueInfo | AccumulatorInfo
    process: str = ""


class ResourceCreated(Message, frozen=True):
    """`created` is false when it was there already, with the same type and settings."""

    created: bool


class CallResource(Message, frozen=True):
    """Do one op on a queue or an accumulator, waiting for it; answered by `Arrays`.

    It is the task's part of a step of its own, so that `CancelStep` ends its wait, and so does the leaving of `origin`.
    The payload holds the operands.
    """

    key: str
    op: str
    origin: str
    step: int
    operands: tuple[ArrayInfo, ...] = ()
    count: int = 0
    timeout_s: float = 600.0
    cancel_pending: bool = False
    line: str = ""


class Arrays(Message, frozen=True):
    """Arrays, one after the other in the payload."""

    arrays: tuple[ArrayInfo, ...]


class ProposeRounds(Message, frozen=True):
    """A worker takes part in this run from now on; answered by `RoundsAgreed`, the same for every worker.

    The first worker fixes the number `wanted` of gradients that end each of the `rounds` rounds, and the name of the
    accumulator. The host appends a number to a name that another run uses.
    """

    name: str
    worker: str
    rounds: int
    wanted: int
    accumulator: str


class RoundsAgreed(Message, frozen=True):
    """The number of gradients that end a round, the name of the run's accumulator, and whether the run is over."""

    wanted: int
    accumulator: str
    is_over: bool


class OpenRounds(Message, frozen=True):
    """Be the host of a run of synchronous training, unless it is open here; answered by `Ok`.

    In each of `rounds` rounds this task takes the mean of `wanted` gradients from the accumulator and starts the
    update, a step of its own over the registered plans `handles`, by task. The payload holds what that is fed `before`
    the mean and `after` it. `workers` take part.
    """

    name: str
    rounds: int
    wanted: int
    workers: tuple[str, ...]
    accumulator: str
    handles: dict[str, int]
    before: tuple[ArrayInfo, ...] = ()
    after: tuple[ArrayInfo, ...] = ()


class NextRound(Message, frozen=True):
    """A worker is done with the opening `done` (-1: none yet); answered by `RoundOpen` once there is a later one."""

    name: str
    worker: str
    done: int
    timeout_s: float


class RoundOpen(Message, frozen=True):
    """The tag of gradients of the open round, and the number of rounds `done`: all when the run is over."""

    number: int
    done: int


class LeaveRounds(Message, frozen=True):
    """A worker takes part no more; it has given its gradients of the openings to `done`. Answered by `Ok`."""

    name: str
    worker: str
    done: int


class ForgetState(Message, frozen=True):
    """Let go of a variable's value, or of what a queue or an accumulator holds; answered by `Ok`.

    Whoever uses it from now on, or waits for it, gets an error that says `reason` and `remedy`.
    """

    key: str
    is_variable: bool
    reason: str
    remedy: str


class CancelStep(Message, frozen=True):
    """Stop what is left of a step and forget its values."""

    origin: str
    step: int
    reason: str


class Tensor(Message, frozen=True):
    """The value of an edge in a step, in the payload. Not answered."""

    origin: str
    step: int
    edge: str
    dtype: str
    shape: tuple[int, ...]


class DumpEvents(Message, frozen=True):
    """Write the last events down, for something is stuck; `task` is who asks, empty for a person.

    As a request to a task, answered by `Dumped`. Told to the coordinator by a task, it is passed on to all others.
    """

    why: str
    task: str = ""


class Dumped(Message, frozen=True):
    """The file on the task's host; empty when it could not be written."""

    path: str


class PulledTensor(Tensor, frozen=True):
    """The value of an offer that was asked for. Not answered."""


class Offer(Message, frozen=True):
    """The sender keeps the value of an edge, of so many bytes, until it is asked for by `Pull`. Not answered."""

    origin: str
    step: int
    edge: str
    size_bytes: int


class Pull(Message, frozen=True):
    """Send the value that was offered, or with `wanted` false, drop it. Not answered."""

    origin: str
    step: int
    edge: str
    wanted: bool = True


class Credit(Message, frozen=True):
    """So much of what the other task pushed to the sender has been taken; see `flow_control`. Not answered."""

    size_bytes: int


class GetClock(Message, frozen=True):
    """What is the time by the clock of the task's events? Answered by `ClockTold`, at once."""


class ClockTold(Message, frozen=True):
    """Nanoseconds since any moment."""

    at_ns: int


class StartTrace(Message, frozen=True):
    """Keep so many events instead of the last few, and note when calls are computed; answered by `ClockTold`.

    It ends by `StopTrace`, or by itself after `longest_s`.
    """

    events: int
    longest_s: float


class StopTrace(Message, frozen=True):
    """Answered by `TraceTold`: the events not before `since_ns`, and no longer so many of them."""

    since_ns: int


class TraceTold(Message, frozen=True):
    """The payload is a list of `dflow.lowering.recorder.Event` in msgpack; `lost` whether older ones gave way."""

    lost: bool


class GetTaskState(Message, frozen=True):
    """How is the task now? Answered by `TaskState`."""


class ResourceDepth(msgspec.Struct, frozen=True):
    """A queue, of how many elements, or an accumulator, of how many gradients; `capacity` 0 when nothing bounds it."""

    name: str
    size: int
    capacity: int


class TaskState(Message, frozen=True):
    """What a task has done since it started, and holds now.

    `steps`    how many steps that it started have ended
    `step_s`   how long they took lately, in the mean
    `parts`    how many parts of steps have ended here
    `running`  how many run here
    `waiting`  how many values are waited for
    `held`     how many values nobody has taken yet
    `depths`   its queues and accumulators
    """

    steps: int
    step_s: float
    parts: int
    running: int
    waiting: int
    held: int
    depths: tuple[ResourceDepth, ...] = ()


# To the coordinator.


class Mark(msgspec.Struct, frozen=True):
    """A point in the history of the coordinator's state; see `state_marks`."""

    start: str = ""
    revision: int = 0


class Join(Message, frozen=True):
    """A task is up and listens at `address`; answered by `Roster`; each `RosterChange` follows.

    `incarnation`  one life of the task: with the same one and the same address it is the member it was before
    `cluster`      the cluster it was a member of, or empty; a coordinator of another one refuses it
    `since`        the version of the roster that it has, or 0; with it, a `RosterChange` may be the answer
    `mark`         the newest that it has seen; a coordinator whose state is older refuses it
    """

    task: str
    address: str
    incarnation: str = ""
    cluster: str = ""
    since: int = 0
    mark: Mark = Mark()


class TaskInfo(msgspec.Struct, frozen=True):
    """A task of the cluster, by the number of its `life`, which no other has or had.

    `left` is empty while it is alive, else why it left; times are in s since the start.
    """

    task: str
    address: str
    joined_at_s: float
    left_at_s: float | None = None
    left: str = ""
    incarnation: str = ""
    life: int = 0

    @property
    def process(self) -> str:
        """The process of this life; a task that was taken for dead and came back has another life in one process."""
        return process_of(self.incarnation)


def process_of(incarnation: str) -> str:
    """Return the process of an incarnation: `ab12` for its first incarnation `ab12` and for its third, `ab12.3`."""
    return incarnation.partition(".")[0]


class Roster(Message, frozen=True):
    """Every task that has joined, but those that left long ago, and which tasks are still `expected`.

    `version`  counts the changes; a greater one is newer
    `cluster`  which cluster this is, the same as long as its coordinator keeps its state
    `epoch`    counts the starts of the cluster's coordinator
    """

    tasks: tuple[TaskInfo, ...]
    expected: tuple[str, ...]
    version: int = 0
    cluster: str = ""
    epoch: int = 0
    mark: Mark = Mark()


class RosterChange(Message, frozen=True):
    """What has changed in the roster from version `since` to `version`, and the newest `epoch`.

    Each of `entries` takes the place of the one of the same life, or is a new task, which is no longer expected; the
    lives `dropped` are no longer listed. Not answered.
    """

    since: int
    version: int
    entries: tuple[TaskInfo, ...]
    dropped: tuple[int, ...] = ()
    epoch: int = 0
    mark: Mark = Mark()


class PackedRoster(Message, frozen=True):
    """The roster that `change` makes of the one in the payload, which is encoded and compressed."""

    change: RosterChange


class EdgeTraffic(msgspec.Struct, frozen=True):
    """What a task has sent over one edge since it started."""

    edge: str
    source: str
    destination: str
    values: int
    size_bytes: int


class Heartbeat(Message, frozen=True):
    """A task is alive. Not answered.

    `traffic`  its totals so far
    `steps`    how many parts of steps it has ended in all
    `doing`    what it is at, as a short text; empty when it is idle
    """

    task: str
    traffic: tuple[EdgeTraffic, ...] = ()
    steps: int = 0
    doing: str = ""


class PlaceVariable(Message, frozen=True):
    """Where is, or shall be, this variable? Answered by `Placed`, with the same answer to every asker.

    `job`   the job over whose tasks variables are spread
    `near`  the name of a placed variable whose task this one shall share, or empty
    `kind`  what it is: a queue or an accumulator too, whose `dtype` says all that makes it what it is
    `on`    the task that shall hold it, where that is stated, or empty
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    job: str
    near: str = ""
    kind: str = "variable"
    on: str = ""


class Placed(Message, frozen=True):
    """The task that holds the variable, and its `process`; empty while that has not joined."""

    task: str
    process: str = ""
    mark: Mark = Mark()


class PlaceVariables(Message, frozen=True):
    """Several questions, in order; answered by `PlacedAll`."""

    requests: tuple[PlaceVariable, ...]


class PlacedAll(Message, frozen=True):
    """The answer to each."""

    answers: tuple[Placed | Failure, ...]


class Unplace(Message, frozen=True):
    """The state of this name is gone from its task: the name is free. Answered by `Ok`."""

    name: str


class NotFinite(msgspec.Struct, frozen=True):
    """The first loss of a run, by name, that was not a finite number, with its step and worker."""

    step: int
    metric: str
    value: float
    run: str = ""
    task: str = ""


class ClaimSteps(Message, frozen=True):
    """Ask for steps of a run to do; answered by `Claimed`, which waits while others may yet give steps back.

    `run`        names the run; the first to ask fixes `total_steps`
    `number`     of this claim, greater than those of the task's earlier ones; the same again is answered the same
    `last`       the number of the last claim whose answer the task has seen, 0 for none
    `done`       how many steps of that one were done
    `step_s`     median seconds a step took since the last claim (0 when none)
    `metrics`    the newest scalar metrics of the worker
    `more`       false when the worker takes no further part in the run: it is answered at once, with no steps
    `not_finite` the first loss of the steps done that is not finite; run and task need not be set
    """

    run: str
    task: str
    total_steps: int
    number: int
    last: int = 0
    done: int = 0
    step_s: float = 0.0
    metrics: dict[str, float] = {}
    more: bool = True
    not_finite: NotFinite | None = None


class Claimed(Message, frozen=True):
    """`count` steps from number `first` on; a count of 0 says the run is complete, or that no more were wanted."""

    first: int
    count: int
    mark: Mark = Mark()


class RoundsDone(Message, frozen=True):
    """How a run of synchronous training goes, as a worker sees it; not answered.

    `rounds`   how many rounds of `total_rounds` are done
    `steps`    steps of the worker since it last said so, of whose gradients `dropped` came too late
    `step_s`   seconds a step took
    `metrics`  the newest scalar metrics of the worker
    `not_finite`  the first loss of these steps that is not finite; run and task need not be set
    """

    run: str
    task: str
    rounds: int
    total_rounds: int
    steps: int
    dropped: int = 0
    step_s: float = 0.0
    metrics: dict[str, float] = {}
    not_finite: NotFinite | None = None


class ElectOnce(Message, frozen=True):
    """May this task be the one that does `what`? Answered by `Elected`; the first live task that asks may."""

    what: str
    task: str


class Elected(Message, frozen=True):
    """Whether the asker was chosen."""

    elected: bool
    mark: Mark = Mark()


class AwaitBarrier(Message, frozen=True):
    """The task has come to a barrier; answered by `BarrierPassed` when all its members have, or left.

    `number`          of this arrival, greater than those of the task's earlier ones; the same again is the same one
    `timeout_s`       how long it waits
    `fails_on_leave`  whether a member that leaves fails the barrier instead of being waited for no longer
    """

    name: str
    task: str
    number: int
    timeout_s: float
    fails_on_leave: bool = False


class BarrierPassed(Message, frozen=True):
    """The barrier has been passed by `members`: those of roster `version` that stayed.

    `generation`  is greater than at the time before; it counts from 1 while the barrier is in use
    """

    generation: int
    version: int
    members: tuple[str, ...]
    mark: Mark = Mark()


class Report(Message, frozen=True):
    """A result of the program for the closing table, such as a test accuracy."""

    name: str
    value: float


class Leave(Message, frozen=True):
    """A task goes by its own will."""

    task: str
    reason: str


class GetStatus(Message, frozen=True):
    """Answered by `Status`."""


class VariableInfo(msgspec.Struct, frozen=True):
    """A placed variable, queue or accumulator, as `kind` says; for `process` see `Placed`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    task: str
    kind: str = "variable"
    process: str = ""


class WorkerProgress(msgspec.Struct, frozen=True):
    """What a worker has done so far in all runs; `step_s` and `metrics` are its newest.

    Of its steps `dropped` came too late for the round of synchronous training that they were for; `held` are claimed
    and not reported yet.
    """

    task: str
    steps: int
    step_s: float
    metrics: dict[str, float]
    dropped: int = 0
    held: int = 0


class TaskHealth(msgspec.Struct, frozen=True):
    """What a live task last said of itself; see `Heartbeat`.

    `heard_at_s`       when it was last heard
    `stalled_since_s`  since when it has made no progress, or None when it is not stalled
    """

    task: str
    heard_at_s: float
    steps: int
    doing: str
    stalled_since_s: float | None


class GetHealth(Message, frozen=True):
    """How is this task? Answered by `Health`."""

    task: str


class Health(Message, frozen=True):
    """`health` is None when the task is not live or not heard yet; `absence` says why it is not live, or nothing."""

    now_s: float
    health: TaskHealth | None
    absence: str


class Status(Message, frozen=True):
    """Everything the coordinator knows that a person would ask; times are in s since its start.

    `away`  the tasks whose connection has ended, or that have yet to come back after the coordinator's restart; they
            are live until their time for that is over
    `left`  how many tasks have left in all, those among them that are no longer listed
    `not_finite`  the first of each run and metric
    """

    now_s: float
    tasks: tuple[TaskInfo, ...]
    expected: tuple[str, ...]
    workers: tuple[WorkerProgress, ...]
    steps_done: int
    steps_total: int
    variables: tuple[VariableInfo, ...]
    traffic: tuple[EdgeTraffic, ...]
    results: dict[str, float]
    health: tuple[TaskHealth, ...] = ()
    away: tuple[str, ...] = ()
    left: int = 0
    not_finite: tuple[NotFinite, ...] = ()


#: Answers and news that carry the mark of the newest write of the coordinator's state.
Marked = Roster | RosterChange | Placed | Claimed | Elected | BarrierPassed

AnyMessage = (
    Hello
    | Ok
    | Packed
    | Failure
    | Introduce
    | CreateVariables
    | VariablesCreated
    | ReadVariables
    | WriteVariable
    | SaveVariables
    | ReadCheckpoint
    | EndRestore
    | RegisterPlan
    | ReleasePlan
    | Registered
    | Wanted
    | RunPlan
    | CreateResource
    | ResourceCreated
    | CallResource
    | Arrays
    | ProposeRounds
    | RoundsAgreed
    | OpenRounds
    | NextRound
    | RoundOpen
    | LeaveRounds
    | ForgetState
    | CancelStep
    | Tensor
    | DumpEvents
    | Dumped
    | PulledTensor
    | Offer
    | Pull
    | Credit
    | GetClock
    | ClockTold
    | StartTrace
    | StopTrace
    | TraceTold
    | GetTaskState
    | TaskState
    | Join
    | Roster
    | RosterChange
    | PackedRoster
    | Heartbeat
    | PlaceVariable
    | Placed
    | PlaceVariables
    | PlacedAll
    | Unplace
    | ClaimSteps
    | Claimed
    | RoundsDone
    | ElectOnce
    | Elected
    | AwaitBarrier
    | BarrierPassed
    | Report
    | Leave
    | GetHealth
    | Health
    | GetStatus
    | Status
)
