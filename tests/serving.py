"""A server on loopback over a fake pair, and a client that reads streams as they come."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import uvicorn

from qdraft import DecodeParams, SamplingParams
from qdraft.decoding.policy.learned import Learned
from qdraft.decoding.records import Round
from qdraft.gguf.recommended import Recommended
from qdraft.llama.progress import no_progress
from qdraft.llama.spec import Both
from qdraft.serve.app import Endpoints, make_app
from qdraft.serve.gate import Rules
from qdraft.serve.metrics import Metrics
from qdraft.serve.models import Defaults, Models, Offer
from qdraft.serve.worker import Worker
from qdraft.session.pair import Sequences
from qdraft.session.session import Session
from qdraft.session.threads import Threads
from qdraft.testing import FakeKvCopy, FakeSequence, FakeVocab

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PIECES = [b"<end>", *(letter.encode() for letter in LETTERS), b" ", "é".encode()[:1]]
VOCAB = FakeVocab(PIECES, end=[0], chat=">")
N_CTX = 256
DEFAULTS = Defaults(SamplingParams(temperature=0), DecodeParams(draft_policy="fixed", n_draft=4))


class FakePair:
    """A pair whose text is the alphabet: after each letter comes the next, after z the end.

    ``gate`` holds the target back while it is cleared. ``n_read`` counts the tokens that the target
    reads, ``n_closed`` the pairs that were closed.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.vocab = VOCAB
        self.draft = self.target = SimpleNamespace(path="fake.gguf", file_type="F16", n_bytes=1)
        self.models = Both(self.target, self.draft)
        self.contexts = Both(*(SimpleNamespace(n_ctx=N_CTX, n_texts=7) for _ in range(2)))
        self.learned = Learned()
        self.threads = Threads([])
        self.recommended = Recommended()
        self.can_draft = True
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()  # the target waits for the gate
        self.n_read = 0
        self.sessions: list[Session] = []
        self.is_cancelled: Any = lambda: False
        self.closed = False

    def session(self) -> Session:
        self.sessions.append(Session(self))  # type: ignore[arg-type]
        return self.sessions[-1]

    def open_sequences(self) -> Sequences:
        target = _Target(self)
        draft = FakeSequence(next_letter, VOCAB, n_ctx=N_CTX)
        copy = FakeKvCopy(target, draft)
        return Sequences(target, draft, copy)  # type: ignore[arg-type]

    def cancel_if(self, is_cancelled: Any) -> None:
        self.is_cancelled = is_cancelled

    def register(self, session: Session) -> None: ...

    def forget(self, session: Session) -> None: ...

    def require_rollback(self) -> None: ...

    def observe(self, round: Round) -> None: ...

    def save_costs(self) -> None: ...

    def close(self) -> None:
        self.closed = True


def next_letter(tokens: tuple[int, ...]) -> Sequence[float]:
    row = np.full(len(PIECES), -30.0)
    row[(tokens[-1] + 1) % 27] = 0.0
    return row


class _Target(FakeSequence):
    """Counts what it reads, and waits for the pair's gate."""

    def __init__(self, pair: FakePair) -> None:
        super().__init__(next_letter, VOCAB, n_ctx=N_CTX)
        self._pair = pair

    def eval(self, tokens: Sequence[int], logits: int) -> Any:
        if not self._pair.gate.is_set():
            self._pair.waiting.set()
            self._pair.gate.wait(30)
            self._pair.waiting.clear()
        self._pair.n_read += len(tokens)
        return super().eval(tokens, logits)


@dataclass
class Reply:
    """A response that has been read to its end."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def parts(self) -> list[Any]:
        """The objects of a stream; its end must be marked."""
        frames = [line[6:] for line in self.text.splitlines() if line.startswith("data: ")]
        assert frames[-1] == "[DONE]"
        return [json.loads(frame) for frame in frames[:-1]]


@dataclass
class Service:
    """A server that runs; ``pairs`` are those that it has opened, by name."""

    port: int
    worker: Worker
    pairs: dict[str, FakePair] = field(default_factory=dict)
    connections: list[http.client.HTTPConnection] = field(default_factory=list)

    @property
    def pair(self) -> FakePair:
        return next(iter(self.pairs.values()))

    def connect(self) -> http.client.HTTPConnection:
        self.connections.append(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30))
        return self.connections[-1]

    def ask(self, path: str, body: Any = None, *, method: str = "", **headers: str) -> Reply:
        """Send a request and read the response; ``body`` is JSON unless it is bytes."""
        connection = self.connect()
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method or ("GET" if body is None else "POST"), path, data, named)
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, text)

    def chat(self, content: str = "a", **fields: Any) -> Reply:
        messages = [{"role": "user", "content": content}]
        return self.ask("/v1/chat/completions", {"messages": messages, **fields})

    def begin(
        self, path: str = "/v1/chat/completions", **fields: Any
    ) -> http.client.HTTPConnection:
        """Send a request, and do not wait for the response."""
        connection = self.connect()
        messages = [{"role": "user", "content": "a"}]
        connection.request("POST", path, json.dumps({"messages": messages, **fields}))
        return connection


def eventually(condition: Any, seconds: float = 10.0) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.002)


@contextmanager
def serving(
    *names: str,
    rules: Rules = Rules(),  # noqa: B008 (frozen)
    n_queue: int = 8,
    n_kept: int = 2,
    ping_s: float = 0.0,
) -> Iterator[Service]:
    """Serve fake pairs of these names."""
    names = names or ("fake",)
    pairs: dict[str, FakePair] = {}

    def offer(name: str) -> Offer:
        spec = SimpleNamespace(name=name)
        return Offer(name, lambda: spec, lambda _: DEFAULTS)  # type: ignore[return-value, arg-type]

    def open_pair(spec: Any, progress: Any) -> Any:
        pairs[spec.name] = FakePair()
        return pairs[spec.name]

    models = Models([offer(name) for name in names], n_kept, open_pair)
    worker = Worker(models, n_queue, no_progress)
    app = make_app(Endpoints(worker, Metrics(), ping_s=ping_s), rules)
    config = uvicorn.Config(app, port=0, log_config=None, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    worker.start()
    worker.is_ready = True
    models.load(names[0], no_progress)
    thread.start()
    eventually(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    service = Service(port, worker, pairs)
    try:
        yield service
    finally:
        for connection in service.connections:
            connection.close()
        worker.stop()
        for pair in pairs.values():
            pair.gate.set()
        server.should_exit = True
        thread.join(10)
        assert worker.join(10)
        assert not thread.is_alive()
