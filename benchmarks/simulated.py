"""Simulated pairs: the draft policy without models, in target tokens of expected time.

The policy sees times with noise. The figures count the times without, so that a text has the same
cost on a quiet machine and on a busy one.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean, median

from qdraft.decoding.policy.learned import Learned
from qdraft.decoding.policy.model import Costs, interpolate_v
from qdraft.decoding.policy.schedule import CostAwareSchedule, Schedule
from qdraft.decoding.records import Draft, Origin, Round, Times, Verdict

_LONGEST = 63
_N_TRIALS = 3  # measurements of each cost while loading
_N_TO_PAUSE = 20  # tokens without a draft after which a row is cold
_CORRELATED = 0.98  # of the machine's speed from one decode to the next


@dataclass(frozen=True)
class Noise:
    """How times scatter, ``sigma`` and ``drift`` in logarithms.

    ``spikes`` is the share of decodes that take three times as long.
    """

    sigma: float = 0.05
    spikes: float = 0.0
    drift: float = 0.0


@dataclass(frozen=True)
class SimulatedPair:
    """What a draft row and a target decode cost, and how often a draft token is accepted.

    The acceptance chances of places scatter around ``alpha``. With ``informative`` the draft's
    confidence follows them, else it says nothing. ``cold`` is the cost of the first row after 20
    tokens without one; None: as any row.
    """

    name: str
    c: float
    v: Mapping[int, float]
    alpha: float
    noise: Noise = Noise()
    informative: bool = True
    cold: float | None = None

    def v_at(self, n: int) -> float:
        return _v_at(tuple(self.v.items()), n)

    def text(self, n: int, seed: int) -> list[tuple[bool, float]]:
        """For each place: whether a token drafted there is accepted, and its confidence."""
        rng = random.Random(7919 * seed + 13)
        places = []
        for _ in range(n + _LONGEST):
            chance = rng.betavariate(1.2 * self.alpha, 1.2 * (1 - self.alpha))
            shown = chance + rng.gauss(0, 0.12) if self.informative else rng.random()
            places.append((rng.random() < chance, min(1.0, max(0.0, shown))))
        return places


@cache
def _v_at(v: tuple[tuple[int, float], ...], n: int) -> float:
    return interpolate_v(dict(v), n)


class Machine:
    """Times of a pair's decodes: ``time`` is what a clock shows, ``spent`` the expected sum."""

    def __init__(self, pair: SimulatedPair, seed: int) -> None:
        self._noise = pair.noise
        self._rng = random.Random(31 * seed + 7)
        self._slower = 0.0
        self.spent = 0.0

    def time(self, expected: float) -> float:
        rng, noise = self._rng, self._noise
        self.spent += expected
        if noise.drift:
            scatter = noise.drift * math.sqrt(1 - _CORRELATED**2)
            self._slower = _CORRELATED * self._slower + rng.gauss(0, scatter)
        factor = math.exp(rng.gauss(0, noise.sigma) + self._slower)
        return expected * factor * (3 if rng.random() < noise.spikes else 1)


def load(pair: SimulatedPair, seed: int) -> Learned:
    """What the policy knows after loading: a row of the target, eight of them, a draft row."""
    machine = Machine(pair, seed + 5000)

    def measure(expected: float) -> float:
        return median(machine.time(expected) for _ in range(_N_TRIALS))

    target_s = measure(1.0)
    c, v = measure(pair.c) / target_s, measure(pair.v_at(8)) / target_s
    beyond = max(0.0, (pair.cold or 0.0) - pair.c)
    learned = Learned()
    learned.costs.start(Costs({"model": c}, {8: v}, target_s, {"model": beyond}))
    return learned


@dataclass(frozen=True)
class Spent:
    """A round: tokens drafted and emitted, and its expected time in target tokens."""

    n_draft: int
    n_emitted: int
    time: float


def write(
    pair: SimulatedPair, schedule: Schedule, n: int, seed: int, machine: Machine | None = None
) -> list[Spent]:
    """Write ``n`` tokens after the prompt's round."""
    machine = machine or Machine(pair, seed)
    text = pair.text(n, seed)
    rounds: list[Spent] = []
    place, drafted_at = 0, -_N_TO_PAUSE
    while place < n:
        before = machine.spent
        gate = schedule.gate(n - place - 1)
        confidence: list[float] = []
        n_rows, draft_s = 0, 0.0
        while gate.more("model"):
            is_cold = pair.cold is not None and place - drafted_at >= _N_TO_PAUSE
            draft_s += machine.time(pair.cold if is_cold and pair.cold else pair.c)
            n_rows, drafted_at = n_rows + 1, place
            shown = text[place + len(confidence)][1]
            if not gate.take("model", shown):
                break
            confidence.append(shown)
        k = len(confidence)
        n_accepted = next((i for i in range(k) if not text[place + i][0]), k)
        verify_s = machine.time(pair.v_at(k + 1))
        tokens = (1,) * (n_accepted + 1)
        draft = Draft((1,) * k, None, "model", tuple(confidence), n_rows) if n_rows else Draft()
        verdict = Verdict(tokens, n_accepted + (n_accepted < k), Origin.TARGET)
        times = Times(draft_s, verify_s, 0.0)
        schedule.observe(Round(len(rounds) + 1, place, 0, draft, verdict, tokens, None, times))
        rounds.append(Spent(k, len(tokens), machine.spent - before))
        place += len(tokens)
    return rounds


