"""What a pair costs on this machine, measured on sequences that nothing else uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from qdraft.decoding.engine import TokenSequence
from qdraft.decoding.policy.model import Costs
from qdraft.decoding.rates import draft_cost, target_seconds, verify_costs
from qdraft.decoding.records import DecodeParams, Round, SamplingParams
from qdraft.errors import UsageError
from qdraft.llama.progress import Progress, no_progress
from qdraft.making.calibration import takes_a_chat
from qdraft.session.pair import Pair

Clock = Callable[[], float]

WIDTHS = range(2, 10)  # rows of a verify batch: drafts of 1 to 8 tokens
LENGTHS = range(1, 9)  # tokens of a draft
N_PROMPT = 256  # tokens of the prompt that is timed
_REPEATS = 7
_DEPTH = 64  # tokens before the rows that are timed
_N_SINGLE = 20  # single tokens that are timed
_N_PROMPTS = 3
_N_LIVE = 28  # tokens of each text of ``measure_live_costs``


def measure_costs(
    target: TokenSequence,
    draft: TokenSequence,
    clock: Clock,
    v: Mapping[int, float] | None = None,
) -> Costs:
    """Measure c, v by number of rows, and a target token: medians of interleaved repeats.

    A known ``v`` is returned as it is, and not measured. Both sequences end empty.
    """
    tokens = [i % target.vocab.n_tokens for i in range(1, _DEPTH + max(WIDTHS) + 1)]

    def seconds(sequence: TokenSequence, n_rows: int) -> float:
        sequence.truncate(_DEPTH)
        started = clock()
        sequence.eval(tokens[_DEPTH : _DEPTH + n_rows], n_rows)
        return clock() - started

    for sequence in (target, draft):
        sequence.truncate(0)
        sequence.eval(tokens[:_DEPTH], 0)
        sequence.checkpoint()
        seconds(sequence, 1)  # the first decode also builds graphs
    wanted = [] if v else list(WIDTHS)
    draft_times: list[float] = []
    times: dict[int, list[float]] = {n: [] for n in (1, *wanted)}
    for _ in range(_REPEATS):
        draft_times.append(seconds(draft, 1))
        for n, of_width in times.items():
            of_width.append(seconds(target, n))
    for sequence in (target, draft):
        sequence.truncate(0)
    target_s = median(times[1])
    return Costs(
        {"model": median(draft_times) / target_s},
        v or {n: median(times[n]) / target_s for n in wanted},
        target_s,
    )


def measure_token_seconds(sequence: TokenSequence, clock: Clock) -> float:
    """Median seconds of one token after a text of ``_DEPTH`` tokens. The sequence ends empty."""
    sequence.truncate(0)
    n_vocab = sequence.vocab.n_tokens
    sequence.eval([i % n_vocab for i in range(1, _DEPTH + 1)], 0)
    times = []
    for i in range(_N_SINGLE):
        started = clock()
        sequence.eval([(i + 1) % n_vocab], 1)
        times.append(clock() - started)
    sequence.truncate(0)
    return median(times)


def measure_prompt_seconds(sequence: TokenSequence, tokens: Sequence[int], clock: Clock) -> float:
    """Median seconds of reading a prompt of ``N_PROMPT`` tokens. The sequence ends empty.

    The prompt repeats ``tokens`` until it is long enough.
    """
    prompt = [tokens[i % len(tokens)] for i in range(N_PROMPT)]
    times = []
    for _ in range(_N_PROMPTS):
        sequence.truncate(0)
        started = clock()
        sequence.eval(prompt, 1)
        times.append(clock() - started)
    sequence.truncate(0)
    return median(times)


def measure_live_costs(
    pair: Pair, prompt: str, sampling: SamplingParams, progress: Progress = no_progress
) -> Costs:
    """Measure c and v as rounds have them: with sampling, the KV copy and the loop's own time.

    The pair generates texts after ``prompt`` with drafts of each length, and texts without a draft
    between them. Raises UsageError if the texts are too short.
    """
    raw = not takes_a_chat(pair, prompt)
    rounds: list[Round] = []
    for i, n_draft in enumerate(LENGTHS):
        for n in (0, n_draft):
            params = DecodeParams(n_predict=_N_LIVE, draft_policy="fixed", n_draft=n, seed=i)
            text = pair.generate(prompt, sampling, params, raw=raw)
            text.read()
            rounds += text.rounds[2:]
        progress("measuring costs", i + 1, len(LENGTHS))
    target_s = target_seconds(rounds)
    c, v = draft_cost(rounds, target_s), verify_costs(rounds, target_s)
    if c is None or not v:
        raise UsageError("the target's texts are too short to measure what a draft costs")
    return Costs({"model": c}, v)
