"""Connections to the other tasks, by name.

Why: plans and messages name tasks; only this file knows their addresses. Invariants: there is one connection per task,
opened when it is first needed, or taken over from a task that opened it to run plans here. A connection that has ended
is opened again when next needed. A connection belongs to one process of its task. A task that is not in the address
book is not tried, and an attempt stops when the task is removed. An unreachable task is a TaskLost, whatever the
reason. The first message over a connection opened or taken over here, and the next one after this task has another
life or knows of a death, is `Introduce`.

An attempt to reach a dead task takes up to the timeout; a task that is paused or cut off is waited for longer. A thread
that other work relies on calls `connected` and `when_connected`, which do not wait. At most one thread for each task
connects for them.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dflow.distributed.transport.base import Handler, Peer, Transport
from dflow.distributed.wire.messages.basic import Introduce
from dflow.lowering.steps.recorder import NOWHERE
from dflow.lowering.steps.step_events import CONNECTED
from dflow.lowering.values.computed import about_to_wait
from dflow.tracing.errors import DeadlineExceeded, TaskLost, TransportClosed

_GONE = "the task has left or moved"
_AGAIN = "the task has connected again, since the connection broke"
#: Called when a task is connected, with None, or with the error.
OnConnected = Callable[[Exception | None], None]


def _start_thread(work: Callable[..., None], task: str) -> None:
    threading.Thread(target=work, args=(task,), name=f"dflow dial {task}", daemon=True).start()


@dataclass
class _Entry:
    address: str
    process: str
    connecting: threading.Lock = field(default_factory=threading.Lock)
    peer: Peer | None = None
    #: Whether the other task opened that connection.
    is_adopted: bool = False


class Peers:
    """Connections from the task `name` to the other tasks of the cluster; thread-safe.

    `connect_timeout_s`, `reach_timeout_s`  see `TaskSettings`
    `on_opened`  called with each connection that this task opened
    `submit`     calls the given function with a task's name, on a thread that may wait
    """

    def __init__(
        self,
        transport: Transport,
        *,
        name: str,
        handler: Handler,
        connect_timeout_s: float,
        reach_timeout_s: float = 0.0,
        note: Callable[..., int] = NOWHERE.note,
        on_opened: Callable[[Peer], None] = lambda peer: None,
        submit: Callable[[Callable[[str], None], str], object] = _start_thread,
    ) -> None:
        self._transport, self._submit = transport, submit
        self._name = name
        self._handler = handler
        self._connect_timeout_s, self._reach_timeout_s = connect_timeout_s, reach_timeout_s
        self._note = note
        self._on_opened = on_opened
        self._introduction: Introduce | None = None
        #: The `roster` of the newest introduction that was sent over all open connections.
        self.introduced_at = 0
        self._lock = threading.Lock()
        self._book: dict[str, _Entry] = {}
        self._left: Mapping[str, str] = {}
        self._is_closed = False
        #: The callbacks that wait for each task to be connected.
        self._connecting: dict[str, list[OnConnected]] = {}

    def set_addresses(
        self, addresses: Mapping[str, str], left: Mapping[str, str] = {}, processes: Mapping[str, str] = {}
    ) -> None:
        """Replace the address book, and close connections to tasks that left, moved or were restarted.

        `left`       reasons why tasks left
        `processes`  identities of the tasks' processes, for a process that listens where an earlier one did
        """
        book = {task: _Entry(address, processes.get(task, "")) for task, address in addresses.items()}
        with self._lock:
            self._left = left
            before = self._book
            kept = {task for task, entry in before.items() if _is_same(entry, book.get(task))}
            self._book = {task: before[task] if task in kept else entry for task, entry in book.items()}
        for task, entry in before.items():
            if task not in kept and entry.peer is not None:
                entry.peer.close(_GONE)

    def introduce(self, message: Introduce) -> None:
        """Send `message` over all open connections, and first over each later one.

        Does nothing if it equals the present introduction.
        """
        with self._lock:
            if message == self._introduction:
                return
            self._introduction = message
            peers = [entry.peer for entry in self._book.values() if entry.peer is not None]
        for peer in peers:
            with contextlib.suppress(TransportClosed):
                peer.start(message, on_reply=_ignore)
        self.introduced_at = message.roster

    def get(self, task: str) -> Peer:
        """Return the connection to `task`; opens it if needed, which may take until `reach_timeout_s`.

        raises  TaskLost if no such task is in the cluster, or it leaves or cannot be reached during the attempt;
                WireError and SecurityError as `Transport.connect`
        """
        # Without the lock: the dict is replaced, never changed.
        book = self._book
        entry = book.get(task)
        if entry is None:
            raise self._missing(task)
        peer = entry.peer
        if peer is not None and not peer.closed:
            return peer
        about_to_wait()
        with entry.connecting:
            peer = entry.peer
            if peer is None or peer.closed:
                entry.is_adopted = False
                peer = self._introduce(entry, self._connect(task, entry))
        if self._book.get(task) is not entry:
            peer.close(_GONE)
            raise self._gone_meanwhile(task, entry)
        return peer

    def connected(self, task: str) -> Peer | None:
        """Return the open connection to `task`, if there is one. Raises TaskLost if no such task is in the cluster."""
        entry = self._book.get(task)
        if entry is None:
            raise self._missing(task)
        peer = entry.peer
        return None if peer is None or peer.closed else peer

    def when_connected(self, task: str, call: OnConnected) -> None:
        """Connect `task` on another thread if needed, then call `call` there, with None or the error.

        If no thread can be started, calls it with TaskLost on this thread.
        """
        with self._lock:
            waiting = self._connecting.setdefault(task, [])
            waiting.append(call)
            if len(waiting) > 1:
                return
        try:
            self._submit(self._connect_for_waiting, task)
        except RuntimeError as error:  # this task is closed, or the system starts no more threads
            self._connected(task, TaskLost(f"{task} cannot be connected: {error}"))

    def _connect_for_waiting(self, task: str) -> None:
        try:
            self.get(task)
        except Exception as error:
            self._connected(task, error)
        else:
            self._connected(task, None)

    def _connected(self, task: str, error: Exception | None) -> None:
        with self._lock:
            waiting = self._connecting.pop(task, [])
        for call in waiting:
            call(copy.copy(error))  # a copy, since each step adds notes

    def _missing(self, task: str) -> TaskLost:
        if self._is_closed:
            return TaskLost(
                f"{self._name} has left the cluster, since close was called, so it cannot reach {task}",
                "do this before close, or join again by dflow.connect()",
            )
        if task in self._left:
            return TaskLost(f"{task} has left the cluster: {self._left[task]}")
        return TaskLost(f"{task} is not in the cluster; these tasks are: {', '.join(sorted(self._book)) or 'none'}")

    def _gone_meanwhile(self, task: str, entry: _Entry) -> TaskLost:
        why = f": {self._left[task]}" if task in self._left else ""
        return TaskLost(f"{task} at {entry.address} has left or moved while a connection to it was made{why}")

    def open_connections(self) -> int:
        """Number of open connections."""
        with self._lock:
            book = list(self._book.values())
        return sum(entry.peer is not None and not entry.peer.closed for entry in book)

    def adopt(self, peer: Peer) -> None:
        """Use a connection, which another task opened, for messages to that task too; introduce this task over it.

        Closes an earlier connection that the other task opened: it has ended there, though this task may not know it
        yet. Does nothing if this task has opened one itself, or the address book lacks the other task.
        """
        with self._lock:
            entry = self._book.get(peer.name)
            before = None if entry is None else entry.peer
            if entry is None or before is peer or not (before is None or before.closed or entry.is_adopted):
                return
            entry.is_adopted = True
        if before is not None:
            before.close(_AGAIN)
        with contextlib.suppress(TaskLost):
            self._introduce(entry, peer)
        self._note(CONNECTED, None, peer.name, "by its own will")

    def close(self) -> None:
        """Close every connection and forget every address, for good."""
        self._is_closed = True
        self.set_addresses({})

    def _connect(self, task: str, entry: _Entry) -> Peer:
        peer = self._reach(task, entry)
        if peer.name != task:
            peer.close("another was wanted there")
            raise TaskLost(f"{task} is not at {entry.address} any more, where {peer.name} answers")
        self._on_opened(peer)
        self._note(CONNECTED, None, task, entry.address)
        return peer

    def _reach(self, task: str, entry: _Entry) -> Peer:
        def is_wanted() -> bool:
            return self._book.get(task) is entry

        until_s = time.monotonic() + self._reach_timeout_s
        while is_wanted():
            try:
                return self._transport.connect(
                    entry.address,
                    name=self._name,
                    handler=self._handler,
                    who=task,
                    timeout_s=self._connect_timeout_s,
                    is_wanted=is_wanted,
                    resume_s=self._reach_timeout_s,
                )
            except DeadlineExceeded as error:
                if is_wanted() and not (_may_live(error) and time.monotonic() < until_s):
                    raise TaskLost(str(error)) from error
        raise self._gone_meanwhile(task, entry)

    def _introduce(self, entry: _Entry, peer: Peer) -> Peer:
        """Introduce this task over a new connection, then keep it, for other threads too, and return it.

        raises  TaskLost if the connection has ended
        """
        sent = None
        while entry.peer is not peer or sent != self._introduction:
            sent = self._introduction
            if sent is not None:
                try:
                    peer.start(sent, on_reply=_ignore)
                except TransportClosed as error:
                    raise TaskLost(f"the connection to {peer.name} at {entry.address} has ended: {error}") from error
            entry.peer = peer
        return peer


def _is_same(entry: _Entry, other: _Entry | None) -> bool:
    return other is not None and (entry.address, entry.process) == (other.address, other.process)


def _may_live(error: DeadlineExceeded) -> bool:
    """Whether the last attempt got no answer, as from a paused process or over a cut network, rather than a refusal."""
    refusals = ConnectionRefusedError, FileNotFoundError, TransportClosed
    return error.__cause__ is not None and not isinstance(error.__cause__, refusals)


def _ignore(reply: object) -> None:
    """Ignore the reply to an introduction: if that fails, the next message is refused or the connection ends."""
