"""The threads that a pair decodes with: fewer of them while other programs use the CPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from qdraft.decoding.records import Round
from qdraft.session.contention import Contention

log = logging.getLogger(__name__)

# Rounds with fewer threads before all are tried again, at first and at most. Not measured: a try
# that fails costs one decode, which may take the time of a hundred.
_FIRST_WAIT, _LONGEST_WAIT = 256, 4096
# Rounds that all threads are on trial. Not measured.
_N_TRIAL = 8
# A try has failed if a decode takes this many times the fastest one with fewer threads. Not
# measured: all threads should be faster, so twice is beyond noise.
_WORSE = 2.0
# Rounds with all threads after which the costs are those of all threads again: by then the target
# alone was timed eight times (``PolicyConstants.plain_every``), and its median is new.
_N_SETTLED = 192


class Threaded(Protocol):
    """A context, with the numbers of threads that it decodes one token and batches with."""

    n_threads: int
    n_threads_batch: int

    def use_threads(self, n: int, n_batch: int) -> None: ...


class Threads:
    """Halves the threads of a pair under contention, and tries all of them again now and then.

    Whoever holds the threads gets all of them and keeps them: which rows are bit-identical depends
    on their number. Contention is then only reported.
    """

    def __init__(
        self, contexts: Sequence[Threaded], target_s: float | None = None, *, watched: bool = True
    ) -> None:
        """Take the threads that ``contexts`` have as all threads.

        ``target_s`` is the time of one target token with all threads in earlier runs, in seconds.
        ``watched`` False leaves the threads as they are.
        """
        self._contexts = contexts
        self._all = [(context.n_threads, context.n_threads_batch) for context in contexts]
        self._watched = watched
        self._n_held = 0
        self._n_halvings = 0
        self._tried_from: int | None = None  # halvings before the try that is under way
        self._n_rounds = 0  # since the number of threads changed
        self._wait = _FIRST_WAIT
        self._settled = True
        self._has_warned = False  # that nothing is done about contention
        # Decodes are compared with those of the same number of halvings.
        self._contention = {0: Contention(target_s)}

    @property
    def settled(self) -> bool:
        """True if all threads are in use and the costs are theirs."""
        return self._settled

    def watch(self, round: Round) -> None:
        """Take in a round after the first of a text, and change the threads if it says so."""
        if not self._watched:
            return
        self._n_rounds += 1
        is_contended = self._contention[self._n_halvings].add(round)
        if self._tried_from is not None:
            self._judge_try(round, self._tried_from)
        elif is_contended:
            self._slow_down(self._contention[self._n_halvings].times_slower)
        elif self._n_halvings and self._n_rounds >= self._wait:
            self._tried_from = self._n_halvings
            self._use(0)
        if not self._n_halvings and self._tried_from is None and self._n_rounds >= _N_SETTLED:
            self._settled = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the threads during the block."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    def hold(self) -> None:
        """Use all threads until ``release``."""
        self._n_held += 1
        self._has_warned = False
        self._tried_from = None
        if self._n_halvings:
            self._use(0)

    def release(self) -> None:
        """End a ``hold``."""
        self._n_held -= 1

    def _slow_down(self, times_slower: float) -> None:
        """Halve the threads, or say why not."""
        slower = f"decoding takes {times_slower:.0f} times as long as before"
        n = max(context.n_threads for context in self._contexts)
        if n > 1 and not self._n_held:
            threads = f"{n // 2} thread{'s' if n // 2 > 1 else ''}"
            log.warning("%s: other programs are using the CPU; continuing with %s", slower, threads)
            if not self._n_halvings:  # all threads did not last long, or did
                again = self._n_rounds < self._wait and not self._settled
                self._wait = min(2 * self._wait, _LONGEST_WAIT) if again else _FIRST_WAIT
            watched = self._contention[self._n_halvings]
            self._contention.setdefault(self._n_halvings + 1, watched.with_half_the_threads())
            self._use(self._n_halvings + 1)
        elif not self._has_warned:
            self._has_warned = True
            why = "there is 1 thread already" if n == 1 else f"an exact text keeps its {n} threads"
            log.warning("%s: other programs are using the CPU; %s", slower, why)

    def _judge_try(self, round: Round, before: int) -> None:
        """Go back to fewer threads if all of them are slower, or end the try."""
        if self._contention[before].times_the_fastest(round) > _WORSE:
            self._wait = min(2 * self._wait, _LONGEST_WAIT)
            self._tried_from = None
            self._use(before)
        elif self._n_rounds >= _N_TRIAL:
            self._tried_from = None
            log.info("other programs no longer slow decoding down; continuing with all threads")

    def _use(self, n_halvings: int) -> None:
        """Decode with all threads, halved this often, but with at least one."""
        for context, (n, n_batch) in zip(self._contexts, self._all, strict=True):
            context.use_threads(max(1, n >> n_halvings), max(1, n_batch >> n_halvings))
        self._n_halvings = n_halvings
        self._n_rounds = 0
        self._settled = False
