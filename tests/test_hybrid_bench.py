"""The arithmetic of the benchmark of hybrid models."""

from __future__ import annotations

import pytest
from fakes import Clock, engine
from hybrid import WANTED, Repeater, Series, Timed, Wrong, find_bars, table

from qdraft.decoding.records import Draft


def series(accepted: bool, overhead: float, n_accepted: int = 0) -> Series:
    rounds = [Timed(overhead * s, s, 4, n_accepted, 2, 5) for s in (1.0, 2.0, 3.0)]
    return Series("m", accepted, (*rounds, Timed(90.0, 1.0, 4, n_accepted, 2, 5)))


def test_bars_are_those_of_the_worst_model() -> None:
    """A round that something else disturbed does not count, and a rejection is no yield."""
    both = [series(True, 1.01, 4), series(False, 1.02), series(True, 1.04, 3), series(False, 1.2)]
    bars = find_bars(both)
    assert bars == {
        "accepted_overhead": pytest.approx(1.04),
        "rejected_overhead": pytest.approx(1.2),
        "draft_yield": 0.75,
    }
    assert bars.keys() == WANTED.keys()
    assert "| m | rejected | 1.200 | 2.0 | 0.000 |" in table(both, bars)
    assert "| draft_yield | 0.750 | >= 0.95 |" in table(both, bars)


def test_decodes_are_repeated_with_their_widths_on_texts_that_go_on() -> None:
    sequences = engine(), engine()
    repeater = Repeater(sequences, [1, 2, 3, 4])
    clock = Clock()
    decodes = [(1, 2, 1), (1, 1, 1), (0, 3, 3)]
    repeater.seconds(decodes, clock)
    repeater.seconds(decodes, clock)
    assert sequences[0].widths == [4, 3, 3]
    assert sequences[1].widths == [4, 2, 1, 2, 1]
    for _ in range(200):  # until the texts are long, and start anew
        repeater.seconds(decodes, clock)
    assert sequences[0].widths.count(4) == 3


def test_wrong_tokens_are_never_the_drafted_ones() -> None:
    class Fixed:
        def draft(self, *_arguments: object) -> Draft:
            return Draft((3, 9), None, "model", (1.0, 1.0), 2)

    draft = Wrong(Fixed(), 10).draft()  # type: ignore[arg-type]
    assert (draft.tokens, draft.n_rows, draft.probs) == ((4, 0), 2, None)
