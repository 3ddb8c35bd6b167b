"""Intervals cover what they say, at the rate that they say."""

from __future__ import annotations

import numpy as np
import pytest

from qdraft.decoding.intervals import (
    FEWEST,
    Ratio,
    TimedText,
    mean_of,
    speed,
    speed_ratio,
    t_quantile,
)


def pairs(
    rng: np.random.Generator, n: int, true: float, noise: float
) -> tuple[list[TimedText], list[TimedText]]:
    """Texts of other lengths, in which a disturbance hits both contenders of a pair, and each."""
    ours, theirs = [], []
    for _ in range(n):
        together = rng.lognormal(0, 0.2)
        n_tokens = int(rng.integers(20, 80))
        ours.append(TimedText(n_tokens, n_tokens / true * together * rng.lognormal(0, noise)))
        theirs.append(TimedText(n_tokens, n_tokens * together * rng.lognormal(0, noise)))
    return ours, theirs


@pytest.mark.parametrize("n", [4, 6, 12, 24])
def test_intervals_cover_at_the_stated_rate(n: int) -> None:
    """95 %, within what 400 draws can tell; plain percentiles would cover 80 % of 4 texts."""
    rng = np.random.default_rng(n)
    held = 0
    for i in range(400):
        result = speed_ratio(*pairs(rng, n, 1.3, 0.08), seed=i)
        assert result is not None
        assert result.low is not None
        assert result.high is not None
        held += result.low <= 1.3 <= result.high
    assert 0.90 <= held / 400 <= 0.995


def test_a_noisy_baseline_widens_the_interval() -> None:
    def width(noise: float) -> float:
        widths = []
        for i in range(40):
            result = speed_ratio(*pairs(np.random.default_rng(i), 12, 1.3, noise))
            assert result is not None
            assert result.low is not None
            assert result.high is not None
            widths.append(result.high - result.low)
        return float(np.mean(widths))

    assert width(0.2) > 2.5 * width(0.05)


def test_total_over_total_not_the_mean_of_ratios() -> None:
    """A short lucky text does not outweigh a long one."""
    ours, theirs = (
        [TimedText(10, 1), TimedText(1000, 200)],
        [TimedText(10, 10), TimedText(1000, 200)],
    )
    result = speed_ratio(ours, theirs)
    assert result == Ratio(pytest.approx(210 / 201))
    assert speed(ours) == pytest.approx(1010 / 201)
    assert speed([]) is None
    assert speed_ratio([], []) is None


def test_few_texts_have_no_interval() -> None:
    runs = [TimedText(10, 1.0)] * (FEWEST - 1)
    result = speed_ratio(runs, runs)
    assert result is not None
    assert (result.low, result.high, result.decided) == (None, None, False)
    with pytest.raises(ValueError, match="pairs"):
        speed_ratio(runs, runs[1:])


def test_texts_that_end_with_their_first_token_have_no_interval() -> None:
    """Some draws then hold nothing but these: no logarithm, and no NaN in a report."""
    runs = [TimedText(20, 1.0), TimedText(30, 2.0), TimedText(0, 0.0), TimedText(25, 1.5)]
    result = speed_ratio(runs, runs)
    assert result is not None
    assert (result.value, result.low) == (1.0, None)


def test_decided() -> None:
    assert Ratio(1.2, 1.1, 1.3).decided
    assert Ratio(0.8, 0.7, 0.9).decided
    assert Ratio(1.0, 0.98, 1.02).decided  # no difference, and sure of it
    assert not Ratio(1.1, 0.9, 1.3).decided
    assert Ratio(1.01, 1.005, 1.015).even
    assert not Ratio(1.02, 1.0, 1.04).even


@pytest.mark.parametrize(("degrees", "t"), [(3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042)])
def test_students_t(degrees: int, t: float) -> None:
    """From the tables."""
    assert t_quantile(degrees) == pytest.approx(t, rel=0.003)


def test_the_standard_error_of_a_mean() -> None:
    result = mean_of([1.0, 2.0, 3.0, 4.0])
    assert (result.value, result.error) == (2.5, pytest.approx(1.2909944 / 2))
    assert mean_of([5.0]).error == 0
