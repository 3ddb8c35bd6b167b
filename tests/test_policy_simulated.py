"""The draft policy on simulated pairs; benchmarks/simulate_policy.py has all seeds."""

from __future__ import annotations

import pytest
from simulated import LOSING, PAYING, STREAMED, SimulatedPair, score, worst_window, write_texts


@pytest.mark.parametrize("pair", PAYING, ids=lambda pair: pair.name)
@pytest.mark.parametrize(("n", "n_seeds"), [(64, 20), (256, 10)])
def test_a_draft_that_pays_off_is_not_left_alone(pair: SimulatedPair, n: int, n_seeds: int) -> None:
    """Short texts and long ones, each the first of its process."""
    result = score(pair, n, range(n_seeds), longest=6)
    assert result.speedup > 1.15
    assert result.mean > 0.93
    assert result.worst_tenth > 0.85


@pytest.mark.parametrize("pair", STREAMED, ids=lambda pair: pair.name)
def test_drafts_are_as_long_as_pays_off(pair: SimulatedPair) -> None:
    """A target that does not fit into memory: a pass costs the same whatever its width."""
    result = score(pair, 256, range(8), longest=30)
    assert result.best > 8
    assert result.mean > 0.93


@pytest.mark.parametrize("pair", LOSING, ids=lambda pair: pair.name)
def test_a_draft_that_does_not_pay_off_costs_little(pair: SimulatedPair) -> None:
    """Ten texts one after the other, whose times scatter as on a shared machine."""
    for seed in range(2):
        assert worst_window(write_texts(pair, seed)) < 1.05
