"""What every request passes first: its path, its Host, its Origin and its key. Pure ASGI."""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qdraft.serve.answer import error_response
from qdraft.serve.errors import ApiError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
_PUBLIC = ("/", "/health")  # without a key
_ANY = "*"


@dataclass(frozen=True, slots=True)
class Rules:
    """Who may use the server.

    ``keys`` are those that a request may have; without any it needs none. ``hosts`` are the names
    in Host that a request may have, without ports; None for any. ``origins`` are those of web
    pages, beside pages of this machine and of the server itself; "*" for any.
    """

    keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = LOOPBACK
    origins: tuple[str, ...] = ()


class Gate:
    """Lets requests through to ``app`` if the rules allow them, with one spelling of each path.

    Another web page could reach a server on loopback by a name that leads there (DNS rebinding), so
    Host is checked, and a page of another origin is refused.
    """

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = {**scope, "path": one_spelling(scope["path"]), "root_path": ""}
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin is not None:
            send = _with_origin(send, origin if self._allows_origin(origin, headers) else None)
        refusal = self._refusal(scope, headers, origin)
        if refusal is not None:
            await error_response(refusal)(scope, receive, send)
        elif origin is not None and _is_preflight(scope, headers):
            await _preflight(headers)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Headers, origin: str | None) -> ApiError | None:
        rules = self._rules
        host = host_name(headers.get("host", ""))
        if rules.hosts is not None and host not in rules.hosts:
            return ApiError(
                403,
                "permission_error",
                f"Host is {host[:80]}, which this server does not answer to; --allow-host names "
                "further hosts",
            )
        if origin is not None and not self._allows_origin(origin, headers):
            return ApiError(
                403,
                "permission_error",
                f"pages of {origin[:80]} may not use this server; --cors-origins names those that "
                "may",
            )
        is_open = scope["path"] in _PUBLIC or (origin and _is_preflight(scope, headers))
        if rules.keys and not is_open and not _has_key(headers, rules.keys):
            return ApiError(
                401,
                "authentication_error",
                "the API key is missing or wrong",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return None

    def _allows_origin(self, origin: str, headers: Headers) -> bool:
        allowed = self._rules.origins
        if _ANY in allowed or origin in allowed:
            return True
        parts = urlsplit(origin)
        is_web = parts.scheme in ("http", "https")
        own = parts.netloc == headers.get("host")
        return is_web and (own or host_name(parts.netloc) in LOOPBACK)


def one_spelling(path: str) -> str:
    """Return a path without doubled slashes, without /v1 and without a slash at its end."""
    single = re.sub("/{2,}", "/", path)
    return re.sub("^(/v1)+(?=/|$)", "", single).rstrip("/") or "/"


def host_name(host: str) -> str:
    """Return the name in a Host header, without port and brackets, in lower case."""
    match = re.fullmatch(r"\[([^\]]*)\](?::\d*)?|([^:]*)(?::\d*)?", host.strip())
    return (match[1] or match[2] or "").lower() if match else host.lower()


def _has_key(headers: Headers, keys: Sequence[str]) -> bool:
    """Tell whether a request has one of the keys; the time does not tell which, or how much."""
    given = headers.get("x-api-key", "")
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        given = token.strip()
    data = given.encode("utf-8", "surrogateescape")
    matches = [hmac.compare_digest(data, key.encode()) for key in keys]
    return any(matches)


def _is_preflight(scope: Scope, headers: Headers) -> bool:
    return scope["method"] == "OPTIONS" and "access-control-request-method" in headers


def _preflight(headers: Headers) -> Response:
    asked = headers.get("access-control-request-headers", "")
    return Response(
        status_code=204,
        headers={
            "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
            "Access-Control-Allow-Headers": asked or "Authorization, Content-Type",
            "Access-Control-Max-Age": "600",
        },
    )


def _with_origin(send: Send, allowed: str | None) -> Send:
    """Return ``send`` with the header that lets a page of the allowed origin read the response."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.add_vary_header("Origin")
            if allowed is not None:
                headers["Access-Control-Allow-Origin"] = allowed
        await send(message)

    return sending
