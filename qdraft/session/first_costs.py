"""The costs of a pair before its first round, from a few decodes while it is loaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

from qdraft.decoding.engine import TokenSequence
from qdraft.decoding.policy.model import Costs

# Rows of the wide decode: enough to show whether v is flat, cheap enough where it is steep. For
# a target that streams, whose v is flat, wide enough for long drafts from the first round on.
_WIDE, _WIDE_STREAMED = 8, 32
# Trials at most, and the seconds after which no further one begins. The first trial brings weights
# and buffers into memory, so it counts only if it alone takes longer than a second one is worth.
# Not measured: chosen so that loading a model that fits in memory hardly takes longer.
_N_TRIALS = 4
_ENOUGH_S = 0.3
_LONG_S = 2.0

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class _Trial:
    """Seconds of a target row, of a wide decode, and of two draft rows one after the other."""

    alone_s: float
    wide_s: float
    first_row_s: float
    row_s: float


def measure_first_costs(
    target: TokenSequence,
    draft: TokenSequence,
    source: str,
    clock: Clock = time.perf_counter,
    *,
    streams: bool = False,
) -> Costs | None:
    """Decode a few tokens with both models; return c of ``source``, one v, and a restart.

    ``streams`` says that each pass over the target reads a part of it from the disk.

    Both sequences are empty, and empty again afterwards. The first draft row comes after decodes of
    the target, which may have thrown the draft's weights out of memory: it shows what a restart
    costs. Returns None if a context is too small for it.
    """
    n_wide = min(_WIDE_STREAMED if streams else _WIDE, target.n_ctx - 2)
    if n_wide < 2 or draft.n_ctx < 3:
        return None
    trials = list(_try(target, draft, n_wide, clock))
    counted = trials[1:] or trials
    target_s, wide_s, row_s = (
        median(getattr(trial, name) for trial in counted) for name in ("alone_s", "wide_s", "row_s")
    )
    if min(target_s, wide_s, row_s) <= 0:
        return None
    beyond_s = median(max(0.0, trial.first_row_s - trial.row_s) for trial in counted)
    c, v, restart = row_s / target_s, wide_s / target_s, beyond_s / target_s
    return Costs({source: c}, {n_wide: v}, target_s, {source: restart})


def _try(
    target: TokenSequence, draft: TokenSequence, n_wide: int, clock: Clock
) -> Iterator[_Trial]:
    def seconds(sequence: TokenSequence, tokens: list[int]) -> float:
        started = clock()
        sequence.eval(tokens, len(tokens))
        return clock() - started

    started = clock()
    for n_done in range(1, _N_TRIALS + 1):
        alone_s = seconds(target, [0])
        wide_s = seconds(target, [i % target.vocab.n_tokens for i in range(n_wide)])
        yield _Trial(alone_s, wide_s, seconds(draft, [0]), seconds(draft, [1]))
        for sequence in (target, draft):
            sequence.truncate(0)
        elapsed = clock() - started
        if elapsed > (_LONG_S if n_done == 1 else _ENOUGH_S):
            return
