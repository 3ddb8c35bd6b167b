"""Counts, rates and the conclusion, from rounds whose figures are known."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import PROMPT_ROUND as PROMPT
from fakes import engine, model_drafter, run
from fakes import make_round as make

from qdraft.decoding.policy.cost_table import CostTable
from qdraft.decoding.policy.model import Costs, break_even_alpha, expected_tokens, speedup
from qdraft.decoding.summary import summarize


def test_alpha_is_per_tested_token_and_draft_yield_is_not() -> None:
    """At a true rate of .8 and 5 drafts, accepted / drafted reads .538; alpha reads .8."""
    rng = np.random.default_rng(0)
    rounds = [PROMPT]
    for _ in range(20000):
        hits = rng.random(5) < 0.8
        rounds.append(make(5, int(np.argmin(hits)) if not hits.all() else 5))
    summary = summarize(rounds)
    assert summary.alpha == pytest.approx(0.8, abs=0.01)
    assert summary.draft_yield == pytest.approx(0.538, abs=0.01)
    assert summary.tau == pytest.approx(expected_tokens(0.8, 5), abs=0.03)


def test_the_clock_and_the_tokens_cover_the_same_interval() -> None:
    summary = summarize([PROMPT, make(0, 0), make(4, 4, draft_s=1.0, verify_s=2.0)], ttft_s=9.5)
    assert summary.n_tokens == 7
    assert summary.tokens_per_second == pytest.approx(6 / 4)
    assert summary.target_tokens_per_second == pytest.approx(1.0)
    assert summary.speedup == pytest.approx(1.5)
    assert summary.c == pytest.approx(0.25)
    assert summary.v == {5: 2.0}
    assert summary.accepted_histogram == (0, 0, 0, 0, 1)
    assert (summary.prompt_s, summary.ttft_s) == (9.0, 9.5)
    won = summarize([PROMPT, make(0, 0)] + [make(4, 4, draft_s=1.0, verify_s=2.0)] * 4)
    assert won.conclusion == "1.62 times the target alone (1.0 t/s)"


def test_a_losing_draft_is_named_with_what_would_have_to_change() -> None:
    """A text that is slower than the target alone says so.

    https://github.com/ggml-org/llama.cpp/issues/10594
    https://github.com/ggml-org/llama.cpp/issues/10664
    """
    lost = (
        [PROMPT, make(0, 0)]
        + [make(2, 0, draft_s=0.5, verify_s=1.5)] * 4
        + [make(2, 2, draft_s=0.5, verify_s=1.5)]
    )
    conclusion = summarize(lost).conclusion
    assert conclusion is not None
    assert conclusion.startswith("0.73 times the target alone (1.0 t/s): a draft token costs 0.25")
    assert "n_draft 2 pays off from alpha 0.62, here it is 0.33" in conclusion
    hopeless = summarize(
        [PROMPT, make(0, 0)] + [make(2, 0, draft_s=2.0, verify_s=3.0)] * 4
    ).conclusion
    assert hopeless is not None
    assert "no acceptance rate would pay off" in hopeless


def test_the_baseline_is_the_targets_time_alone() -> None:
    """A drafter that ran and offered nothing costs time, which is not the target's."""
    barren = make(0, 0, draft_s=0.5, n_draft_rows=1)
    summary = summarize([PROMPT, barren, barren, make(2, 2, draft_s=1.0, verify_s=2.0)])
    assert summary.target_tokens_per_second == pytest.approx(1.0)
    assert summary.c == pytest.approx(0.5)


def test_both_sides_of_the_speedup_are_totals_and_disturbances_count_twice_at_most() -> None:
    """A median against a mean reads a loss where there is none: plain rounds of 1, 1 and 1.6."""
    plain = [make(0, 0), make(0, 0), make(0, 0, verify_s=1.6)]
    drafted = [make(1, 0, draft_s=0, verify_s=s) for s in (1.0, 1.0, 1.6)] * 3
    same = summarize([PROMPT, *plain, *drafted])
    assert same.speedup == pytest.approx(1.0)
    assert same.target_tokens_per_second == pytest.approx(3 / 3.6)
    spiked = [*plain[:2], make(0, 0, verify_s=50.0)]
    assert summarize([PROMPT, *spiked, *drafted]).speedup == pytest.approx(12 / 14.8 * 4 / 3)


def test_reading_the_prompt_is_no_part_of_c() -> None:
    read = make(2, 2, draft_s=50.0, n_caught_up=200)
    assert summarize([PROMPT, make(0, 0), read]).c is None
    rounds = [PROMPT, make(0, 0), read, make(2, 2, draft_s=1.0)]
    assert summarize(rounds).c == pytest.approx(0.5)


