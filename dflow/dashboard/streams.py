"""Server-sent events: every update of the cluster goes to all open pages.

An update is encoded once and kept for a moment, and each page takes it from there at its own speed. Invariants: memory
does not grow with slow pages: one that falls behind `KEPT` updates, or does not take one for `SEND_S`, is closed, and
its browser connects again. At most `MOST_PAGES` are open.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
from starlette.types import Receive, Scope, Send

from dflow.dashboard.access import json_error
from dflow.dashboard.dashboard_record import PageUpdate
from dflow.serving.http_connection import ABORT

MOST_PAGES = 50
#: Updates that are kept for slow pages.
KEPT = 16
#: Longest wait for a page to take an update, and time after which a silent stream sends a comment, in s.
SEND_S, SILENT_S = 20.0, 15.0


def encoded(update: PageUpdate) -> bytes:
    """Return an update as a server-sent event."""
    name, data = update
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"


class Streams:
    """The streams of all open pages. `first` returns the updates that a new page begins with."""

    def __init__(self, first: Callable[[], Sequence[PageUpdate]], most_pages: int = MOST_PAGES) -> None:
        self._first, self._most_pages = first, most_pages
        #: Number of open pages.
        self.pages = 0
        self._kept: deque[bytes] = deque(maxlen=KEPT)
        self._newest = 0
        self._changed = asyncio.Event()
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Begin to pass on updates, in the event loop that runs now."""
        self._loop = asyncio.get_running_loop()

    def publish(self, updates: Sequence[PageUpdate]) -> None:
        """Send updates to all pages; from any thread. Updates before `open` and after `close` are dropped."""
        if self.pages and not self._is_closed:
            self._in_loop(self._add, b"".join(map(encoded, updates)))

    def close(self) -> None:
        """End all streams; from any thread."""
        self._is_closed = True
        self._in_loop(self._wake)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.pages >= self._most_pages:
            text = f"pages: expected at most {self._most_pages} at once, got one more"
            answer = json_error(503, text, "close a page of the dashboard", {"retry-after": "10"})
            await answer(scope, receive, send)
            return
        self.pages += 1
        # The server reads the end of the request and that of the connection here.
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await self._serve(send, gone)
        except TimeoutError:
            scope["state"][ABORT]()  # the page does not read, so what is written never leaves
        except OSError:
            pass  # the page is gone
        finally:
            self.pages -= 1
            gone.cancel()

    async def _serve(self, send: Send, gone: asyncio.Task[None]) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        async with asyncio.timeout(SEND_S):
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        taken, events = self._newest, b"".join(map(encoded, self._first()))
        while True:
            async with asyncio.timeout(SEND_S):
                await send({"type": "http.response.body", "body": events or b": \n\n", "more_body": True})
            changed = self._changed
            if taken == self._newest and not self._is_closed:
                waiting = asyncio.create_task(changed.wait())
                await asyncio.wait({waiting, gone}, timeout=SILENT_S, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
            if gone.done():
                return
            if self._is_closed or self._newest - taken > len(self._kept):
                async with asyncio.timeout(SEND_S):
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            events = b"".join(list(self._kept)[len(self._kept) - (self._newest - taken) :])
            taken = self._newest

    def _in_loop(self, call: Callable[..., None], *arguments: bytes) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(call, *arguments)

    def _add(self, events: bytes) -> None:
        self._kept.append(events)
        self._newest += 1
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
