"""Sessions kept from request to request: a turn of a conversation reads only what is new."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qdraft.decoding.engine import TokenSequence, n_common
from qdraft.decoding.records import MAX_N_DRAFT
from qdraft.session.pair import Pair
from qdraft.session.session import Session

# Cells that a round may fill beyond the text.
_AHEAD = MAX_N_DRAFT + 2


class KeptSessions:
    """Up to ``n_most`` sessions of a pair, each with the tokens of the last text that it wrote.

    They share the cells of the context, so those that were not used for longest go when a text
    needs room.
    """

    def __init__(self, pair: Pair, n_most: int) -> None:
        self._pair = pair
        # A check or a probe needs a sequence too, and models with a state have few.
        n_texts = min(context.n_texts for context in pair.contexts)
        self._n_most = max(1, min(n_most, n_texts - 1))
        self._sessions: list[Session] = []  # the last used last

    def choose(self, tokens: Sequence[int], *, reuse: bool = True) -> Session:
        """Return the session for a text after ``tokens``.

        It is the one with the longest common prefix if that is at least half of what the session
        holds: a shared system message alone is not worth another conversation. ``reuse`` False
        starts from empty cells.
        """
        session = self._most_alike(tokens) if reuse else None
        if session is None and len(self._sessions) >= self._n_most:
            session = self._sessions[0]
            if not reuse:
                self._close(session)
                session = None
        if session is None:
            session = self._pair.session()
        else:
            self._sessions.remove(session)
        self._sessions.append(session)
        return session

    def make_room(self, n_tokens: int) -> None:
        """Give cells back until the last chosen session has room for a round after ``n_tokens``."""
        while len(self._sessions) > 1 and self._is_short(n_tokens + _AHEAD):
            self._close(self._sessions[0])

    def close(self) -> None:
        """Give all cells back."""
        while self._sessions:
            self._close(self._sessions[-1])

    def _most_alike(self, tokens: Sequence[int]) -> Session | None:
        best, n_best = None, 0
        for session in self._sessions:
            held = session.sequences.target.tokens if session.sequences else ()
            n = n_common(held, tokens)
            if n > n_best and 2 * n >= len(held):
                best, n_best = session, n
        return best

    def _is_short(self, n_needed: int) -> bool:
        """Tell whether others hold the cells that a text needs, of the target or of the draft."""
        contexts = self._pair.contexts
        others = [each.sequences for each in self._sessions[:-1] if each.sequences]
        of_target: Iterator[TokenSequence] = (each.target for each in others)
        of_draft: Iterator[TokenSequence] = (each.draft for each in others if each.draft)
        for context, sequences in ((contexts.target, of_target), (contexts.draft, of_draft)):
            if context is None:
                continue
            n_held = sum(each.n_past for each in sequences)
            if n_held and min(n_needed, context.n_ctx) > context.n_ctx - n_held:
                return True
        return False

    def _close(self, session: Session) -> None:
        self._sessions.remove(session)
        session.close()
