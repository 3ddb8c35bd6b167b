"""What a client reads when something fails: OpenAI's shape, llama-server's types."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from qdraft.errors import ContextError, ParameterError, QDraftError, UsageError

INVALID = "invalid_request_error"
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class ApiError(Exception):
    """An error with its HTTP status and its body.

    ``param`` is the field of the request that is wrong. ``more`` are further keys of the body, and
    ``headers`` those of the response.
    """

    def __init__(  # noqa: PLR0913 (each is a part of the response)
        self,
        status: int,
        kind: str,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        more: Mapping[str, Any] = _NOTHING,
        headers: Mapping[str, str] = _NOTHING,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers)
        self._kind, self._param, self._code, self._more = kind, param, code, more

    def body(self) -> dict[str, Any]:
        """Return the JSON of the response."""
        error = {
            "message": str(self),
            "type": self._kind,
            "param": self._param,
            "code": self._code or self.status,
        }
        return {"error": {**error, **self._more}}


def invalid(message: str, param: str | None = None) -> ApiError:
    """Return the error for a request that is wrong."""
    return ApiError(400, INVALID, message, param=param)


def not_supported(message: str, param: str | None = None) -> ApiError:
    """Return the error for what a client may expect and qdraft does not have."""
    return ApiError(501, "not_supported_error", message, param=param)


def unavailable(message: str, retry_after: int | None = None) -> ApiError:
    """Return the error for a server that cannot take the request now.

    ``retry_after`` is when to try again, in seconds.
    """
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    return ApiError(503, "unavailable_error", message, headers=headers)


def too_long(n_prompt: int, n_ctx: int) -> ApiError:
    """Return the error for a prompt that leaves no room for a token."""
    return ApiError(
        400,
        "exceed_context_size_error",
        f"the prompt has {n_prompt} tokens, but the context holds {n_ctx}",
        code="context_length_exceeded",
        more={"n_prompt_tokens": n_prompt, "n_ctx": n_ctx},
    )


def translate(error: BaseException) -> ApiError:
    """Return what a client reads of an error of qdraft; of others only that there was one."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, (UsageError, ContextError)):
        match = re.match(r"[a-z_]+(?= is )", str(error))
        named = isinstance(error, ParameterError) and match
        return invalid(str(error), match[0] if match and named else None)
    if isinstance(error, QDraftError):
        return ApiError(500, "server_error", str(error))
    return ApiError(500, "server_error", "the server failed; its log says why")
