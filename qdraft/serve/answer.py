"""One answer as an ASGI app: in one piece or as a stream, and cancelled if its client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from qdraft.serve.errors import ApiError
from qdraft.serve.jobs import TextJob
from qdraft.serve.mailbox import Event, Failed, Finished, Outcome, Written
from qdraft.serve.shapes import Shape
from qdraft.serve.worker import Worker

_PING = b": \n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must not collect the stream
]


class Json(JSONResponse):
    """JSON in UTF-8 in which no character can break it: half of a pair becomes U+FFFD."""

    def render(self, content: Any) -> bytes:
        return encode(content)


def encode(content: Any) -> bytes:
    """Return JSON on one line."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def error_response(error: ApiError) -> Json:
    """Return the response that tells a client of an error."""
    return Json(error.body(), error.status, error.headers)


class Answer:
    """Writes what a job gives; the job is forgotten when the client leaves.

    A stream that has nothing to say for ``ping_s`` seconds sends a comment (0: never). An error
    before the first event is an HTTP error, and later a part of the stream.
    """

    def __init__(
        self, job: TextJob, worker: Worker, shape: Shape, *, stream: bool, ping_s: float
    ) -> None:
        self._job, self._worker, self._shape = job, worker, shape
        self._stream, self._ping_s = stream, ping_s or None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        write = self._write_stream if self._stream else self._write_whole
        writing = asyncio.ensure_future(write(scope, receive, send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            self._worker.forget(self._job)
            writing.cancel()
            leaving.cancel()
            await asyncio.gather(writing, leaving, return_exceptions=True)

    async def _write_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcomes: list[Outcome] = []
        while True:
            event = await self._job.mailbox.get()
            if isinstance(event, Outcome):
                outcomes.append(event)
            elif isinstance(event, Failed):
                await error_response(event.error)(scope, receive, send)
                return
            elif isinstance(event, Finished):
                await Json(self._shape.whole(outcomes))(scope, receive, send)
                return

    async def _write_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        event = await self._job.mailbox.get(self._ping_s)
        if isinstance(event, Failed):
            await error_response(event.error)(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        outcomes: list[Outcome] = []
        begun: set[int] = set()
        while True:
            if event is None:
                await _send(send, _PING)
            else:
                await _send(send, self._parts(event, outcomes, begun))
                if isinstance(event, (Finished, Failed)):
                    break
            event = await self._job.mailbox.get(self._ping_s)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _parts(self, event: Event, outcomes: list[Outcome], begun: set[int]) -> bytes:
        """Return what the stream says of an event."""
        shape = self._shape
        parts: list[Any] = []
        if isinstance(event, (Written, Outcome)) and event.index not in begun:
            begun.add(event.index)
            parts += shape.head(event.index)
        if isinstance(event, Written):
            entries = event.entries or (None,) * len(event.chunks)
            for chunk, entry in zip(event.chunks, entries, strict=True):
                parts += shape.pieces(event.index, chunk, entry)
        elif isinstance(event, Outcome):
            outcomes.append(event)
            parts += shape.last(event)
        elif isinstance(event, Failed):
            parts.append(event.error.body())
        elif isinstance(event, Finished):
            return _frames(shape.tail(outcomes)) + b"data: [DONE]\n\n"
        return _frames(parts)


def _frames(parts: Sequence[Any]) -> bytes:
    return b"".join(b"data: " + encode(part) + b"\n\n" for part in parts)


async def _send(send: Send, data: bytes) -> None:
    if data:
        await send({"type": "http.response.body", "body": data, "more_body": True})


async def _left(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
