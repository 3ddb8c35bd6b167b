"""The two random choices that speculative decoding makes, behind one protocol.

Every random decision of a text goes through these two methods, so a test can put an enumerator in
their place and compute the exact law of the whole loop.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Rng(Protocol):
    """A source of random decisions."""

    def accept(self, probability: float) -> bool:
        """True with this probability, in [0, 1]."""
        ...

    def draw(self, weights: NDArray[np.float64]) -> int:
        """An index drawn in proportion to ``weights``, shape [n], not all zero."""
        ...


class SeededRng:
    """The generator of one text: numpy's PCG64 from one seed, 0 or more."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._generator = np.random.Generator(np.random.PCG64(self.seed))

    def accept(self, probability: float) -> bool:
        return bool(self._generator.random() < probability)

    def draw(self, weights: NDArray[np.float64]) -> int:
        cumulative = np.cumsum(weights)
        # side="right" never lands on an entry of weight zero; u is below 1, but
        # u * total may round up to total, so the last index is capped.
        index = int(np.searchsorted(cumulative, self._generator.random() * cumulative[-1], "right"))
        return index if index < len(weights) else int(np.flatnonzero(weights)[-1])
