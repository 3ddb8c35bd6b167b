"""Other programs use the CPU: qdraft notices it and goes on with fewer threads."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
from fakes import make_round as make

from qdraft import DecodeParams, EngineParams, Pair, PairSpec, SamplingParams
from qdraft.session.contention import Contention


def test_three_slow_decodes_in_a_row() -> None:
    contention = Contention()
    assert not any(
        contention.add(make(0, 0, verify_s=s)) for s in (0.02, 0.021, 0.2, 0.2, 0.02, 0.2, 0.2)
    )
    assert contention.add(make(0, 0, verify_s=0.3))
    assert contention.times_slower == pytest.approx(15)
    assert not contention.add(make(0, 0, verify_s=0.3))  # it starts counting again


def test_widths_are_not_compared_with_one_another() -> None:
    contention = Contention()
    contention.add(make(0, 0, verify_s=0.02))
    assert not any(contention.add(make(8, 0, verify_s=0.5)) for _ in range(6))


def test_what_earlier_runs_took_counts() -> None:
    contention = Contention(0.02)
    assert [contention.add(make(0, 0, verify_s=0.5)) for _ in range(3)] == [False, False, True]


@pytest.mark.real
def test_the_threads_of_a_pair(
    smollm2: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The target's decodes stall: both contexts go on with half the threads, and so does the text."""
    monkeypatch.setattr(logging.getLogger("qdraft"), "propagate", True)
    with Pair(PairSpec.of(*smollm2, EngineParams(n_ctx=512, n_threads=2))) as pair:
        greedy, params = SamplingParams(temperature=0), DecodeParams(n_predict=40)
        calm = pair.generate("Count to twenty.", greedy, params).read()
        decode, n = pair.contexts.target.decode, 0

        def stalling(*args: object) -> None:
            nonlocal n
            n += 1
            if 6 <= n < 14:
                time.sleep(0.6)
            decode(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(pair.contexts.target, "decode", stalling)
        with caplog.at_level(logging.WARNING, logger="qdraft"):
            text = pair.generate("Count to twenty.", greedy, params).read()
        assert [context.n_threads for context in pair.contexts] == [1, 1]
        assert "continuing with 1 thread" in caplog.text
        assert text[:20] == calm[:20]
