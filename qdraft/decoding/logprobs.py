"""How likely emitted tokens were, by the target's own rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The natural logarithms of the probabilities of a token, and of the likeliest ones.

    They are those of the target's row as the model gave it, at temperature 1: before bias,
    penalties, truncation and temperature, as llama-server and OpenAI's API report them. ``top`` has
    the likeliest tokens, the likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


def logprobs_of(row: NDArray[np.float32], token: int, n_top: int) -> Logprobs:
    """Return the log-probabilities of ``token`` and of the ``n_top`` likeliest tokens of a row.

    ``row`` has the shape [n_vocab] and may hold -inf, but no NaN.
    """
    highest = row.max()
    total = float(highest + np.log(np.exp(row - highest, dtype=np.float64).sum()))
    n_top = min(n_top, len(row))
    likeliest = np.argpartition(row, -n_top)[-n_top:]
    likeliest = likeliest[np.argsort(-row[likeliest], kind="stable")]
    top = tuple((int(each), float(row[each]) - total) for each in likeliest)
    return Logprobs(float(row[token]) - total, top)