def test_a_schedule_that_does_not_draft_says_why() -> None:
    """If qdraft does not draft, it says why.

    https://github.com/ggml-org/llama.cpp/issues/10594
    https://github.com/ggml-org/llama.cpp/pull/24922
    """
    costs = CostTable(Costs({"model": 0.25}, {3: 1.5}, 0.1))
    alone = [PROMPT, *[make(0, 0)] * 20]
    assert summarize(alone, None, costs, "model").conclusion == (
        "drafting does not pay off here: a draft token costs 0.25 target tokens, "
        "3 rows cost 1.50; n_draft 2 pays off from alpha 0.62"
    )
    tried = [*alone, make(2, 0, draft_s=0.5, verify_s=1.5)]
    conclusion = summarize(tried, None, costs, "model").conclusion
    assert conclusion is not None
    assert conclusion.endswith("pays off from alpha 0.62, here it is 0.00")
    # One lucky draft is above that rate, and no reason.
    lucky = summarize([*alone, make(2, 2, draft_s=0.5, verify_s=1.5)], None, costs, "model")
    assert lucky.conclusion is not None
    assert lucky.conclusion.endswith("pays off from alpha 0.62")
    assert summarize(alone).conclusion is None  # nothing was to be drafted


def test_a_text_that_always_drafts_is_compared_with_what_loading_has_measured() -> None:
    costs = CostTable()
    costs.start(Costs({"model": 0.25}, {8: 1.7}, 1.0))
    rounds = [PROMPT, *[make(2, 2, draft_s=0.5, verify_s=1.0)] * 20]
    summary = summarize(rounds, None, costs, "model")
    assert summary.speedup == pytest.approx(2.0)
    assert summary.target_tokens_per_second == pytest.approx(1.0)
    assert summarize(rounds, None, None, "model").speedup is None


def test_too_short_to_compare() -> None:
    few = [PROMPT, make(0, 0), *[make(2, 0, draft_s=9.0)] * 3]
    too_short = "this text is too short to compare with the target alone"
    assert summarize(few).conclusion == too_short
    assert summarize([PROMPT, make(2, 1)]).conclusion == too_short
    assert summarize([PROMPT]).conclusion is None
    assert summarize([]).tokens_per_second is None


def test_the_loop_measures_the_target_alone() -> None:
    """A text of ordinary length always has its baseline.

    https://github.com/ggml-org/llama.cpp/issues/10664
    """
    summary = summarize(list(run(engine(), model_drafter(), plain_every=32)))
    assert summary.target_tokens_per_second is not None
    assert summary.speedup is not None
    assert summary.n_tokens == sum(summary.accepted_histogram) + summary.n_accepted + (
        summary.n_rounds - sum(summary.accepted_histogram)
    )


def test_cost_model() -> None:
    assert expected_tokens(0.5, 2) == 1.75
    assert expected_tokens(1.0, 3) == 4
    assert speedup(0.5, 2, c=0.25, v=1.25) == 1.0
    assert break_even_alpha(2, c=0.25, v=1.25) == pytest.approx(0.5)
    assert break_even_alpha(1, c=1.0, v=1.5) is None


def test_each_source_is_counted_by_itself() -> None:
    rounds = [PROMPT, make(0, 0)] + [make(2, 2, draft_s=1.0)] * 4
    rounds += [make(4, 1, source="ngram", draft_s=0.0)] * 3
    summary = summarize(rounds, source="model")
    assert summary.sources == {
        "model": {"n_drafted": 8, "n_tested": 8, "n_accepted": 8},
        "ngram": {"n_drafted": 12, "n_tested": 6, "n_accepted": 3},
    }
    assert summary.c == pytest.approx(0.5)
    assert summarize(rounds, source="ngram").c == 0


def test_the_predicted_speedup_is_the_cost_models() -> None:
    alone = make(0, 0)
    rounds = [PROMPT, alone, alone] + [make(3, 2, draft_s=0.9, verify_s=1.5)] * 10
    summary = summarize(rounds)
    assert summary.alpha == pytest.approx(2 / 3)
    tokens = 2 + 10 * expected_tokens(2 / 3, 3)
    assert summary.predicted_speedup == pytest.approx(tokens / (2 + 10 * (3 * 0.3 + 1.5)))
    # a table of earlier runs stands in where this text has no round without a draft
    costs = CostTable(Costs({"model": 0.3}, {4: 1.5}, 1.0))
    filled = summarize([PROMPT, *rounds[3:]], costs=costs, source="model")
    assert filled.predicted_speedup == pytest.approx(expected_tokens(2 / 3, 3) / 2.4)
    assert summarize([PROMPT, alone]).predicted_speedup is None


def test_a_disturbed_machine_is_seen_in_the_spread() -> None:
    calm = [make(0, 0)] * 10 + [make(4, 4, verify_s=2.0)] * 10
    assert summarize([PROMPT, *calm]).spread == pytest.approx(1.0)
    disturbed = calm[:-2] + [make(4, 4, verify_s=9.0)] * 2 + [make(0, 0, verify_s=4.0)]
    spread = summarize([PROMPT, *disturbed]).spread
    assert spread is not None
    assert spread > 2
    assert summarize([PROMPT, *calm[:5]]).spread is None


def test_a_text_that_runs_in_circles_is_named() -> None:
    """A text that repeats itself makes any draft look good.

    https://github.com/kekzl/imp/pull/1521
    """
    rng = np.random.default_rng(1)
    fresh = [make(0, 0, tokens=(int(t),)) for t in rng.integers(1000, size=200)]
    assert summarize([PROMPT, *fresh]).repetition == pytest.approx(0, abs=0.02)
    circles = fresh[:20] * 10
    repetition = summarize([PROMPT, *circles]).repetition
    assert repetition is not None
    assert repetition > 0.8
    assert summarize([PROMPT, *fresh[:20]]).repetition is None
