"""From the thread that owns the models to a request that waits in the event loop."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from qdraft.decoding.records import Chunk, FinishReason
from qdraft.decoding.summary import Summary
from qdraft.serve.errors import ApiError


@dataclass(frozen=True, slots=True)
class Written:
    """The chunks of one round of the text ``index``.

    ``entries`` are the log-probabilities of each chunk's token, if the client asks for them.
    """

    index: int
    chunks: tuple[Chunk, ...]
    entries: tuple[dict[str, Any] | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """A text that has ended; ``n_cached`` of its ``n_prompt`` tokens were in the cache."""

    index: int
    text: str
    reasoning: str
    tokens: tuple[int, ...]
    finish: FinishReason
    n_prompt: int
    n_cached: int
    n_most_drafted: int
    seed: int
    summary: Summary
    entries: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """All texts have ended; ``value`` is the result of a request for something else."""

    value: Any = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The request has failed."""

    error: ApiError


Event = Written | Outcome | Finished | Failed


class Mailbox:
    """The events of one request, in order. Make it in the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    def put(self, event: Event) -> None:
        """Add an event, from any thread; nobody reads it if the event loop has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def get(self, timeout_s: float | None = None) -> Event | None:
        """Return the next event; None if there is none within ``timeout_s``."""
        try:
            return await asyncio.wait_for(self._events.get(), timeout_s)
        except asyncio.TimeoutError:
            return None
