"""Drafts from the text itself: what followed the last tokens when they stood there before."""

from __future__ import annotations

from collections.abc import Sequence

from qdraft.decoding.policy.schedule import Gate
from qdraft.decoding.records import Draft
from qdraft.decoding.rng import Rng
from qdraft.decoding.sampling import Sampler

_SIZES = (4, 3, 2)  # n-grams that are looked up, longest first
_LONGEST = 10  # tokens of a match that count for its confidence


class NgramDrafter:
    """Continues the newest earlier place that ends like the text does; needs no model.

    Prompt lookup decoding, Saxena 2023. The index grows with the text: each token is read once.
    The confidence of a match of n tokens is 1 - 2^-n; what it is worth the schedule learns.
    """

    source = "ngram"

    def __init__(self) -> None:
        self._following: dict[tuple[int, ...], int] = {}
        self._text: list[int] = []  # what the index holds

    def begin(self, prompt: Sequence[int]) -> None:
        if list(prompt[: len(self._text)]) != self._text:
            self._following.clear()
            self._text = []

    def draft(self, context: Sequence[int], gate: Gate, sampler: Sampler, rng: Rng) -> Draft:
        place = self._find(context)
        if place is None:
            return Draft()
        confidence = 1 - 0.5 ** _match_length(context, place)
        n = 0
        while gate.more(self.source) and gate.take(self.source, confidence):
            n += 1
        tokens = _after(context, place, n)
        if not n:
            return Draft()
        return Draft(tuple(tokens), None, self.source, (confidence,) * n, n_rows=n)

    def repetition(self, context: Sequence[int], n: int) -> list[int]:
        """The ``n`` tokens that would follow if the text repeated itself; none if it does not."""
        place = self._find(context)
        return [] if place is None else _after(context, place, n)

    def accept(self, n_accepted: int, context: Sequence[int]) -> None:
        pass

    def _read(self, context: Sequence[int]) -> None:
        """Index every n-gram that something follows; the newest place wins."""
        for end in range(max(1, len(self._text)), len(context)):
            for size in _SIZES:
                if end >= size:
                    self._following[tuple(context[end - size : end])] = end
        self._text += context[len(self._text) :]

    def _find(self, context: Sequence[int]) -> int | None:
        """The place after the newest occurrence of the longest known end of the text."""
        self._read(context)
        for size in _SIZES:
            place = self._following.get(tuple(context[-size:]))
            if place is not None:
                return place
        return None


def _after(context: Sequence[int], place: int, n: int) -> list[int]:
    """``n`` tokens from ``place`` on; a repetition may run on into what it gives."""
    text = list(context[place:])
    for i in range(n - len(text)):
        text.append(text[i])
    return text[:n]


def _match_length(context: Sequence[int], place: int) -> int:
    """How many tokens before ``place`` are equal to the last ones of the text."""
    n = 0
    while n < min(place, _LONGEST) and context[place - 1 - n] == context[-1 - n]:
        n += 1
    return n
