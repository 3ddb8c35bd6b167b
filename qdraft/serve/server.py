"""The server as a process: its socket, its start, and its end by a signal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

import uvicorn

from qdraft.errors import UsageError
from qdraft.llama.progress import Progress
from qdraft.serve.app import Endpoints, make_app
from qdraft.serve.errors import translate
from qdraft.serve.gate import Rules
from qdraft.serve.jobs import Job
from qdraft.serve.mailbox import Failed, Finished, Mailbox
from qdraft.serve.metrics import Metrics
from qdraft.serve.models import Loaded, Models
from qdraft.serve.properties import describe_loaded
from qdraft.serve.worker import Worker

log = logging.getLogger(__name__)

_KEEP_ALIVE_S = 75  # more than proxies have
_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Settings:
    """How to serve; ``ping_s`` 0 sends no comments, ``with_page`` False leaves the page out."""

    host: str
    port: int
    rules: Rules
    n_queue: int
    ping_s: float
    with_page: bool = True


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises UsageError for an address that cannot be used."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=256)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"qdraft cannot listen on {host}, port {port}: {reason}",
            hint="choose another --port, or --port 0 for any that is free",
        ) from error


def serve(models: Models, settings: Settings, progress: Progress) -> None:
    """Serve until a signal ends it; raise what loading the first pair raises."""
    with contextlib.closing(listen(settings.host, settings.port)) as listening:
        worker = Worker(models, settings.n_queue, progress)
        endpoints = Endpoints(worker, Metrics(), ping_s=settings.ping_s)
        app = make_app(endpoints, settings.rules, with_page=settings.with_page)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=_KEEP_ALIVE_S,
            server_header=False,
        )
        with _uvicorns_log():
            server = _Server(config, worker, listening)
            server.run(sockets=[listening])
    if server.error is not None:
        raise server.error


class _FirstLoad(Job):
    """Loads the first pair, and keeps the error if that fails."""

    error: BaseException | None = None

    def run(self, loaded: Loaded) -> None:
        for line in describe_loaded(loaded):
            log.info("%s", line)
        self.mailbox.put(Finished())

    def fail(self, error: BaseException) -> None:
        self.error = error  # the command line shows it
        self.mailbox.put(Failed(translate(error)))


class _Server(uvicorn.Server):
    """Uvicorn's server, with the worker: a signal ends the text in the making within a round."""

    def __init__(self, config: uvicorn.Config, worker: Worker, listening: socket.socket) -> None:
        super().__init__(config)
        self.error: BaseException | None = None
        self._worker = worker
        self._address = _describe(listening)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._worker.start()
        self._loading = asyncio.ensure_future(self._load())

    async def _load(self) -> None:
        job = _FirstLoad(self._worker.models.names[0], Mailbox())
        self._worker.submit(job)
        event = await job.mailbox.get()
        if isinstance(event, Finished):
            self._worker.is_ready = True
            log.info("listening on %s (OpenAI's API: %s/v1)", self._address, self._address)
        else:
            self.error = job.error
            self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._worker.stop()
        await super().shutdown(sockets)
        await asyncio.to_thread(self._worker.join)
        if self.error is None:
            log.info("stopped")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle the signals that stop a command; unlike uvicorn, do not raise them again."""
        names = ("SIGINT", "SIGTERM", "SIGHUP")
        numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
        handled = [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self.handle_exit) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End at the first signal; at a second one, wait for nothing."""
        if self.should_exit:
            os._exit(_INTERRUPTED)
        self.should_exit = True


class _ToLog(logging.Handler):
    """Passes uvicorn's warnings on to qdraft's log."""

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        log.log(record.levelno, "%s", text)


@contextlib.contextmanager
def _uvicorns_log() -> Iterator[None]:
    logger = logging.getLogger("uvicorn")
    before = logger.propagate, logger.level
    handler = _ToLog(logging.WARNING)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before[0]


def _describe(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
