"""Every tuned number of the draft policy, with the evidence for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PolicyConstants:
    """The tuned numbers of the draft policy.

    The comment of each says what it is, its unit and its evidence. "Log" is docs/log.md.
    "Simulation" is the run of 2026-11-30 in the log: the six pairs of tests/test_schedule.py with
    other constants, as speed over that with the value here. Differences below 3 % are noise there.
    The most tokens of a draft is an option, not a constant: ``DecodeParams.most_drafted``.
    """

    # Costs (cost_table.py).

    # Ratios of a kind (c of a source, v of a width) that are remembered; their median counts.
    # Log 2026-11-29 (Xeon): 31 instead of 15, with 9 instead of 5 times of the target alone, brings
    # a draft that pays off a little 1 to 3 % but costs 3.7 % over the worst 200 tokens of a steep
    # v; 21 and 7 keep both. Simulation: 9 and 41 make no difference.
    n_ratios: int = 21
    # Times of the target alone that are remembered; their median is one target token.
    # Log 2026-11-29 (Xeon): chosen together with ``n_ratios``. Simulation: 3 and 15 make none.
    n_alone: int = 7
    # Measurements of a ratio before it is kept for the next run.
    # Not measured: chosen so that the median outlives one disturbed time.
    n_to_keep: int = 3
    # Rows beyond the widest known width that may be tried next.
    # Simulation: 6 costs a flat pair 4 %; 1 makes no difference.
    n_wider: int = 3
    # Share of the last measured slope of v that is expected beyond the widest known width.
    # Low, because a guess that is too high is never tried and so never corrected. Simulation, a
    # jagged v: 1 costs 17 % and 0 costs 6 %.
    slope_beyond: float = 0.25
    # Rounds after which a width that was not measured is unknown again, and after which the time
    # of a draft that follows a plain round counts. Log 2026-11-30 (AVX2): a table from a busy hour
    # kept a pair from drafting that ran at 1.2 times the target. Simulation: 64 and 512 make no
    # difference, because its machine does not change.
    n_fresh: int = 192
    # The same for a width that an earlier run kept, counted from the first round of this run.
    # Not measured: a quarter of ``n_fresh``, because another hour is less like this one.
    n_fresh_kept: int = 48
    # Tokens that a drafter may read first while its time still counts as that of its rows.
    # Not measured: chosen so that the last tokens of a round (residual, bonus) count as free and a
    # part of the prompt does not.
    n_read_free: int = 3

    # Acceptance (acceptance_table.py).

    # Lower edges of the confidence bins, from 0 to 1; finer towards 1, where drafts are long.
    # Simulation, a flat v and a good draft: one edge at 0.5, or one at every tenth, costs 4 %.
    confidence_edges: tuple[float, ...] = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99)
    # Chance of acceptance that is believed of a source before any test.
    # docs/benchmark.md has alpha from 0.53 to 0.96. Simulation: 0.4 and 0.9 make no difference.
    acceptance_belief: float = 0.7
    # Tests that a belief is worth. Simulation, a flat v and a good draft: 10 costs 4 %, 1 nothing.
    belief_weight: float = 3.0
    # Tests that a bin remembers; older ones fade.
    # Simulation, a flat v and a good draft: 20 costs 5 %; 200 makes no difference.
    n_tests_remembered: float = 60.0
    # Weight of the tests of earlier texts in the next one.
    # Not measured: chosen so that ten tests outweigh an earlier text (tests/test_schedule.py).
    carried_over: float = 0.3

    # What drafting may lose (loss_budget.py).

    # Target tokens per emitted token: what a plain token pays back, and how fast the limit grows.
    # Simulation: ten short texts of the worst pair lose 0.2 % at 0.004, 0.9 % here, 1.7 % at 0.0125
    # and 2.4 % at 0.016; 0.004 costs a jagged v 7 % of its speed.
    max_loss: float = 0.008
    # The limit at first, in target tokens. Simulation: 0.5 and 1.6 make no difference.
    first_limit: float = 1.0
    # Tokens over which the limit grows: it ends at ``max_loss`` times this, 1.6 target tokens.
    # Not measured: the length of the windows that the bound is stated for.
    n_window: int = 200
    # The most that gains count for, in target tokens.
    # Log 2026-11-29 (Xeon): 10 were lost again on the next text, 6 % of 200 tokens. Simulation:
    # 0 costs 5 to 11 % wherever drafting pays off, 2 costs a jagged v 6 %.
    most_saved: float = 5.0
    # Target tokens beyond the limit that still count; more is forgiven, so that one long rejected
    # draft does not stop drafting. Simulation: ten short texts of the worst pair lose 2.0 % at 0.5,
    # 0.9 % here and 0.7 % at 2.
    most_over: float = 1.0
    # Rounds that the current speed is taken from. Rounds of any kind, because a speed of drafted
    # rounds only stopped drafting for good after one lucky round (log 2026-11-29, EPYC).
    # Simulation: 8 costs a jagged v 8 %; 64 makes no difference.
    n_speed_rounds: int = 24

    # When to draft (gate.py and schedule.py).

    # Rounds from one plain round to the next: they measure the target alone.
    # Simulation, a flat v and a good draft: 12 costs 7 %; 64 makes no difference, but its machine
    # does not change as one with other tenants does (log 2026-11-29, EPYC).
    plain_every: int = 24
    # Share of a fully rejected draft that the budget must afford before drafting has gained.
    # Simulation: 0.25 and 1 make no difference.
    worst_case_share: float = 0.5
    # Standard deviations of hope at an untouched budget, for the first token of a draft.
    # Simulation, a jagged v: 0 costs 4 %; 2 makes no difference.
    hope: float = 1.0
    # Tokens within which drafting must win back the time to read the text first.
    # Not measured: chosen as the length of a usual answer.
    n_horizon: int = 256
    # Tokens without a draft before the first probe; a probe that does not pay off doubles the wait.
    # Simulation: ten short texts of the worst pair lose 1.0 % at 16, 0.9 % here and nothing at 64;
    # 64 costs a jagged v 3 %.
    first_wait: int = 32
    # The longest wait for a probe, in tokens.
    # Not measured: chosen so that probes cost less than 0.5 %. Simulation: 128 and 2048 make no
    # difference, because its texts have 600 tokens.
    longest_wait: int = 512
    # ``p_min`` of the policy "confidence" if none is given.
    # Not measured: above it the draft's first choice is likelier than all others together.
    p_min: float = 0.5


CONSTANTS = PolicyConstants()
