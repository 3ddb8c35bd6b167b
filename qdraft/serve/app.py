"""The routes of the server."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from qdraft.errors import UsageError
from qdraft.serve.answer import Answer, Json, error_response
from qdraft.serve.errors import ApiError, invalid, not_supported, translate, unavailable
from qdraft.serve.fields import Fields, read_object
from qdraft.serve.gate import Gate, Rules
from qdraft.serve.jobs import CallJob, TextJob
from qdraft.serve.mailbox import Failed, Finished, Mailbox
from qdraft.serve.metrics import Metrics
from qdraft.serve.models import Loaded
from qdraft.serve.properties import describe_model, properties
from qdraft.serve.requests import CHAT, COMPLETION, NATIVE, read_request
from qdraft.serve.shapes import shape_for
from qdraft.serve.words import apply_template, detokenize, tokenize
from qdraft.serve.worker import Worker

log = logging.getLogger(__name__)

_LARGEST_BODY = 2**26  # bytes
_MOST_IGNORED = 1000  # names of fields to remember
_PAGE = Path(__file__).with_name("page.html")

# Endpoints that clients of other servers ask for, and why they are not here.
_NOT_HERE = {
    "/embeddings": "qdraft writes texts; it computes no embeddings",
    "/embedding": "qdraft writes texts; it computes no embeddings",
    "/rerank": "qdraft writes texts; it ranks none",
    "/reranking": "qdraft writes texts; it ranks none",
    "/infill": "qdraft does not fill in the middle of a text",
    "/responses": "qdraft has no Responses API: use /v1/chat/completions",
    "/messages": "qdraft has no Messages API: use /v1/chat/completions",
    "/messages/count_tokens": "qdraft has no Messages API: use /tokenize",
    "/slots": "qdraft has no slots: /metrics says what runs and what waits",
    "/lora-adapters": "qdraft loads adapters at its start alone",
    "/audio/transcriptions": "qdraft reads text alone",
    "/audio/speech": "qdraft writes text alone",
    "/images/generations": "qdraft writes text alone",
    "/moderations": "qdraft has no moderation",
    "/models/load": "qdraft loads a model at its first request",
    "/models/unload": "qdraft unloads a model if another needs its memory",
}


class Endpoints:
    """The endpoints, on what they share: the worker, its models, the counters and the settings."""

    def __init__(self, worker: Worker, metrics: Metrics, *, ping_s: float) -> None:
        self._worker, self._metrics = worker, metrics
        self._models = worker.models
        self._ping_s = ping_s
        self._ignored: set[str] = set()

    async def health(self, _: Request) -> Response:
        if not self._worker.is_ready:
            raise unavailable("Loading model")
        return Json({"status": "ok"})

    async def models(self, _: Request) -> Response:
        return Json({"object": "list", "data": self._describe_models()})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        for each in self._describe_models():
            if each["id"] == name:
                return Json(each)
        raise ApiError(
            404, "not_found_error", f"no model is called {name[:80]}", code="model_not_found"
        )

    async def chat(self, request: Request) -> Answer:
        return await self._write(CHAT, request)

    async def completions(self, request: Request) -> Answer:
        return await self._write(COMPLETION, request)

    async def completion(self, request: Request) -> Answer:
        return await self._write(NATIVE, request)

    async def tokenize(self, request: Request) -> Response:
        return await self._call(request, tokenize)

    async def detokenize(self, request: Request) -> Response:
        return await self._call(request, detokenize)

    async def apply_template(self, request: Request) -> Response:
        return await self._call(request, apply_template)

    async def props(self, request: Request) -> Response:
        name = self._models.find(request.query_params.get("model"))
        return Json(await self._use(name, properties))

    async def metrics(self, _: Request) -> Response:
        worker = self._worker
        text = self._metrics.render(n_busy=int(worker.is_busy), n_waiting=worker.n_waiting)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def page(self, _: Request) -> Response:
        return HTMLResponse(_PAGE.read_text(encoding="utf-8"))

    async def not_here(self, request: Request) -> Response:
        raise not_supported(_NOT_HERE[request.url.path])

    async def _write(self, kind: str, request: Request) -> Answer:
        """Queue a text request."""
        fields = await _read(request)
        asked = read_request(kind, fields)
        self._note_ignored(fields.unread)
        name = self._models.find(asked.model)
        job = TextJob(name, Mailbox(), asked, self._metrics)
        self._worker.submit(job)
        return Answer(
            job,
            self._worker,
            shape_for(asked, name),
            stream=asked.stream,
            ping_s=self._ping_s if asked.ping_s is None else asked.ping_s,
        )

    async def _call(self, request: Request, function: Callable[[Loaded, Fields], Any]) -> Response:
        """Call a function of a pair and of the fields of a request, and give its result."""
        fields = await _read(request)
        name = self._models.find(fields.text("model"))
        return Json(await self._use(name, lambda loaded: function(loaded, fields)))

    async def _use(self, name: str, function: Callable[[Loaded], Any]) -> Any:
        """Call a function of a pair: at once if the pair is loaded, else when it is."""

        def at_once() -> tuple[bool, Any]:
            with self._models.lock:
                loaded = self._models.loaded(name)
                return loaded is not None, loaded and function(loaded)

        is_loaded, value = await run_in_threadpool(at_once)
        if is_loaded:
            return value
        job = CallJob(name, Mailbox(), function)
        self._worker.submit(job)
        event = await job.mailbox.get()
        if isinstance(event, Failed):
            raise event.error
        assert isinstance(event, Finished)
        return event.value

    def _describe_models(self) -> list[dict[str, Any]]:
        """Describe all pairs; those that are loaded with what their files hold."""
        with self._models.lock:
            return [describe_model(name, self._models.loaded(name)) for name in self._models.names]

    def _note_ignored(self, names: list[str]) -> None:
        new = [name for name in names if name not in self._ignored][:8]
        if new and len(self._ignored) < _MOST_IGNORED:
            self._ignored.update(new)
            log.info("ignoring fields that qdraft does not know: %s", ", ".join(new))


def make_app(endpoints: Endpoints, rules: Rules, *, with_page: bool = True) -> ASGIApp:
    """Return the server as an ASGI app."""
    routes = [
        Route("/health", endpoints.health),
        Route("/models", endpoints.models),
        *(Route(p, endpoints.not_here, methods=["GET", "POST", "DELETE"]) for p in _NOT_HERE),
        Route("/models/{name:path}", endpoints.model),
        Route("/chat/completions", endpoints.chat, methods=["POST"]),
        Route("/completions", endpoints.completions, methods=["POST"]),
        Route("/completion", endpoints.completion, methods=["POST"]),
        Route("/tokenize", endpoints.tokenize, methods=["POST"]),
        Route("/detokenize", endpoints.detokenize, methods=["POST"]),
        Route("/apply-template", endpoints.apply_template, methods=["POST"]),
        Route("/props", endpoints.props),
        Route("/metrics", endpoints.metrics),
    ]
    if with_page:
        routes.append(Route("/", endpoints.page))
    handlers: Any = {ApiError: _refuse, UsageError: _refuse, HTTPException: _refuse_route}
    return Gate(Starlette(routes=routes, exception_handlers=handlers), rules)


async def _refuse(_: Request, error: Exception) -> Response:
    return error_response(translate(error))


async def _refuse_route(request: Request, error: Exception) -> Response:
    """Tell a client of a path or a method that is not there."""
    assert isinstance(error, HTTPException)
    path, method = request.url.path, request.method
    if error.status_code == 405:
        what = f"{path} does not take {method}"
        refusal = ApiError(405, "invalid_request_error", what, headers=error.headers or {})
    else:
        refusal = ApiError(404, "not_found_error", f"there is no {path[:80]}")
    return error_response(refusal)


async def _read(request: Request) -> Fields:
    """Return the fields of a body. Raises ApiError."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > _LARGEST_BODY:
            raise ApiError(413, "invalid_request_error", "the body has more than 64 MiB")
    if not data:
        raise invalid("the body is empty, but must be a JSON object")
    return read_object(bytes(data))