def time_fixed(pair: SimulatedPair, n_draft: int, n: int, seed: int) -> float:
    """Target tokens of time that a fixed draft length takes for a text."""
    text, place, time = pair.text(n, seed), 0, 0.0
    while place < n:
        k = min(n_draft, n - place - 1)
        n_accepted = next((i for i in range(k) if not text[place + i][0]), k)
        time += k * pair.c + pair.v_at(k + 1)
        place += n_accepted + 1
    return time


@dataclass(frozen=True)
class Score:
    """Speeds of auto over those of the best fixed length, text by text."""

    best: int
    speedup: float  # of the best fixed length over the target alone
    ratios: tuple[float, ...]

    @property
    def mean(self) -> float:
        return mean(self.ratios)

    @property
    def worst_tenth(self) -> float:
        return sorted(self.ratios)[len(self.ratios) // 10]


def score(pair: SimulatedPair, n: int, seeds: Sequence[int], longest: int = 12) -> Score:
    """Write a text for each seed, the first of its process, and compare with the best length."""
    times = {k: [time_fixed(pair, k, n, seed) for seed in seeds] for k in range(longest + 1)}
    best = min(times, key=lambda k: sum(times[k]))
    ratios = []
    for seed, time in zip(seeds, times[best], strict=True):
        rounds = write(pair, CostAwareSchedule(_LONGEST, load(pair, seed)), n, seed)
        ratios.append(time / sum(r.time for r in rounds))
    return Score(best, n * len(seeds) / sum(times[best]), tuple(ratios))


def write_texts(pair: SimulatedPair, seed: int, n_texts: int = 10, n: int = 300) -> list[Spent]:
    """Write texts one after the other, tables kept, on one machine."""
    learned, machine = load(pair, seed), Machine(pair, seed)
    rounds: list[Spent] = []
    for i in range(n_texts):
        learned.start_text()
        schedule = CostAwareSchedule(_LONGEST, learned)
        rounds += write(pair, schedule, n, 100 * seed + i, machine)
    return rounds


def worst_window(rounds: Sequence[Spent], n_tokens: int = 200) -> float:
    """The most time that any stretch of about ``n_tokens`` took, over that many target tokens."""
    places, times = [0], [0.0]
    for r in rounds:
        places.append(places[-1] + r.n_emitted)
        times.append(times[-1] + r.time)
    worst = 0.0
    for start, place in enumerate(places):
        end = bisect_left(places, place + n_tokens)
        if end < len(places):
            worst = max(worst, (times[end] - times[start]) / (places[end] - place))
    return worst


_JAGGED = {2: 1.5, 3: 1.6, 4: 1.75, 5: 1.9, 6: 2.05, 9: 2.9}
_F16 = {2: 1.03, 3: 1.1, 4: 1.2, 5: 1.37, 9: 2.09}
_BUSY = Noise(0.15, 0.02, 0.1)

PAYING = (
    # Qwen2.5-Coder 1.5B F16 with the 0.5B of its family, temperature 1 (docs/benchmark.md).
    SimulatedPair("1.5B + 0.5B", 0.24, {2: 1.11, 3: 1.2, 5: 1.42, 9: 2.1}, 0.79, Noise(0.08, 0.01)),
    SimulatedPair("flat v", 0.15, {2: 1.03}, 0.75),
    SimulatedPair("busy", 0.35, {2: 1.06, 3: 1.12, 5: 1.3, 9: 1.9}, 0.88, Noise(0.1, 0.01, 0.1)),
    SimulatedPair("jagged v", 0.2, _JAGGED, 0.85, Noise(0.06)),
    SimulatedPair("dear draft, busy", 0.5, _F16, 0.9, _BUSY),
)
LOSING = (
    SimulatedPair("steep v", 0.5, {2: 1.5}, 0.8),
    SimulatedPair("hopeless", 0.9, {2: 1.5}, 0.3),
    SimulatedPair("useless", 0.2, {2: 1.05}, 0.15, Noise(0.1)),
    SimulatedPair("break-even", 0.5, {2: 1.2}, 0.72, Noise(0.1)),
    SimulatedPair("not quite, busy", 0.6, {2: 1.25}, 0.75, _BUSY),
    SimulatedPair("cold draft", 0.6, {2: 1.5}, 0.8, cold=20.0),
    SimulatedPair("cold, else good", 0.1, {2: 1.05}, 0.8, cold=60.0),
    SimulatedPair("streamed, useless", 0.03, {2: 1.003}, 0.05, Noise(0.1)),
)
STREAMED = (
    SimulatedPair("streamed, T 0", 0.03, {2: 1.003}, 0.95),
    SimulatedPair("streamed, T 1", 0.05, {2: 1.005}, 0.85, Noise(0.08, 0.01)),
)


def uninformed(pair: SimulatedPair) -> SimulatedPair:
    """The same pair, whose draft's confidence says nothing."""
    return replace(pair, informative=False)
