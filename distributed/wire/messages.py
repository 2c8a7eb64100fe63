"""The messages between tasks, the coordinator and clients; nothing else.

Every message is a frozen struct, distinguished by its tag. The transport pairs a reply with its request, so no
message carries a request number. Arrays and programs travel as raw bytes after the message (its payload), never
inside it. A task is named `/job:<job>/task:<index>`. "Not answered" marks messages that are sent as notifications.
"""

from __future__ import annotations

import msgspec

from dflow.tracing.ir.accumulator_settings import AccumulatorSettings
from dflow.tracing.ir.queue_settings import QueueSettings
from dflow.tracing.ir.resource_op import ResourceOp

PROTOCOL_VERSION = 4


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of every message."""


# Any connection.


class Hello(Message, frozen=True):
    """First message on each connection, in both directions: the sender's name and protocol version.

    `session`   id of the session that this connection starts or resumes; empty in a reply if that is unknown
    `received`  number of the session's frames that the sender has received
    `process`   identity of the sender's process; see `transport.process_identity`
    `resumes`   whether the session was started over an earlier connection
    `shares`    whether the sender accepts large payloads in shared memory; used when both sides do
    """

    name: str
    version: int = PROTOCOL_VERSION
    session: str = ""
    received: int = 0
    process: str = ""
    resumes: bool = False
    shares: bool = False


class Ok(Message, frozen=True):
    """The request succeeded; the answer carries no data."""


class Packed(Message, frozen=True):
    """The message is the payload, encoded and compressed."""


class Failure(Message, frozen=True):
    """A request was refused or failed. `kind` is the name of a class in `dflow.tracing.errors`."""

    kind: str
    text: str


# To a task.


class Introduce(Message, frozen=True):
    """The sender's life number in the roster: the first message over a connection to a task. Answered by `Ok`."""

    life: int


class ArrayInfo(msgspec.Struct, frozen=True):
    """Dtype and shape of one array in a payload, which holds its arrays one after the other."""

    dtype: str
    shape: tuple[int, ...]


class ProgramCall(msgspec.Struct, frozen=True):
    """Call of the program number `program` on the values numbered `takes`."""

    program: int
    takes: tuple[int, ...]


class CreateVariable(msgspec.Struct, frozen=True):
    """A variable to create unless it exists.

    `arrays`  number of the message's arrays for its initial value, after those of the variables before it
    `calls`   programs to run, in order
    `result`  number of the initial value: values are numbered, these arrays first, then the results of each call
    `process` process of the task that must hold it, from `Placed`; another process of that task refuses

    Without arrays and calls there is no initial value.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    arrays: int = 0
    calls: tuple[ProgramCall, ...] = ()
    result: int = 0
    process: str = ""


class CreateVariables(Message, frozen=True):
    """Create each of the variables unless it exists; answered by `VariablesCreated`.

    The payload holds the `arrays`, then the exported programs for the calls, `program_sizes` bytes each.
    """

    variables: tuple[CreateVariable, ...]
    arrays: tuple[ArrayInfo, ...] = ()
    program_sizes: tuple[int, ...] = ()


class VariablesCreated(Message, frozen=True):
    """The variables exist, except those at the indices in `missing` (sent without initial value) and in `failures`.

    A variable that existed before, with the same dtype and shape, is unchanged.
    """

    missing: tuple[int, ...] = ()
    failures: dict[int, Failure] = {}


class ReadVariables(Message, frozen=True):
    """Read variables; answered by `Arrays`, a consistent snapshot."""

    keys: tuple[str, ...]


class WriteVariable(Message, frozen=True):
    """Replace the variable's value with the payload."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class SavedVariable(msgspec.Struct, frozen=True):
    """A variable to write: its `key`, the `name` of its array, and its `place`, a path within the folder."""

    key: str
    name: str
    place: str


class SaveVariables(Message, frozen=True):
    """Write a consistent snapshot into the folder of a save, which every task can access; answered by `Ok`."""

    folder: str
    variables: tuple[SavedVariable, ...]


class ReadCheckpoint(Message, frozen=True):
    """Read values from a checkpoint and keep them until `EndRestore`; answered by `Ok`.

    `number`     number of the restore, unique within `origin`
    `id`         id of the checkpoint at `path`, which every task can access
    `variables`  variable keys by the names of the checkpoint's arrays
    """

    origin: str
    number: int
    path: str
    id: str
    variables: dict[str, str]


class EndRestore(Message, frozen=True):
    """Set the variables to the values read for a restore, or with `is_set` false, discard these; answered by `Ok`."""

    origin: str
    number: int
    is_set: bool


