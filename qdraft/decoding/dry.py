"""DRY, "don't repeat yourself": a penalty on tokens that would make a repetition longer.

By p-e-w, with sequence breakers by pi6am; llama.cpp's sampler is the reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from qdraft.decoding.records import SamplingParams

# The tokens that may follow a token so that both together hold a breaker; () if it holds one alone.
Breakers = Mapping[int, tuple[tuple[int, ...], ...]]

_LONGEST_BREAKER = 40  # bytes
_LONGEST_TAIL = 20  # tokens
_LARGEST = 88.7228391  # the logarithm of the largest float32


class BreakerVocab(Protocol):
    """A vocabulary that tells where sequence breakers are."""

    @property
    def n_tokens(self) -> int: ...

    def piece(self, token: int, *, special: bool = False) -> bytes: ...

    def tokenize(
        self, text: str, *, parse_special: bool = True, add_bos: bool = True
    ) -> list[int]: ...


def find_breakers(vocab: BreakerVocab, texts: Sequence[str]) -> Breakers:
    """Return the tokens that hold one of ``texts``, or its start, with the tokens after them.

    Reads the whole vocabulary.
    """
    breakers: dict[int, dict[tuple[int, ...], None]] = {}
    wanted = [text.encode()[:_LONGEST_BREAKER] for text in texts]
    for token in range(vocab.n_tokens):
        piece = vocab.piece(token, special=True)
        for breaker in wanted:
            for rest in _rests(piece, breaker):
                tail = vocab.tokenize(
                    rest.decode("utf-8", "replace"), parse_special=False, add_bos=False
                )
                breakers.setdefault(token, {})[tuple(tail[:_LONGEST_TAIL])] = None
    return {token: tuple(tails) for token, tails in breakers.items()}


def _rests(piece: bytes, breaker: bytes) -> Iterator[bytes]:
    """What must follow ``piece`` to complete ``breaker``: nothing if the piece holds it."""
    if breaker in piece:
        yield b""
        return
    for n in range(min(len(piece), len(breaker) - 1), 0, -1):
        if piece.endswith(breaker[:n]):
            yield breaker[n:]


def dry_penalties(
    tokens: Sequence[int], params: SamplingParams, breakers: Breakers
) -> dict[int, float]:
    """Return by how much to lower the logits of the tokens that would make a repetition longer.

    If the last n of ``tokens`` occurred before, and x came after them there, that is
    ``dry_multiplier * dry_base ** (n - dry_allowed_length)`` for x, with the longest such n from
    ``dry_allowed_length`` on. No repetition reaches back over a breaker.
    """
    newest_first = np.array(tokens[::-1], dtype=np.intp)
    n, allowed = len(newest_first), params.dry_allowed_length
    limit = _n_after_breaker(newest_first, breakers)
    if n <= allowed or limit < allowed:
        return {}
    lengths = _repeated_lengths(newest_first, limit)
    longest: dict[int, int] = {}
    for back in np.flatnonzero(lengths >= allowed):
        token = int(newest_first[back])  # what came after the earlier occurrence
        longest[token] = max(longest.get(token, 0), int(lengths[back]))
    most = int(_LARGEST / np.log(params.dry_base)) if params.dry_base > 1.000001 else n
    return {
        token: params.dry_multiplier * params.dry_base ** min(length - allowed, most)
        for token, length in longest.items()
        if () not in breakers.get(token, ())
    }


def _n_after_breaker(newest_first: NDArray[np.intp], breakers: Breakers) -> int:
    """How many tokens follow the last breaker."""
    for back, token in enumerate(newest_first.tolist()):
        matching = [
            len(tail)
            for tail in breakers.get(token, ())
            if len(tail) <= back
            and tail == tuple(newest_first[back - len(tail) : back][::-1].tolist())
        ]
        if matching:
            return back - max(matching)
    return len(newest_first)


def _repeated_lengths(newest_first: NDArray[np.intp], limit: int) -> NDArray[np.intp]:
    """How many tokens before each place equal those at the end of the text, at most ``limit``.

    Entry k, from 0 to n - 2, is for the tokens before the one that k tokens follow.
    """
    n = len(newest_first)
    lengths = np.zeros(n - 1, dtype=np.intp)
    alive = np.arange(1, n)  # where the earlier occurrence ends, counted from the end
    for length in range(limit):
        alive = alive[alive + length < n]
        alive = alive[newest_first[alive + length] == newest_first[length]]
        if not len(alive):
            break
        lengths[alive - 1] += 1
    return lengths
