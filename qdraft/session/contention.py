"""Contention: other programs use the CPU, so that decodes take many times as long as before.

Two threads of a decode that share one core wait for each other at every step. A token can then
take a hundred times as long, and fewer threads would be faster.
"""

from __future__ import annotations

from qdraft.decoding.records import Round

# A decode is slow if it takes this many times the fastest one of its width. Not measured: chosen
# between noise (docs/log.md: 30 to 45 ms within minutes) and the factor 100 of shared cores.
_SLOW = 8.0
# Slow decodes in a row that count as contention. Not measured: one or two may be an accident.
_N_IN_A_ROW = 3
# Tokens of text within which decodes are compared: attention takes longer the longer the text.
# Not measured.
_DEPTH = 1024


class Contention:
    """Watches the target's decodes while the number of threads stays the same."""

    def __init__(self, target_s: float | None = None) -> None:
        """``target_s`` is the time of one token in earlier runs, in seconds; None if unknown."""
        self._fastest: dict[tuple[int, int], float] = {}
        if target_s is not None:
            self._fastest[1, 0] = target_s
        self._n_slow = 0
        self.times_slower = 1.0  # how much slower the last reported decode was

    def add(self, round: Round) -> bool:
        """Take in a round after the first; return True if it is the third slow one in a row."""
        verify_s = round.times.verify_s
        fastest = self._fastest.setdefault(_kind(round), verify_s)
        self._fastest[_kind(round)] = min(fastest, verify_s)
        slower = self.times_the_fastest(round)
        self._n_slow = self._n_slow + 1 if slower > _SLOW else 0
        if self._n_slow < _N_IN_A_ROW:
            return False
        self._n_slow = 0
        self.times_slower = slower
        return True

    def times_the_fastest(self, round: Round) -> float:
        """How many times the fastest decode of its kind a round's took; 1 if none is known."""
        fastest = self._fastest.get(_kind(round), 0.0)
        return round.times.verify_s / fastest if fastest > 0 else 1.0

    def with_half_the_threads(self) -> Contention:
        """Watch decodes with half the threads, which may take twice as long as the fastest here."""
        half = Contention()
        half._fastest = {kind: 2 * fastest for kind, fastest in self._fastest.items()}
        return half


def _kind(round: Round) -> tuple[int, int]:
    """Which rounds have decodes that should take as long: of one width, in texts as long."""
    return round.n_rows, round.n_context // _DEPTH
