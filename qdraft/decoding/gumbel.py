"""Gumbel noise by place: the randomness of a text that is the same whatever is drafted.

The largest of ln p(x) + G(x), with a Gumbel variable G(x) of its own for each token x, has the law
p. If target and draft take the same G for the same place of the text, each chooses by itself, and
they often choose alike. The target's choice depends on the seed and its own row alone, so no draft
can change the text: Daliri, Musco and Suresh 2024, "Coupling without Communication and
Drafter-Invariant Speculative Decoding" (arXiv:2408.07978), where this is Gumbel sampling.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class GumbelNoise:
    """The noise of one text. The token at ``place`` is the one that ``place`` tokens precede.

    The number of a token is an output of SplitMix64 (Steele, Lea and Flood 2014), whose stream
    depends on the seed and the place. So a token has the same noise among few candidates as among
    all of the vocabulary.
    """

    def __init__(self, seed: int) -> None:
        self._key = _mix(seed + _GAMMA)

    def at(self, place: int, tokens: NDArray[np.intp]) -> NDArray[np.float64]:
        """The noise of ``tokens``, shape [n], at a place: standard Gumbel numbers."""
        key = np.uint64(_mix(self._key + (place + 1) * _GAMMA & _MASK))
        bits = tokens.astype(np.uint64)
        bits += np.uint64(1)
        bits *= np.uint64(_GAMMA)
        bits += key
        for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
            bits ^= bits >> np.uint64(shift)
            bits *= np.uint64(multiplier)
        bits ^= bits >> np.uint64(31)
        uniform = ((bits >> np.uint64(11)) + 0.5) * 2.0**-53  # never 0 or 1
        noise: NDArray[np.float64] = -np.log(-np.log(uniform))
        return noise


def _mix(bits: int) -> int:
    """SplitMix64's function from its state to its output."""
    bits &= _MASK
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        bits = (bits ^ bits >> shift) * multiplier & _MASK
    return bits ^ bits >> 31
