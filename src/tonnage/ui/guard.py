"""What is looked at before anything is answered, and what every answer says to browsers.

A page of another site can make a browser send requests here, and a name it controls can be made to lead here. So a
request must name this server as its host, and must not come from a page of any other origin.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tonnage.errors import Problem
from tonnage.ui.messages import JSON, refusal

FORBIDDEN, UNSUPPORTED = 403, 415
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


class Guard:
    """Refuses requests that a browser was made to send, and adds headers to every answer."""

    def __init__(self, app: ASGIApp, *, hosts: Iterable[str]) -> None:
        """Take the names that this server answers to, without a port."""
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "no-store" if scope["path"].startswith("/api/") else "no-cache")
            await send(message)

        problem = self._problem(scope)
        app = self._app if problem is None else problem_response(*problem)
        await app(scope, receive, guarded)

    def _problem(self, scope: Scope) -> tuple[int, Problem] | None:
        if scope["type"] != "http":
            return FORBIDDEN, Problem(where="request", what="not HTTP")
        headers = Headers(scope=scope)
        named = headers.getlist("host")
        if len(named) != 1 or without_port(named[0]) not in self._hosts:
            found = ", ".join(named) or "none"
            expected = " or ".join(sorted(self._hosts))
            return FORBIDDEN, Problem(where="Host", what="not this server", expected=expected, found=found)
        origins = headers.getlist("origin")
        same = (f"http://{named[0]}", f"https://{named[0]}")
        foreign = [origin for origin in origins if origin.lower() not in (one.lower() for one in same)]
        if foreign:
            return FORBIDDEN, Problem(where="Origin", what="another site", expected=same[0], found=", ".join(foreign))
        site, mode = headers.get("sec-fetch-site", "none"), headers.get("sec-fetch-mode", "navigate")
        if site not in ("same-origin", "none") and (scope["method"] != "GET" or mode != "navigate"):
            expected = "same-origin, or a link that is followed"
            return FORBIDDEN, Problem(where="Sec-Fetch-Site", what="another site", expected=expected, found=site)
        return _posted(headers) if scope["method"] == "POST" else None


def _posted(headers: Headers) -> tuple[int, Problem] | None:
    """Return why something posted is not taken: a form of another site could not send JSON without asking first."""
    media, _, parameters = headers.get("content-type", "").partition(";")
    charset = parameters.strip().lower().replace('"', "")
    if media.strip().lower() != JSON or charset not in ("", "charset=utf-8"):
        found = headers.get("content-type", "none")
        return UNSUPPORTED, Problem(where="Content-Type", what="not taken", expected=JSON, found=found)
    encoding = headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        return UNSUPPORTED, Problem(where="Content-Encoding", what="not taken", expected="identity", found=encoding)
    return None


def without_port(host: str) -> str:
    """Return the name of a host.

    >>> without_port("localhost:8765"), without_port("[::1]:80"), without_port("127.0.0.1")
    ('localhost', '[::1]', '127.0.0.1')
    """
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() and (port.isascii()) else host).lower()


def problem_response(status: int, *problems: Problem, headers: dict[str, str] | None = None) -> Response:
    """Return a refusal as a response."""
    answer = refusal(status, *problems)
    return Response(answer.content, status_code=answer.status, media_type=answer.media, headers=headers)
