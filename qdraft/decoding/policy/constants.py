"""Every tuned number of the draft policy, with the evidence for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PolicyConstants:
    """The tuned numbers of the draft policy.

    The comment of each says what it is, its unit and its evidence. "Log" is docs/log.md.
    "Simulation" is benchmarks/simulate_policy.py on 2026-11-30 with a part of its seeds and with
    other constants. It gives the speed of auto over the best fixed length, with the values here
    0.967 for short texts and 1.008 for long ones, and the most that 200 tokens of a pair that does
    not pay off took, 1.034. Differences below 0.010 are noise there.
    The most tokens of a draft is an option, not a constant: ``DecodeParams.most_drafted``.
    """

    # Costs (cost_table.py).

    # Ratios of a kind (c of a source, v of a width) that are remembered; their median counts.
    # Log 2026-11-29 (Xeon): chosen together with ``n_alone``. Simulation: 9 and 41 make no
    # difference.
    n_ratios: int = 21
    # Times of the target alone that are remembered; their median is one target token.
    # Simulation: 15 makes no difference, 3 raises the worst 200 tokens from 1.034 to 1.049.
    n_alone: int = 7
    # Measurements of a ratio before it is kept for the next run.
    # Not measured: chosen so that the median outlives one disturbed time.
    n_to_keep: int = 3
    # Share of the last slope of v that is believed beyond the widest known width.
    # Low, because a guess that is too high is never tried and so never corrected. Simulation: 0
    # costs drafts of many tokens 1.3 %, 1 makes no difference; without the costs of loading, 1
    # ended drafting on a jagged v.
    slope_beyond: float = 0.25
    # Widths up to this many times the widest measured one may be tried next.
    # Simulation: 1.5 and 4 make no difference. Not 4, because a kernel for wider batches may cost
    # far more.
    wider: float = 2.0
    # Rounds in which what a figure shows beyond the cheapest (v - 1, c) fades to half if it is not
    # measured again, and after which the time of a draft that follows a plain round counts.
    # Log 2026-11-30 (AVX2): a table from a busy hour kept a pair from drafting that ran at 1.2
    # times the target. Simulation: 64 costs long texts 1 % and raises the worst 200 tokens to
    # 1.042, 512 costs long texts 1.3 %.
    n_fresh: int = 192
    # The same for what a draft may lose, and for the last cost of a restart.
    # Not measured: chosen so that a row of 20 target tokens is not tried within 15,000 tokens.
    n_price_fresh: int = 8192
    # Rounds without a draft after which the next one is a restart: what it reads may have left
    # memory or a cache. Simulation: 2 makes no difference.
    n_pause: int = 8
    # Tokens that a drafter may read first while its time still counts as that of its rows.
    # Not measured: chosen so that the last tokens of a round (residual, bonus) count as free and a
    # part of the prompt does not.
    n_read_free: int = 3

    # Acceptance (acceptance_table.py).

    # Lower edges of the confidence bins, from 0 to 1; finer towards 1, where drafts are long.
    # Simulation: one edge at 0.5 costs drafts of many tokens 2 % and raises the worst 200 to 1.050.
    confidence_edges: tuple[float, ...] = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99)
    # Chance of acceptance that is believed of a source before any test.
    # docs/benchmark.md has alpha from 0.53 to 0.96. Simulation: 0.6 costs short texts 3 %, 0.9
    # costs them 2 %.
    acceptance_belief: float = 0.8
    # Tests that a belief is worth.
    # Simulation: 2 costs short texts 2 %, 10 raises the worst 200 tokens to 1.050.
    belief_weight: float = 5.0
    # Tests that a bin remembers; older ones fade.
    # Simulation: 20 and 200 make no difference.
    n_tests_remembered: float = 60.0
    # Tokens without a test in which all tests fade to half.
    # Simulation: 32 raises the worst 200 tokens to 1.045, 512 makes no difference.
    n_half_forgotten: float = 128.0
    # Weight of the tests of earlier texts in the next one.
    # Not measured: chosen so that ten tests outweigh an earlier text (tests/test_schedule.py).
    carried_over: float = 0.3

    # What drafting may lose (account.py).

    # What the account holds at first, in target tokens.
    # Simulation: 2 costs all texts 1 %; 8 makes no difference but loses more on a short text.
    first_balance: float = 4.5
    # The most that it holds after gains.
    # Simulation: 4.5 costs a little everywhere; 12 raises the worst 200 tokens to 1.041, and with
    # all seeds 8 did to 1.081.
    most_balance: float = 6.0
    # What each token of the text pays into it, in target tokens.
    # Simulation: 0.016 raises the worst 200 tokens to 1.058; 0.004 makes no difference there.
    income: float = 0.008
    # Share of the balance that one draft may lose.
    # Simulation: 0.3 and 1 cost short texts 1 %; with 0.5 of 3.5 a jagged v was left alone.
    stake: float = 0.6
    # Rounds that the current speed is taken from.
    # Simulation: 8 raises the worst 200 tokens to 1.040, 64 makes no difference.
    n_speed_rounds: int = 24

    # When to draft (gate.py and schedule.py).

    # Share of the tokens that measuring the target alone may cost.
    # Simulation: 0.03 costs short texts 3 %, 0.003 raises the worst 200 tokens to 1.059.
    measuring_share: float = 0.01
    # The least that a plain round is taken to cost, in tokens.
    # Simulation, pairs at break-even on a busy machine: 0.12 raises the worst 200 tokens to 1.081,
    # 0.05 to 1.060. 0.01 makes no difference.
    least_price: float = 0.03
    # Standard deviations of hope at a full account, for the first row of a draft.
    # Simulation: 0 and 2 make no difference, because its texts do not change their kind.
    hope: float = 1.0
    # Tokens within which drafting must win back the time to read the text first.
    # Not measured: chosen as the length of a usual answer.
    n_horizon: int = 256
    # Rounds from one plain round to the next under a fixed length; 0: none.
    # Not measured: 4 % of the rounds measure the target alone.
    plain_every: int = 24
    # ``p_min`` of the policy "confidence" if none is given.
    # Not measured: above it the draft's first choice is likelier than all others together.
    p_min: float = 0.5


CONSTANTS = PolicyConstants()