class RegisterPlan(Message, frozen=True):
    """Keep a plan for later runs; answered by `Registered`, or by `Wanted` when programs are missing.

    `plan` is a msgspec-encoded `dflow.lowering.steps.plan.Plan`. The payload holds the exported programs one after the
    other, `program_sizes` bytes each. `programs` lists the SHA-256 of each. A program that the task already has may
    be omitted, with size 0. `programs` may be empty when all programs are in the payload.
    """

    plan: bytes
    program_sizes: tuple[int, ...]
    programs: tuple[bytes, ...] = ()


class Wanted(Message, frozen=True):
    """The indices of a plan's programs that the task does not have: send the plan again, with these."""

    programs: tuple[int, ...]


class Registered(Message, frozen=True):
    """The handle that `RunPlan` uses for a registered plan."""

    handle: int


class ReleasePlan(Message, frozen=True):
    """Undo one registration of a plan. Not answered."""

    handle: int


class RunPlan(Message, frozen=True):
    """Run a registered plan as part of a step; answered by `Ok` when the plan has ended."""

    handle: int
    origin: str
    step: int


class CreateResource(Message, frozen=True):
    """Create a queue or an accumulator unless it exists; answered by `Ok`.

    `handle` is its type, as graphs print it: `queue<f32[2], i32[]>`. Every creation must repeat type and settings. For
    `process` see `CreateVariable`.
    """

    name: str
    handle: str
    settings: QueueSettings | AccumulatorSettings
    process: str = ""


class CallResource(Message, frozen=True):
    """Run one op on a queue or an accumulator, which may wait; answered by `Arrays` when the op has ended.

    The op is the task's part of a step that `origin` numbered for it alone. So its wait ends when that step is
    cancelled by `CancelStep`, or when `origin` leaves. The payload holds the operands.
    """

    key: str
    op: ResourceOp
    origin: str
    step: int
    operands: tuple[ArrayInfo, ...] = ()


class Arrays(Message, frozen=True):
    """Arrays, one after the other in the payload."""

    arrays: tuple[ArrayInfo, ...]


class ProposeRounds(Message, frozen=True):
    """Register a worker in a run of synchronous training; answered by `RoundsAgreed`, the same for every worker.

    A run has `rounds` synchronous steps, called rounds. The first worker fixes `wanted`, the number of gradients per
    round, and the name of the accumulator; a number is appended to a name that another run uses.
    """

    name: str
    worker: str
    rounds: int
    wanted: int
    accumulator: str


class RoundsAgreed(Message, frozen=True):
    """Number of gradients per round, name of the run's accumulator, and whether all rounds are done."""

    wanted: int
    accumulator: str
    is_over: bool


class OpenRounds(Message, frozen=True):
    """Become the step aggregator (round host) of a run, unless it is open here; answered by `Ok`.

    In each of `rounds` rounds this task takes the mean of `wanted` gradients from the accumulator. It then starts the
    update, a step over the registered plans `handles` (by task). The payload holds the arrays fed `before` the mean
    and those fed `after` it. `workers` take part.
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
    """A worker is done with the round opening number `done` (-1: none yet); answered by `RoundOpen` of a later one."""

    name: str
    worker: str
    done: int
    timeout_s: float


class RoundOpen(Message, frozen=True):
    """The number of the open round, which tags its gradients, and the count of rounds `done` (all: the run is over)."""

    number: int
    done: int


class LeaveRounds(Message, frozen=True):
    """A worker stops taking part; it has sent its gradients for the openings up to `done`. Answered by `Ok`."""

    name: str
    worker: str
    done: int


class ForgetState(Message, frozen=True):
    """Free a variable's value, or the contents of a queue or an accumulator; answered by `Ok`.

    Ops that use it later or wait for it now fail with an error that contains `reason` and `remedy`.
    """

    key: str
    is_variable: bool
    reason: str
    remedy: str


class CancelStep(Message, frozen=True):
    """Cancel the rest of a step and discard its values. A request, answered by `Ok`, or a notification."""

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
    """Write the newest events to a file, because something is stuck. `task` is the requester, empty for a person.

    A task answers this request with `Dumped`. The coordinator passes a task's notification on to all other tasks.
    """

    why: str
    task: str = ""


class Dumped(Message, frozen=True):
    """Path of the written file on the task's host; empty when it could not be written."""

    path: str


class PulledTensor(Tensor, frozen=True):
    """The value of an offer, sent after `Pull`. Not answered."""


class Offer(Message, frozen=True):
    """The sender keeps the value of an edge, of `size_bytes` bytes, until the receiver sends `Pull`. Not answered."""

    origin: str
    step: int
    edge: str
    size_bytes: int


class Pull(Message, frozen=True):
    """Send the value that was offered, or with `wanted` false, discard it. Not answered."""

    origin: str
    step: int
    edge: str
    wanted: bool = True


