"""Native calls that survive the loss of an RPC server.

llama.cpp aborts the process if an RPC server stops answering. So calls that may reach a server run
on a thread of their own. If ggml is about to abort in such a call, the guard stops ggml's thread
for good and raises an error in the caller: the program goes on without that server.
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

_HINT = "start it again on the other machine: qdraft rpc-server"


class _Job:
    """One call, and its result or error."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments
        self.ended = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.function(*self.arguments)
        except BaseException as error:  # the caller, on another thread, raises it
            self.error = error
        self.ended.set()


class RpcGuard:
    """Runs calls one after another on one thread; calls them directly until ``start``."""

    def __init__(self) -> None:
        self.lost = ""  # why calls are no longer possible, in ggml's words
        self._of_server = True
        self._jobs: queue.SimpleQueue[_Job] | None = None
        self._waiting: list[_Job] = []
        self._busy = False  # True during a call, also one whose caller was interrupted
        self._left: _Job | None = None  # the last call whose caller was interrupted
        self._callback: Any = None  # ggml calls it, so it must stay alive
        self._thread: threading.Thread | None = None

    def start(self, set_abort_callback: Callable[[Any], Any]) -> None:
        """Guard all calls from now on; ``set_abort_callback`` is ggml's."""
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            self._callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(self._aborting)
            set_abort_callback(self._callback)
            self._thread = threading.Thread(target=self._work, daemon=True, name="qdraft-rpc")
            self._thread.start()

    @property
    def started(self) -> bool:
        return self._jobs is not None

    @property
    def has_left(self) -> bool:
        """Does a call still run whose caller was interrupted?"""
        return self._left is not None and not self._left.ended.is_set()

    def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        within: float | None = None,
        later: bool = False,
    ) -> Any:
        """Return what ``function`` returns, or raise what it raises.

        KeyboardInterrupt leaves the call running; its arguments live until it has ended. Raises
        ServerError if a server is lost during the call or does not answer ``within`` that many
        seconds, and EngineError if ggml aborts for another reason. Every later call then raises
        the same at once. ``later`` is for clean-up, whose result nobody needs: if an interrupt has
        left a call running, this one follows it, and None is returned at once.
        """
        if self._jobs is None or threading.current_thread() is self._thread:  # or from a callback
            return function(*arguments)
        job = _Job(function, arguments)
        if later and self.has_left:
            self._jobs.put(job)
            return None
        self._waiting.append(job)
        try:
            self._require_alive()  # now that an abort cannot miss this job
            self._jobs.put(job)
            if not job.ended.wait(within):
                self.lost = self.lost or f"no answer within {within:.0f} seconds"
        except KeyboardInterrupt:
            self._left = job
            raise
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
        """Hold the thread that calls this; ggml would end the process if this returned."""
        words = message.decode("utf-8", "replace")
        if not (self._waiting or self._busy):
            with contextlib.suppress(OSError, ValueError):
                shown = words.encode("unicode_escape").decode()  # for a terminal
                print(f"llama.cpp stopped: {shown}", file=sys.stderr, flush=True)
            return
        self._of_server = "rpc" in words.lower()
        self.lost = words.split(": ", 1)[-1].strip()
        for job in list(self._waiting):
            job.ended.set()
        threading.Event().wait()


GUARD = RpcGuard()
