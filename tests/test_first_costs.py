"""The costs of a pair that loading measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from fakes import Clock, table_logits, vocab

from qdraft.session.first_costs import measure_first_costs
from qdraft.testing import FakeSequence


class Timed(FakeSequence):
    """A sequence whose evals take the time of ``cost``."""

    def __init__(self, clock: Clock, cost: Callable[[int], float], n_ctx: int = 64) -> None:
        super().__init__(table_logits(16, 7), vocab(16), n_ctx=n_ctx)
        self._clock, self._cost = clock, cost

    def eval(self, tokens: Sequence[int], logits: int) -> np.ndarray:
        self._clock.now += self._cost(len(tokens))
        return super().eval(tokens, logits)


def test_the_first_trial_warms_up() -> None:
    clock = Clock()
    target = Timed(clock, lambda n: (0.01 if clock.now > 0.5 else 0.4) * (1 + 0.1 * (n - 1)))
    draft = Timed(clock, lambda n: 0.002)
    costs = measure_first_costs(target, draft, "model", clock)
    assert costs is not None
    assert costs.target_s == pytest.approx(0.01)
    assert (costs.c["model"], costs.v[8]) == (pytest.approx(0.2), pytest.approx(1.7))
    assert costs.restart["model"] == pytest.approx(0)
    assert target.n_past == draft.n_past == 0


def test_a_draft_that_the_target_throws_out_of_memory() -> None:
    """Each first row after decodes of the target is read from the disk."""
    clock = Clock()
    last = [""]

    def target_cost(n: int) -> float:
        last[0] = "target"
        return 0.1

    def draft_cost(n: int) -> float:
        is_cold, last[0] = last[0] == "target", "draft"
        return 0.9 if is_cold else 0.01

    target, draft = Timed(clock, target_cost), Timed(clock, draft_cost)
    costs = measure_first_costs(target, draft, "model", clock)
    assert costs is not None
    assert costs.restart["model"] == pytest.approx(8.9)
    assert (costs.c["model"], costs.v[8]) == (pytest.approx(0.1), pytest.approx(1.0))


def test_a_target_that_takes_seconds_is_tried_once() -> None:
    clock = Clock()
    target, draft = Timed(clock, lambda n: 2.4), Timed(clock, lambda n: 0.05)
    costs = measure_first_costs(target, draft, "model", clock)
    assert costs is not None
    assert (costs.target_s, len(target.widths)) == (pytest.approx(2.4), 2)


def test_a_context_without_room() -> None:
    clock = Clock()
    small = Timed(clock, lambda n: 1.0, n_ctx=2)
    assert measure_first_costs(small, Timed(clock, lambda n: 1.0), "model", clock) is None