class Credit(Message, frozen=True):
    """The sender has taken `size_bytes` of the values that the other task pushed; see `flow_control`. Not answered."""

    size_bytes: int


class GetClock(Message, frozen=True):
    """Read the clock that times the task's events. Answered by `ClockTold`, immediately."""


class ClockTold(Message, frozen=True):
    """Nanoseconds since an arbitrary moment."""

    at_ns: int


class StartTrace(Message, frozen=True):
    """Keep the last `events` events instead of the usual few, and record when XLA calls end; answered by `ClockTold`.

    The trace ends at `StopTrace`, or after `longest_s`.
    """

    events: int
    longest_s: float


class StopTrace(Message, frozen=True):
    """End the trace; answered by `TraceTold`, which has the events from `since_ns` on."""

    since_ns: int


class TraceTold(Message, frozen=True):
    """Payload: a msgpack list of `lowering.steps.recorder.Event`. `lost`: whether older events were overwritten."""

    lost: bool


class GetTaskState(Message, frozen=True):
    """Read the task's counters; answered by `TaskState`."""


class ResourceDepth(msgspec.Struct, frozen=True):
    """Size of a queue in elements, or of an accumulator in gradients; `capacity` 0 means unbounded."""

    name: str
    size: int
    capacity: int


class TaskState(Message, frozen=True):
    """A task's counters since its start, and its present load.

    `steps`    number of steps started by this task that have ended
    `step_s`   running mean duration of successful steps, in s
    `parts`    number of parts of steps that have ended here
    `running`  number of parts running here
    `waiting`  number of values awaited
    `held`     number of values received and not taken yet
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
    """Task `task` runs and listens at `address`; answered by `Roster`, and later by a `RosterChange` per change.

    `incarnation`  id of one life of the task: a task with the same one and the same address stays the same member
    `cluster`      id of the cluster that it was a member of, or empty; a coordinator of another cluster refuses it
    `since`        version of the roster that it has, or 0; if it is not 0, the answer may be a `RosterChange`
    `mark`         newest mark that it has seen; a coordinator whose state is older refuses it
    """

    task: str
    address: str
    incarnation: str = ""
    cluster: str = ""
    since: int = 0
    mark: Mark = Mark()


class TaskInfo(msgspec.Struct, frozen=True):
    """A task of the cluster in one `life`, a number that no other life of any task shares.

    `left` is the reason why it left, empty while it is live. Times are in s since the coordinator's first start.
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
        """Identity of the process; a task that was declared dead and rejoined has another life in the same process."""
        return process_of(self.incarnation)


def process_of(incarnation: str) -> str:
    """Return the process of an incarnation: `ab12` for its first incarnation `ab12` and for its third, `ab12.3`."""
    return incarnation.partition(".")[0]


class Roster(Message, frozen=True):
    """Every task that has joined, except members that left long ago, and the tasks still `expected`.

    `version`  number of changes; a greater one is newer
    `cluster`  id of the cluster, the same as long as its coordinator keeps its state
    `epoch`    number of starts of the cluster's coordinator
    """

    tasks: tuple[TaskInfo, ...]
    expected: tuple[str, ...]
    version: int = 0
    cluster: str = ""
    epoch: int = 0
    mark: Mark = Mark()


class RosterChange(Message, frozen=True):
    """The changes of the roster from version `since` to `version`, and the newest `epoch`. Not answered.

    Each of `entries` replaces the entry of the same life, or adds a task, which is no longer expected. The lives in
    `dropped` are no longer listed.
    """

    since: int
    version: int
    entries: tuple[TaskInfo, ...]
    dropped: tuple[int, ...] = ()
    epoch: int = 0
    mark: Mark = Mark()


class PackedRoster(Message, frozen=True):
    """The roster in the payload, encoded and compressed; the receiver applies `change` to it."""

    change: RosterChange


class EdgeTraffic(msgspec.Struct, frozen=True):
    """Values and bytes that a task has sent over one edge since it started."""

    edge: str
    source: str
    destination: str
    values: int
    size_bytes: int


class Heartbeat(Message, frozen=True):
    """A task is alive. Not answered.

    `traffic`  its totals since it started
    `steps`    number of parts of steps that it has ended since it started
    `doing`    short text on what it works on; empty when it is idle
    """

    task: str
    traffic: tuple[EdgeTraffic, ...] = ()
    steps: int = 0
    doing: str = ""


