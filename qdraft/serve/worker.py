"""The one thread that owns the models, and the requests that wait for it in order."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from statistics import mean

from qdraft.errors import CancelledError
from qdraft.llama.progress import Progress
from qdraft.serve.errors import unavailable
from qdraft.serve.jobs import Job
from qdraft.serve.mailbox import Failed
from qdraft.serve.models import Models

log = logging.getLogger(__name__)

_LONGEST_WAIT_S = 60  # that a client is asked to wait before it tries again


class Worker:
    """Does jobs one after another, in the order in which they came.

    At most ``n_queue`` jobs wait. First come, first served: the texts of two requests that take
    turns would both end later than the first one does alone, and the second no sooner.
    """

    def __init__(self, models: Models, n_queue: int, progress: Progress) -> None:
        self.models = models
        self._n_queue = n_queue
        self._progress = progress
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._changed = threading.Condition()
        self._stopping = False
        self.is_ready = False  # once the first pair is loaded
        self._seconds: deque[float] = deque(maxlen=16)  # of the last jobs
        self._thread = threading.Thread(target=self._work, name="qdraft worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_busy(self) -> bool:
        return self._running is not None

    def submit(self, job: Job) -> None:
        """Add a job to the end of the queue. Raises ApiError if the queue is full."""
        with self._changed:
            if self._stopping:
                raise unavailable("the server is shutting down")
            if len(self._waiting) + self.is_busy > self._n_queue:
                raise unavailable(
                    f"{len(self._waiting)} requests are waiting already", self._retry_after()
                )
            self._waiting.append(job)
            self._changed.notify()

    def forget(self, job: Job) -> None:
        """Cancel a job, which then ends within a round; one that waits leaves the queue."""
        job.cancel()
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)

    def stop(self) -> None:
        """Cancel everything and take nothing more; harmless when repeated."""
        with self._changed:
            self._stopping = True
            jobs = [*self._waiting, *([self._running] if self._running else [])]
            self._waiting.clear()
            self._changed.notify()
        for job in jobs:
            job.cancel()
            job.mailbox.put(Failed(unavailable("the server is shutting down")))

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the thread has ended, with everything unloaded; tell whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            started = time.monotonic()
            self._do(job)
            with self._changed:
                self._running = None
                self._seconds.append(time.monotonic() - started)
        self.models.close()

    def _next(self) -> Job | None:
        """Wait for a job; None if the worker stops."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopping)
            if self._stopping:
                return None
            self._running = self._waiting.popleft()
            return self._running

    def _do(self, job: Job) -> None:
        def progress(what: str, done: float, of: float) -> None:
            if self._stopping:  # loading goes on for a client that has left: others want the pair
                raise CancelledError("the server is shutting down")
            self._progress(what, done, of)

        try:
            if not job.is_cancelled:
                job.run(self.models.load(job.model, progress))
        except CancelledError:
            pass
        except BaseException as error:
            job.fail(error)

    def _retry_after(self) -> int:
        """Return the seconds after which the queue has probably become shorter."""
        return round(min(_LONGEST_WAIT_S, max(1.0, mean(self._seconds or [1.0]))))
