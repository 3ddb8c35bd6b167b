"""A pair on real work: the target alone against qdraft, interleaved, by kind and temperature."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from qdraft.decoding.intervals import TimedText
from qdraft.decoding.rates import Counts, by_place, count
from qdraft.decoding.records import DecodeParams, SamplingParams
from qdraft.llama.progress import Progress
from qdraft.making.calibration import takes_a_chat
from qdraft.session.generation import Generation
from qdraft.session.pair import Pair
from qdraft.study.prompts import WARM_UP, Task

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Written:
    """One text by one contender. ``n_tokens`` and ``seconds`` are those after the first token."""

    n_tokens: int
    seconds: float
    ttft_s: float

    @property
    def run(self) -> TimedText:
        return TimedText(self.n_tokens, self.seconds)


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt at one temperature, written by the target alone and by qdraft.

    ``tested_at[i]`` and ``accepted_at[i]`` count what became of the draft tokens at place i of
    their rounds; ``rounds_by_accepted[n]`` the rounds with a draft of which n tokens stood.
    """

    kind: str
    prompt: int
    temperature: float
    repeat: int
    alone: Written
    ours: Written
    counts: Counts
    tested_at: tuple[int, ...]
    accepted_at: tuple[int, ...]
    rounds_by_accepted: tuple[int, ...]
    sources: dict[str, dict[str, int]]
    predicted: float | None
    spread: float | None
    repetition: float | None
    n_prompt: int = 0


def measure(
    pair: Pair,
    tasks: Sequence[Task],
    temperatures: Sequence[float],
    *,
    sampling: SamplingParams,
    params: DecodeParams,
    repeats: int = 1,
    clock: Clock = time.perf_counter,
    progress: Progress | None = None,
) -> Iterator[Sample]:
    """Write every prompt at every temperature, ``repeats`` times, by both contenders in turn.

    Each text starts from empty caches; who goes first changes from text to text. A warm-up before
    the first one brings weights into memory and the costs into the pair's table.
    """
    n_all = repeats * len(tasks) * len(temperatures)
    if progress:
        progress("warming up", 0, 1)
    raw = not takes_a_chat(pair, WARM_UP)
    _warm_up(pair, sampling, params, temperatures, raw=raw)
    if progress:
        progress("warming up", 1, 1)
    n_done = 0
    for repeat in range(repeats):
        for place, task in enumerate(tasks):
            for temperature in temperatures:
                how = replace(sampling, temperature=temperature)
                decode = replace(params, seed=(params.seed if params.seed >= 0 else 0) + repeat)
                # Fixed: the measured policy learns from every round, also from these.
                alone = replace(
                    decode, n_draft=0, draft_policy="fixed", drafter="model", exact=False
                )
                turns = [alone, decode] if n_done % 2 == 0 else [decode, alone]
                made = [_write(pair, task.prompt, how, turn, clock, raw=raw) for turn in turns]
                if n_done % 2:
                    made.reverse()
                yield _sample(task, place, temperature, repeat, made[0], made[1])
                n_done += 1
                if progress:
                    progress("measuring", n_done, n_all)


def _warm_up(
    pair: Pair,
    sampling: SamplingParams,
    params: DecodeParams,
    temperatures: Sequence[float],
    *,
    raw: bool,
) -> None:
    alone = DecodeParams(n_predict=8, n_draft=0, draft_policy="fixed")
    pair.generate(WARM_UP, sampling, alone, raw=raw).read()
    for temperature in dict.fromkeys((min(temperatures), max(temperatures))):
        how = replace(sampling, temperature=temperature)
        pair.generate(WARM_UP, how, params, raw=raw).read()


def _write(
    pair: Pair,
    prompt: str,
    sampling: SamplingParams,
    params: DecodeParams,
    clock: Clock,
    *,
    raw: bool,
) -> tuple[Written, Generation]:
    text = pair.generate(prompt, sampling, params, raw=raw)
    started = clock()
    first, n_first = started, 0
    for _ in text:
        if not n_first:
            first, n_first = clock(), len(text.tokens)
    return Written(len(text.tokens) - n_first, clock() - first, first - started), text


def _sample(
    task: Task,
    place: int,
    temperature: float,
    repeat: int,
    alone: tuple[Written, Generation],
    ours: tuple[Written, Generation],
) -> Sample:
    summary = ours[1].summary
    tested, accepted = by_place(ours[1].rounds)
    return Sample(
        task.kind, place, temperature, repeat, alone[0], ours[0], count(ours[1].rounds),
        tested, accepted, summary.accepted_histogram,
        summary.sources, summary.predicted_speedup, summary.spread, summary.repetition,
        summary.n_prompt,
    )  # fmt: skip
