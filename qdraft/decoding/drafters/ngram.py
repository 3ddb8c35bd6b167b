"""Drafts from the text itself: what followed its last tokens when they occurred before."""

from __future__ import annotations

from collections.abc import Sequence

from qdraft.decoding.drafters.forced import offer_forced
from qdraft.decoding.drafters.protocol import Offers, Verified
from qdraft.decoding.policy.gate import Gate
from qdraft.decoding.records import Draft
from qdraft.decoding.rng import Rng
from qdraft.decoding.sampling import Sampler

_SIZES = (4, 3, 2)  # tokens of the n-grams in the index, longest first
_LONGEST = 10  # tokens of a match that count for its confidence


class NgramDrafter:
    """Continues from the newest earlier position at which the text read as it does now.

    Needs no model: prompt lookup decoding, Saxena 2023. The index grows with the text, so that it
    reads each token once. The confidence of a match of n tokens is 1 - 2^-n; the schedule learns
    what that is worth.
    """

    source = "ngram"

    def __init__(self) -> None:
        self._following: dict[tuple[int, ...], int] = {}
        self._text: list[int] = []  # the tokens that the index covers

    def begin(self, prompt: Sequence[int]) -> None:
        if list(prompt[: len(self._text)]) != self._text:
            self._following.clear()
            self._text = []

    def draft(self, context: Sequence[int], gate: Gate, sampler: Sampler, rng: Rng) -> Draft:
        position = self._find(context)
        if position is None:
            return Draft()
        confidence = 1 - 0.5 ** _match_length(context, position)
        n = 0
        while gate.more(self.source) and gate.take(self.source, confidence):
            n += 1
        tokens = _copy_from(context, position, n)
        if sampler.constraint is not None:
            tokens = tokens[: sampler.constraint.n_allowed(context, tokens)]
        if not tokens:
            return Draft()
        offers = Offers()
        for token in tokens:
            offers.add(token, None, confidence)
        offer_forced(offers, context, gate, sampler)
        return offers.as_draft(self.source, len(tokens), 0)

    def accept(self, verified: Verified) -> None:
        pass

    def _read(self, context: Sequence[int]) -> None:
        """Index every n-gram that something follows; the newest position wins."""
        for end in range(max(1, len(self._text)), len(context)):
            for size in _SIZES:
                if end >= size:
                    self._following[tuple(context[end - size : end])] = end
        self._text += context[len(self._text) :]

    def _find(self, context: Sequence[int]) -> int | None:
        """The position after the newest earlier occurrence of the longest known end of the text."""
        self._read(context)
        for size in _SIZES:
            position = self._following.get(tuple(context[-size:]))
            if position is not None:
                return position
        return None


def _copy_from(context: Sequence[int], position: int, n: int) -> list[int]:
    """``n`` tokens from ``position`` on; a repetition may run on into its own tokens."""
    text = list(context[position:])
    for i in range(n - len(text)):
        text.append(text[i])
    return text[:n]


def _match_length(context: Sequence[int], position: int) -> int:
    """How many tokens before ``position`` equal the last ones of the text, at most ``_LONGEST``."""
    n = 0
    while n < min(position, _LONGEST) and context[position - 1 - n] == context[-1 - n]:
        n += 1
    return n
