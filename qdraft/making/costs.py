"""What a pair costs on this machine, measured on sequences that nothing else uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from qdraft.decoding.engine import TokenSequence

Clock = Callable[[], float]

WIDTHS = range(2, 10)  # rows of a verify batch: drafts of 1 to 8 tokens
N_PROMPT = 256  # tokens of the prompt that is timed
_REPEATS = 7
_DEPTH = 64  # tokens before the rows that are timed
_N_SINGLE = 20  # single tokens that are timed
_N_PROMPTS = 3


def measure_costs(
    target: TokenSequence, draft: TokenSequence, clock: Clock, v: dict[int, float] | None = None
) -> tuple[float, dict[int, float]]:
    """Measure c, and v by number of rows: medians of interleaved repeats.

    A known ``v`` is returned as it is, and only c is measured. The sequences end empty.
    """
    tokens = [i % target.vocab.n_tokens for i in range(1, _DEPTH + max(WIDTHS) + 1)]

    def seconds(engine: TokenSequence, n_rows: int) -> float:
        engine.truncate(_DEPTH)
        started = clock()
        engine.eval(tokens[_DEPTH : _DEPTH + n_rows], n_rows)
        return clock() - started

    for engine in (target, draft):
        engine.truncate(0)
        engine.eval(tokens[:_DEPTH], 0)
        seconds(engine, 1)  # the first decode also builds graphs
    wanted = [] if v else list(WIDTHS)
    draft_times: list[float] = []
    times: dict[int, list[float]] = {n: [] for n in (1, *wanted)}
    for _ in range(_REPEATS):
        draft_times.append(seconds(draft, 1))
        for n, measured in times.items():
            measured.append(seconds(target, n))
    for engine in (target, draft):
        engine.truncate(0)
    target_s = median(times[1])
    c = median(draft_times) / target_s
    return c, v or {n: median(times[n]) / target_s for n in wanted}


def seconds_of_one(engine: TokenSequence, clock: Clock) -> float:
    """Median seconds of one token after a text of ``_DEPTH`` tokens. The sequence ends empty."""
    engine.truncate(0)
    engine.eval(list(range(1, _DEPTH + 1)), 0)
    times = []
    for i in range(_N_SINGLE):
        started = clock()
        engine.eval([i + 1], 1)
        times.append(clock() - started)
    engine.truncate(0)
    return median(times)


def prompt_seconds(engine: TokenSequence, tokens: Sequence[int], clock: Clock) -> float:
    """Median seconds of reading a prompt of ``N_PROMPT`` tokens. The sequence ends empty.

    The prompt repeats ``tokens`` until it is long enough.
    """
    prompt = [tokens[i % len(tokens)] for i in range(N_PROMPT)]
    times = []
    for _ in range(_N_PROMPTS):
        engine.truncate(0)
        started = clock()
        engine.eval(prompt, 1)
        times.append(clock() - started)
    engine.truncate(0)
    return median(times)
