"""Ratios of speeds over measured texts, and how certain they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

_N_DRAWS = 2000
FEWEST = 4  # texts that an interval needs


@dataclass(frozen=True, slots=True)
class TimedText:
    """A text's tokens and the seconds that they took."""

    n_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of two speeds with its 95 % interval; None if there are too few texts."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def even(self) -> bool:
        """True if the whole interval is within 3 % of 1: no difference that matters."""
        if self.low is None or self.high is None:
            return False
        return self.low > 0.97 and self.high < 1.03

    @property
    def decided(self) -> bool:
        """True if the interval is on one side of 1, or ``even``."""
        if self.low is None or self.high is None:
            return False
        return self.low > 1 or self.high < 1 or self.even


def speed(runs: Sequence[TimedText]) -> float | None:
    """Total tokens over total seconds; None without any."""
    seconds = sum(r.seconds for r in runs)
    return sum(r.n_tokens for r in runs) / seconds if seconds else None


def speed_ratio(
    ours: Sequence[TimedText], theirs: Sequence[TimedText], *, seed: int = 1
) -> Ratio | None:
    """``speed`` of ours over theirs, with a bootstrap interval over paired texts.

    ``ours[i]`` and ``theirs[i]`` come from the same prompt and the same minute, so the bootstrap
    draws pairs, not single texts. The interval is a t interval on the logarithm with the
    bootstrap's standard error, corrected for the number of pairs (Hesterberg 2015, "What Teachers
    Should Know About the Bootstrap", sections 3 and 4), because percentiles of few texts are far
    too narrow. Returns None if nothing ran.
    """
    if len(ours) != len(theirs):
        raise ValueError("texts come in pairs")
    our_speed, their_speed = speed(ours), speed(theirs)
    if not our_speed or not their_speed:
        return None
    value = our_speed / their_speed
    n = len(ours)
    if n < FEWEST:
        return Ratio(value)
    numbers = np.array(
        [[a.n_tokens, a.seconds, b.n_tokens, b.seconds] for a, b in zip(ours, theirs, strict=True)]
    )
    drawn = np.random.Generator(np.random.PCG64(seed)).integers(n, size=(_N_DRAWS, n))
    sums = numbers[drawn].sum(axis=1)
    if not sums.all():  # some draws hold only texts that ended with their first token
        return Ratio(value)
    logs = np.log(sums[:, 0] / sums[:, 1] / (sums[:, 2] / sums[:, 3]))
    error = float(logs.std()) * math.sqrt(n / (n - 1))
    factor = math.exp(t_quantile(n - 1) * error)
    return Ratio(value, value / factor, value * factor)


def t_quantile(degrees: int, p: float = 0.975) -> float:
    """Student's t by its expansion around the normal (Abramowitz and Stegun 26.7.5)."""
    z = NormalDist().inv_cdf(p)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return float(sum(term / degrees**i for i, term in enumerate(terms)))


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean and its standard error."""

    value: float
    error: float


def mean_of(values: Sequence[float] | np.ndarray) -> Mean:
    """Mean and standard error of independent values; error 0 for fewer than two."""
    x = np.asarray(values, dtype=np.float64)
    error = x.std(ddof=1) / np.sqrt(len(x)) if len(x) > 1 else 0.0
    return Mean(float(x.mean()), float(error))
