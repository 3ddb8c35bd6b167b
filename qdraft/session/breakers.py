"""The sequence breakers of DRY in a vocabulary, which is read once for each list of them."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from qdraft.decoding.dry import Breakers, find_breakers
from qdraft.decoding.records import SamplingParams
from qdraft.session.text import TextVocab

_KNOWN: WeakKeyDictionary[TextVocab, dict[tuple[str, ...], Breakers]] = WeakKeyDictionary()


def breakers_for(sampling: SamplingParams, vocab: TextVocab) -> Breakers | None:
    """Return the breakers that ``sampling`` asks for; None if it does not use DRY."""
    if not sampling.uses_dry:
        return None
    texts = sampling.dry_sequence_breakers
    known = _KNOWN.setdefault(vocab, {})
    if texts not in known:
        known[texts] = find_breakers(vocab, texts)
    return known[texts]
