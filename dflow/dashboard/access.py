"""Checks of every request before it is answered, and the headers of every answer.

Why: a page of another site may make the user's browser send requests to this server, also over loopback. Invariants:

- a request is answered only if its `Host` is an IP address or a name of this server, so that a name which an attacker
  points at this address (DNS rebinding) is refused;
- with a token, each request has it: in a cookie, which the address with `?token=` sets, or as a bearer;
- a request that changes something comes from a page of this server: its `Origin` says so, and its content is JSON,
  which no form of another site can send;
- an answer may be used by pages of this server alone, and its page loads nothing from elsewhere.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Collection, Mapping
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflow.serving.host_check import LOCAL_NAMES, is_own_host

#: Sources that the page may load from, and pages that may frame it: this server, and none.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; worker-src 'self' blob:; font-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    # Allows popups, since the page hands a trace to the tab with Perfetto that it opens.
    "cross-origin-opener-policy": "same-origin-allow-popups",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def json_error(status: int, text: str, remedy: str = "", headers: Mapping[str, str] | None = None) -> Response:
    data = {"error": {"status": status, "text": text, "remedy": remedy}}
    return Response(json.dumps(data), status, {**(headers or {})}, media_type="application/json")


class AccessChecks:
    """ASGI middleware that makes the checks; see the file's description.

    `names`      host names of this server besides localhost, in lower case; IP addresses are always taken
    `token`      that requests must have; empty for none
    `cookie`     name of the cookie with the token
    `is_secure`  whether pages come over TLS
    """

    def __init__(self, app: ASGIApp, *, names: Collection[str], token: str, cookie: str, is_secure: bool) -> None:
        self._app, self._names, self._token, self._cookie = app, {*names} | LOCAL_NAMES, token, cookie
        self._scheme = "https" if is_secure else "http"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        answer = self._refusal(scope) or self._app
        await answer(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not is_own_host(host, self._names):
            return json_error(
                421,
                f"Host: expected an IP address or one of {', '.join(sorted(self._names))}, got {host[:100]!r}",
                "use the address that the server printed, or start it with --host-name for another name",
            )
        if self._token and not self._has_token(headers):
            given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
            if scope["method"] in ("GET", "HEAD") and given and self._is_token(given):
                return self._entered(scope)
            return json_error(
                401,
                f"token: expected that of this dashboard, got {'another one' if given else 'none'}",
                "open the whole address that `dflow dashboard` printed, with its ?token=",
                {"www-authenticate": "Bearer"},
            )
        if scope["method"] not in ("GET", "HEAD"):
            return self._refusal_of_change(headers, host)
        return None

    def _refusal_of_change(self, headers: Headers, host: str) -> Response | None:
        origin, kind = headers.get("origin", ""), headers.get("content-type", "")
        if origin != f"{self._scheme}://{host}":
            text = f"Origin: expected {self._scheme}://{host[:100]}, got {origin[:100] or 'none'}"
            return json_error(403, text, "send it from the dashboard's own page")
        if kind.partition(";")[0].strip().lower() != "application/json":
            text = f"Content-Type: expected application/json, got {kind[:100] or 'none'}"
            return json_error(415, text, "send JSON")
        return None

    def _has_token(self, headers: Headers) -> bool:
        bearer = headers.get("authorization", "")
        if bearer.startswith("Bearer ") and self._is_token(bearer.removeprefix("Bearer ")):
            return True
        try:
            morsel = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return False
        return morsel is not None and self._is_token(morsel.value)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())

    def _entered(self, scope: Scope) -> Response:
        """Return the answer to an address with the token: a cookie, and the same address without it."""
        answer = RedirectResponse(scope["path"], 303)
        secure = self._scheme == "https"
        answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", secure=secure)
        return answer
