"""Every tuned number of the draft policy, with the evidence for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PolicyConstants:
    """The tuned numbers of the draft policy.

    The comment of each gives its unit and its evidence. "Log" is docs/log.md, "simulation" is
    tests/test_schedule.py: the real loop, fake models and a simulated clock. "Not measured" means
    that no run compared the value with others. The most tokens of a draft is an option, not a
    constant: ``DecodeParams.most_drafted``.
    """

    # Costs (cost_table.py).

    # Ratios of a kind (c of a source, v of a width) that are remembered; their median counts.
    # Simulation, log 2026-11-29 (Xeon): 31, with 9 times of the target alone, brings a draft that
    # pays a little 1 to 3 % but costs 3.7 % over the worst 200 tokens of a steep v. 15 was lower.
    n_ratios: int = 21
    # Times of the target alone that are remembered; their median is one target token.
    # Tried together with ``n_ratios``: 5, 7 and 9.
    n_alone: int = 7
    # Measurements of a ratio before it is kept for the next run.
    # Not measured: chosen so that the median outlives one disturbed time.
    n_to_keep: int = 3
    # Rows beyond the widest known width that may be tried next.
    # Not measured: chosen so that a jagged v is looked over step by step.
    n_wider: int = 3
    # Share of the last measured slope of v that is expected beyond the widest known width.
    # Not measured: chosen low, because v is steepest at its first step and a guess that is too
    # high is never tried, so never corrected.
    slope_beyond: float = 0.25
    # Rounds after which a width that was not measured is unknown again, and after which the time
    # of a draft that follows a plain round counts. Log 2026-11-30 (AVX2): a table from a busy hour
    # kept a pair from drafting that ran at 1.2 times the target. The value itself is not measured.
    n_fresh: int = 192
    # The same for a width that an earlier run kept, counted from the first round of this run.
    # Not measured: a quarter of ``n_fresh``, because another hour is less like this one.
    n_fresh_kept: int = 48
    # Tokens that a drafter may read first and its time still be that of its rows.
    # Not measured: chosen so that the tokens of the last round (residual, bonus) count as cheap
    # and a part of the prompt does not.
    n_read_free: int = 3

    # Acceptance (acceptance_table.py).

    # Lower edges of the confidence bins, from 0 to 1; finer towards 1, where drafts are long.
    # Not measured.
    confidence_edges: tuple[float, ...] = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99)
    # Chance of acceptance that is believed of a source before any test. Not measured by itself;
    # docs/benchmark.md has alpha from 0.53 to 0.96 for its pairs.
    acceptance_belief: float = 0.7
    # Tests that a belief counts as.
    # Not measured: chosen so that a few tests outweigh it.
    belief_weight: float = 3.0
    # Tests that a bin remembers; older ones fade.
    # Simulation of a draft that turns bad and one that turns good: 200 was too slow.
    n_tests_remembered: float = 60.0
    # Weight of the tests of earlier texts in the next one.
    # Not measured: chosen so that ten tests outweigh an earlier text (test_schedule.py).
    carried_over: float = 0.3

    # What drafting may lose (loss_budget.py).

    # Target tokens per emitted token: what a plain token pays back, and how fast the limit grows.
    # Simulation: 0.0125 and 0.015 were above 3 % over the worst 200 tokens of some pairs.
    max_loss: float = 0.008
    # The limit at first, in target tokens.
    # Simulation: less does not pay for the first drafts of a pair, from which the costs are known.
    first_limit: float = 1.0
    # Tokens over which the limit grows: it ends at ``max_loss`` times this, 1.6 target tokens.
    # Not measured: the length of the windows that the bound is stated for.
    n_window: int = 200
    # The most that gains count for, in target tokens.
    # Log 2026-11-29 (Xeon): 10 were lost on the next text that did not pay, 6 % of 200 tokens;
    # with 5 nothing that pays got slower. With 0 two unlucky rounds ended a good draft (log
    # 2026-11-29, EPYC).
    most_saved: float = 5.0
    # Target tokens beyond the limit that still count; more is forgiven.
    # Simulation: 0.5 and 1 were tried. Without a cap one long rejected draft ends drafting.
    most_over: float = 1.0
    # Rounds that the current speed is taken from.
    # The number is not measured. Rounds of any kind, because a speed of drafted rounds only
    # stopped drafting for good after one lucky round (log 2026-11-29, EPYC).
    n_speed_rounds: int = 24
    # Rounds of a source before its own speed is believed.
    # Not measured: chosen so that one unlucky round does not decide between sources.
    n_tried: int = 4
    # Rounds without a source after which its speed is unknown again.
    # Not measured: four times ``n_speed_rounds``.
    n_stale: int = 96

    # When to draft (gate.py and schedule.py).

    # Rounds from one plain round to the next: they measure the target alone.
    # Not measured by itself; 64 before. It costs one round in 24 its gain.
    plain_every: int = 24
    # Share of a fully rejected draft that the budget must afford before drafting has gained.
    # Not measured: 1 would allow no draft of two tokens at a limit of 1 target token.
    worst_case_share: float = 0.5
    # Standard deviations of hope at an untouched budget, for the first token of a draft.
    # Not measured: one, so that an unlucky start does not end a good draft. Log 2026-11-29 (Xeon):
    # two in the choice between sources did not help.
    hope: float = 1.0
    # Tokens within which drafting must win back the time to read the text first.
    # Not measured: chosen as the length of a usual answer.
    n_horizon: int = 256
    # Tokens without a draft before the first probe; a probe that does not pay doubles the wait.
    # Not measured: a probe loses 1 to 2 target tokens, 3 to 6 % of the first 32.
    first_wait: int = 32
    # The longest wait for a probe, in tokens.
    # Not measured: chosen so that probes cost less than 0.5 % in the end.
    longest_wait: int = 512
    # ``p_min`` of the policy "confidence" if none is given.
    # Not measured: above it the draft's first choice is likelier than all others together.
    p_min: float = 0.5


CONSTANTS = PolicyConstants()