class PlaceVariable(Message, frozen=True):
    """Choose the task that holds a variable; answered by `Placed`, the same for every requester.

    `job`   job over whose tasks variables are spread
    `near`  name of a placed variable whose task this one must share, or empty
    `kind`  "variable", or the kind of another resource, such as a queue, whose `dtype` lists all its settings
    `on`    task that must hold it, or empty for any
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
    """The task that holds the variable, and its `process`, empty until the task has joined."""

    task: str
    process: str = ""
    mark: Mark = Mark()


class PlaceVariables(Message, frozen=True):
    """Several requests, in order; answered by `PlacedAll`."""

    requests: tuple[PlaceVariable, ...]


class PlacedAll(Message, frozen=True):
    """The answers, in the order of the requests."""

    answers: tuple[Placed | Failure, ...]


class Unplace(Message, frozen=True):
    """The state of this name no longer exists on its task: free the name. Answered by `Ok`."""

    name: str


class NotFinite(msgspec.Struct, frozen=True):
    """The first loss of a run, by name, that was not a finite number, with its step and worker."""

    step: int
    metric: str
    value: float
    run: str = ""
    task: str = ""


class ClaimSteps(Message, frozen=True):
    """Request steps of a run; answered by `Claimed`, which waits while other workers may return steps.

    `run`        name of the run; the first claim fixes `total_steps`
    `number`     number of this claim, greater than the task's earlier ones; a repeated number gets the same answer
    `last`       number of the last claim whose answer the task has seen, 0 for none
    `done`       number of steps of claim `last` that were done
    `step_s`     median duration of a step since the last claim, in s (0 when there was none)
    `metrics`    the worker's newest scalar metrics
    `more`       false when the worker leaves the run: it is answered immediately, with no steps
    `not_finite` first loss of the steps done that is not finite; run and task need not be set
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
    """Steps `first` to `first + count - 1`; a count of 0: all steps are done, or the claim had `more` false."""

    first: int
    count: int
    mark: Mark = Mark()


class RoundsDone(Message, frozen=True):
    """Progress of a run of synchronous training, as a worker sees it. Not answered.

    `rounds`   number of rounds done, of `total_rounds`
    `steps`    number of the worker's steps since its last report; the gradients of `dropped` of them came too late
    `step_s`   duration of a step, in s
    `metrics`  the worker's newest scalar metrics
    `not_finite`  first loss of these steps that is not finite; run and task need not be set
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
    """Ask whether this task is the one that does `what`; answered by `Elected`. The first live task that asks is."""

    what: str
    task: str


class Elected(Message, frozen=True):
    """Whether the requester was elected."""

    elected: bool
    mark: Mark = Mark()


class AwaitBarrier(Message, frozen=True):
    """The task has arrived at a barrier; answered by `BarrierPassed` when all its members have arrived or left.

    `number`          number of this arrival, greater than the task's earlier ones; a repeated one is the same arrival
    `timeout_s`       longest wait, in s
    `fails_on_leave`  whether the barrier fails when a member leaves; otherwise it goes on without that member
    """

    name: str
    task: str
    number: int
    timeout_s: float
    fails_on_leave: bool = False


class BarrierPassed(Message, frozen=True):
    """The barrier was passed by `members`: those of its members at roster `version` that stayed.

    `generation`  number of this pass, greater than the one before; it counts from 1 while the barrier is in use
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
    """A task leaves the cluster voluntarily."""

    task: str
    reason: str


class GetStatus(Message, frozen=True):
    """Read the state of the cluster; answered by `Status`."""


class VariableInfo(msgspec.Struct, frozen=True):
    """A placed variable, queue or accumulator, by `kind`; for `process` see `Placed`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    task: str
    kind: str = "variable"
    process: str = ""


class WorkerProgress(msgspec.Struct, frozen=True):
    """A worker's totals over all runs, and its newest `step_s` and `metrics`.

    `dropped` of its steps came too late for their round of synchronous training. `held` steps are claimed and not
    reported yet.
    """

    task: str
    steps: int
    step_s: float
    metrics: dict[str, float]
    dropped: int = 0
    held: int = 0


class TaskHealth(msgspec.Struct, frozen=True):
    """The newest heartbeat of a live task; see `Heartbeat`.

    `heard_at_s`       time when it arrived
    `stalled_since_s`  time since when the task has made no progress, or None when it is not stalled
    """

    task: str
    heard_at_s: float
    steps: int
    doing: str
    stalled_since_s: float | None


class GetHealth(Message, frozen=True):
    """Read the newest heartbeat of a task; answered by `Health`."""

    task: str


class Health(Message, frozen=True):
    """`health` is None for a task that is not live or not heard yet; `absence` says why it is not live, or is empty."""

    now_s: float
    health: TaskHealth | None
    absence: str


class Status(Message, frozen=True):
    """A snapshot of all that the coordinator shows to people; times are in s since its first start.

    `away`  live tasks without a connection: it has ended, or the task has not yet rejoined after the coordinator's
            restart; each has until its deadline to rejoin
    `left`  number of tasks that have left, including the ones no longer listed
    `not_finite`  the first non-finite loss of each run and metric
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


#: Answers and notifications that carry the mark of the newest write of the coordinator's state.
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
