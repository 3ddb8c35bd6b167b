"""When decodes take many times as long as they did: somebody else uses the processor.

Two threads of a decode that have to share a core wait for each other at every step: a token can
take a hundred times as long, and fewer threads are then faster.
"""

from __future__ import annotations

from qdraft.decoding.records import Round

_MANY = 8.0  # times the least that a decode of the same width ever took
_IN_A_ROW = 3
_DEPTH = 1024  # tokens of text within which decodes are compared


class Contention:
    """Watches the target's decodes of one number of threads."""

    def __init__(self, target_s: float | None = None) -> None:
        """``target_s`` are the seconds of one token in earlier runs, where that is known."""
        self._least: dict[tuple[int, int], float] = {}
        if target_s is not None:
            self._least[1, 0] = target_s
        self._n_slow = 0
        self.times_slower = 1.0

    def add(self, round: Round) -> bool:
        """Take in a round (not the prompt's). True when it is the third slow one in a row."""
        # Attention takes longer the longer the text: only what is alike is compared.
        like = (round.n_draft + 1, round.n_context // _DEPTH)
        least = self._least.setdefault(like, round.times.verify_s)
        self._least[like] = min(least, round.times.verify_s)
        slower = round.times.verify_s / least if least > 0 else 1.0
        self._n_slow = self._n_slow + 1 if slower > _MANY else 0
        if self._n_slow < _IN_A_ROW:
            return False
        self._n_slow = 0
        self.times_slower = slower
        return True
