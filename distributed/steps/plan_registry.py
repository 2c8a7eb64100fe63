"""The plans registered with a task, ready to run.

Why: a step names a plan by its handle, in one small message; checking, loading and compiling happen once, here.
Invariants: equal plans with equal programs share a handle, and equal programs are compiled once, however many workers
register them; no index of a registered plan goes out of range, and it is kept until it was released as often as it was
registered. If several workers register a program, the first that may compile it does so for all.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import itertools
import secrets
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from dflow.distributed.steps.fair_semaphore import COMPILE_TIMEOUT_S, FairSemaphore
from dflow.distributed.steps.plan_checks import check_from_peer, check_plan
from dflow.distributed.wire.messages.plans import RegisterPlan
from dflow.lowering.programs.program import Program, load_program
from dflow.lowering.steps.executable import Executable
from dflow.lowering.steps.plan import Plan, calls_in
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import InternalError, TaskLost, WireError
from dflow.tracing.moments import reach

#: At most this many programs that no plan uses are kept, for later plans and initialisers.
MOST_UNUSED = 128

_DECODER = msgspec.msgpack.Decoder(Plan)
_ENCODER = msgspec.msgpack.Encoder()
#: A program's SHA-256, the number of variables that it writes, and the number that it only reads.
_ProgramKey = tuple[bytes, int, int]
#: Key of a plan: its encoding and its programs.
_Identity = tuple[bytes, tuple[_ProgramKey, ...]]


@dataclass
class _Registered:
    """A plan, with the number of its registrations minus that of its releases."""

    executable: Executable
    identity: _Identity | None = None
    holds: int = 1


class PlanRegistry:
    """The plans of the task `task`; thread-safe."""

    def __init__(self, task: str) -> None:
        self._task = task
        #: Held while a program is compiled.
        self.compiling = FairSemaphore()
        self._lock = threading.RLock()
        # A random start, so that a restarted task rejects the handles of its earlier process.
        self._first = self._next = secrets.randbits(40) << 20
        self._plans: dict[int, _Registered] = {}
        self._handles: dict[_Identity, int] = {}
        #: The programs, those whose use ended last at the end, and the number of plans, registrations and callers of
        #: `program` that use each.
        self._programs: dict[_ProgramKey, concurrent.futures.Future[Program]] = {}
        self._uses: Counter[_ProgramKey] = Counter()

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, handle: int) -> Executable:
        """Return the plan of a handle.

        raises  TaskLost if it was not registered with this process of the task; InternalError if it was released
        """
        found = self._plans.get(handle)
        if found is None and self._first <= handle < self._next:
            raise InternalError(f"{self._task} was asked to run plan {handle}, which was released")
        if found is None:
            raise TaskLost(
                f"{short_task_name(self._task)} was asked for plan {handle}, which is none of its {len(self._plans)}: "
                "it has been started again since, and what it held before is lost",
                "start the whole cluster again",
            )
        return found.executable

    def add(self, plan: Plan, programs: Sequence[Program]) -> int:
        """Keep a plan whose programs are already compiled; return its handle. Raises WireError as `check_plan`."""
        check_plan(plan, self._task, len(programs))
        registered = _Registered(Executable(plan, programs))
        with self._lock:
            return self._add(registered)

    def _add(self, registered: _Registered) -> int:
        handle, self._next = self._next, self._next + 1
        self._plans[handle] = registered
        return handle

    def release(self, handle: int) -> None:
        """Undo one registration of a plan; the last one drops the plan, whose programs stay for a while.

        Ignores a handle without a plan.
        """
        with self._lock:
            registered = self._plans.get(handle)
            if registered is None:
                return
            registered.holds -= 1
            if registered.holds:
                return
            del self._plans[handle]
            if registered.identity is not None:
                del self._handles[registered.identity]
                self._put_aside(registered.identity[1])

    @contextmanager
    def _using(self, keys: Sequence[_ProgramKey]) -> Iterator[None]:
        """Return a context that uses programs, which are not evicted before its end."""
        with self._lock:
            self._uses.update(keys)
        try:
            yield
        finally:
            with self._lock:
                self._put_aside(keys)

    def _put_aside(self, keys: Sequence[_ProgramKey]) -> None:
        """End a use of programs, and evict the unused ones beyond `MOST_UNUSED` whose last use ended first."""
        self._uses -= Counter(keys)
        for key in keys:
            if key in self._programs:
                self._programs[key] = self._programs.pop(key)
        unused = [key for key in self._programs if key not in self._uses]
        for key in unused[: max(0, len(unused) - MOST_UNUSED)]:
            del self._programs[key]

    def register(self, message: RegisterPlan, payload: memoryview, sender: str) -> tuple[int, tuple[int, ...]]:
        """Keep a plan that the task `sender` sent, and compile its programs; return its handle and ().

        If programs were not sent and are not here, keeps nothing, and returns 0 and the indices of these programs. An
        equal plan is registered once more, under the same handle. Waits until the programs are compiled.
        raises  WireError if the plan is malformed or does not match its programs; what loading a program and
                `FairSemaphore.held_for` raise
        """
        blobs = list(_split(payload, message.program_sizes))
        plan, variables = self._checked(message)
        keys = tuple((name, *used) for name, used in zip(_fingerprints(message, blobs), variables, strict=True))
        identity = (_ENCODER.encode(plan), keys)
        with self._using(keys):
            with self._lock:  # a program found here stays found, even if another thread fails to compile it
                found = [self._programs.get(key) for key in keys]
            missing = tuple(n for n, blob in enumerate(blobs) if not blob and found[n] is None)
            if missing:
                return 0, missing
            reach("registration", self._task)
            known = self._found(identity)
            if known is not None:
                return known, ()
            programs = [
                (here or self._loading(key, blob, sender)).result(COMPILE_TIMEOUT_S)
                for here, key, blob in zip(found, keys, blobs, strict=True)
            ]
            registered = _Registered(Executable(plan, programs), identity)
            with self._lock:
                known = self._found(identity)
                if known is None:
                    known = self._handles[identity] = self._add(registered)
                    self._uses.update(keys)
                return known, ()

    def _found(self, identity: _Identity) -> int | None:
        """Register an equal plan once more and return its handle; None when there is none."""
        with self._lock:
            known = self._handles.get(identity)
            if known is not None:
                self._plans[known].holds += 1
            return known

    def program(self, blob: memoryview, sender: str) -> Program:
        """Return a program that uses no variables, compiled like those of `register`, and kept for a while."""
        key = hashlib.sha256(blob).digest(), 0, 0
        with self._using([key]):
            return self._loading(key, blob, sender).result(COMPILE_TIMEOUT_S)

    def _checked(self, message: RegisterPlan) -> tuple[Plan, list[tuple[int, int]]]:
        """Return the decoded plan, and the variables that each program uses; see `_variables`. Raises WireError."""
        try:
            plan = _DECODER.decode(message.plan)
        except (msgspec.DecodeError, RecursionError) as error:
            raise WireError(f"{len(message.plan)} bytes are no plan: {error}") from error
        check_plan(plan, self._task, len(message.program_sizes))
        check_from_peer(plan)
        return plan, _variables(plan, len(message.program_sizes))

    def _loading(self, key: _ProgramKey, blob: memoryview, sender: str) -> concurrent.futures.Future[Program]:
        """Return the future of a program, compiled here unless another thread has begun to."""
        with self._lock:
            loading = self._programs.get(key)
        if loading is None:
            with self.compiling.held_for(sender):
                loading = self._loaded(key, blob)
        return loading

    def _loaded(self, key: _ProgramKey, blob: memoryview) -> concurrent.futures.Future[Program]:
        """Compile a program, unless another thread has begun to; return its future, which also gets the error."""
        with self._lock:
            loading = self._programs.get(key)
            if loading is not None:
                return loading
            loading = self._programs[key] = concurrent.futures.Future()
        try:
            loading.set_result(load_program(blob, *key[1:]))
        except BaseException as error:
            loading.set_exception(error)
            with self._lock:
                del self._programs[key]
        return loading


def _check_named(message: RegisterPlan) -> None:
    count = len(message.program_sizes)
    if len(message.programs) != count or any(len(name) != hashlib.sha256().digest_size for name in message.programs):
        raise WireError(f"fingerprints of a plan's programs: expected {count}, got {len(message.programs)}")


def _fingerprints(message: RegisterPlan, blobs: Sequence[memoryview]) -> list[bytes]:
    """SHA-256 of each program: computed for those sent, as declared for the others. Raises WireError on a mismatch."""
    if message.programs or not all(message.program_sizes):
        _check_named(message)
    found = [hashlib.sha256(blob).digest() if blob else message.programs[n] for n, blob in enumerate(blobs)]
    for position, (declared, computed) in enumerate(zip(message.programs, found, strict=False)):
        if declared != computed:
            raise WireError(
                f"program {position}: SHA-256 mismatch: declared {declared.hex()}, payload has {computed.hex()}"
            )
    return found


def _split(payload: memoryview, sizes: Sequence[int]) -> Iterator[memoryview]:
    if any(size < 0 for size in sizes) or sum(sizes) != len(payload):
        raise WireError(f"programs of {list(sizes)} bytes do not fill a payload of {len(payload)} bytes")
    ends = itertools.accumulate(sizes)
    return (payload[end - size : end] for size, end in zip(sizes, ends, strict=True))


def _variables(plan: Plan, programs: int) -> list[tuple[int, int]]:
    """Number of variables that each program writes, and that it only reads. Raises WireError if its calls differ."""
    found: dict[int, tuple[int, int]] = {}
    for item in calls_in(plan):
        used = len(item.writes), len(item.reads)
        if found.setdefault(item.program, used) != used:
            before = found[item.program]
            raise WireError(
                f"program {item.program} is called with {before[0]} variables to write and {before[1]} to read, and "
                f"with {used[0]} and {used[1]}"
            )
    return [found.get(program, (0, 0)) for program in range(programs)]
