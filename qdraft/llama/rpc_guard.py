"""Native calls that would end the process when a server on the network is lost.

llama.cpp aborts when an RPC server stops answering. Calls that may reach one run on a thread of
their own. When ggml is about to abort under such a call, its threads are held where they are for
good, and the caller gets an error: the program lives on, without that server.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

from qdraft.errors import EngineError, ServerError

_HINT = "is the server still running? qdraft rpc-server on the other machine starts one"


class _Job:
    """One call, and what came of it."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments
        self.ended = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.function(*self.arguments)
        except BaseException as error:  # it belongs to the caller, whose thread this is not
            self.error = error
        self.ended.set()


class Lifeline:
    """Runs calls one after another; idle, and without a thread, until ``start``."""

    def __init__(self) -> None:
        self.lost = ""  # in ggml's words, what ended the calls for good
        self._of_server = True
        self._jobs: queue.SimpleQueue[_Job] | None = None
        self._waiting: list[_Job] = []
        self._busy = False  # with a call, which an interrupt may have left alone
        self._callback: Any = None  # held by ggml

    def start(self, set_abort_callback: Callable[[Any], Any]) -> None:
        """From now on calls are guarded. ``set_abort_callback`` is ggml's."""
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            self._callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(self._aborting)
            set_abort_callback(self._callback)
            threading.Thread(target=self._work, daemon=True, name="qdraft-remote").start()

    @property
    def started(self) -> bool:
        return self._jobs is not None

    def call(
        self, function: Callable[..., Any], *arguments: Any, within: float | None = None
    ) -> Any:
        """What ``function`` returns or raises. KeyboardInterrupt leaves the call running.

        Raises ServerError when a server is lost under it or nothing comes back ``within`` so many
        seconds, EngineError when ggml aborts for another reason; at once for every call after that.
        """
        if self._jobs is None:
            return function(*arguments)
        self._require_alive()
        job = _Job(function, arguments)
        self._waiting.append(job)
        self._jobs.put(job)
        try:
            if not job.ended.wait(within):
                self.lost = self.lost or f"no answer within {within:.0f} seconds"
        finally:
            self._waiting.remove(job)
        self._require_alive()
        if job.error:
            raise job.error
        return job.result

    def _require_alive(self) -> None:
        if not self.lost:
            return
        if self._of_server:
            raise ServerError(f"an RPC server is lost: {self.lost}", hint=_HINT)
        raise EngineError(f"llama.cpp stopped: {self.lost}")

    def _work(self) -> None:
        assert self._jobs is not None
        while True:
            job = self._jobs.get()
            self._busy = True
            job.run()
            self._busy = False

    def _aborting(self, message: bytes) -> None:
        """Called by ggml, on one of its threads: returning from here ends the process."""
        words = message.decode("utf-8", "replace")
        if not (self._waiting or self._busy):
            with contextlib.suppress(OSError, ValueError):
                print(f"llama.cpp stopped: {words}", file=sys.stderr, flush=True)
            return
        self._of_server = "rpc" in words.lower()
        self.lost = words.split(": ", 1)[-1].strip()
        for job in list(self._waiting):
            job.ended.set()
        threading.Event().wait()


LIFELINE = Lifeline()
