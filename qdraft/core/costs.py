"""What the schedules know: measured times, acceptance by confidence, and what was lost lately."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from statistics import median

from qdraft.types import Round

_N_TIMES = 15  # the last times of a kind; their median is what counts
N_READ_FREE = 3  # tokens that a draft may read first and its time still be that of its rows


class CostTable:
    """Measured seconds of a draft row (by source) and of a target decode (by number of rows)."""

    def __init__(
        self,
        draft_s: Mapping[str, float] | None = None,
        verify_s: Mapping[int, float] | None = None,
    ) -> None:
        """Start from medians of earlier runs, as ``medians`` gives them."""
        self._draft: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_N_TIMES))
        self._verify: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_N_TIMES))
        for source, seconds in (draft_s or {}).items():
            self._draft[source].append(seconds)
        for width, seconds in (verify_s or {}).items():
            self._verify[width].append(seconds)

    def add(self, round: Round) -> None:
        """Take in the times of a round (not the prompt's)."""
        self._verify[round.n_draft + 1].append(round.verify_s)
        if round.n_draft_rows and round.n_caught_up <= N_READ_FREE:
            self._draft[round.source].append(round.draft_s / round.n_draft_rows)

    @property
    def target_s(self) -> float | None:
        """Seconds of one target token alone."""
        return median(self._verify[1]) if self._verify.get(1) else None

    @property
    def complete(self) -> bool:
        """True once drafting can be judged: one row, some wider decode, one draft."""
        return self.target_s is not None and len(self._verify) > 1 and bool(self._draft)

    def c(self, source: str) -> float:
        """Time of a draft row of this source over that of one target token."""
        times = self._draft.get(source)
        return median(times) / (self.target_s or 1.0) if times else 0.0

    def v(self, n: int) -> float:
        """Time of a target decode of ``n`` rows over that of one.

        Measured where it was; else on the line between the measured neighbours, or through
        the two widest.
        """
        if self._verify.get(n):
            return self._seconds(n) / self._seconds(1)
        known = sorted(width for width, times in self._verify.items() if times)
        below = [width for width in known if width < n]
        above = [width for width in known if width > n]
        low, high = (below[-1], above[0]) if above else (below[-2], below[-1])
        slope = max(0.0, (self._seconds(high) - self._seconds(low)) / (high - low))
        return (self._seconds(low) + (n - low) * slope) / self._seconds(1)

    def _seconds(self, width: int) -> float:
        return median(self._verify[width])

    def medians(self) -> tuple[dict[str, float], dict[int, float]]:
        """Seconds of a draft row by source, and of a target decode by number of rows."""
        return (
            {source: median(times) for source, times in self._draft.items() if times},
            {width: median(times) for width, times in sorted(self._verify.items()) if times},
        )


class AcceptanceTable:
    """Share of tested draft tokens that were accepted, by source and by the draft's confidence.

    Bins start from the belief that a draft is as reliable as it says, which a few tests
    outweigh; old tests fade, so that a text may change its kind.
    """

    _EDGES = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99)
    _BELIEF = 3.0  # tests that the starting belief counts as
    _MEMORY = 200.0  # tests that a bin remembers

    def __init__(self) -> None:
        self._bins: dict[tuple[str, int], tuple[float, float]] = {}
        self._all: dict[str, tuple[float, float]] = {}

    def add(self, round: Round) -> None:
        """Take in the tested tokens of a round."""
        for i, confidence in enumerate(round.confidence[: round.n_tested]):
            accepted = float(i < round.n_accepted)
            key = (round.source, self._bin(confidence))
            self._bins[key] = self._count(self._bins.get(key, (0.0, 0.0)), accepted)
            self._all[round.source] = self._count(self._all.get(round.source, (0.0, 0.0)), accepted)

    def at(self, source: str, confidence: float) -> float:
        """Chance that a token of this confidence is accepted."""
        accepted, tested = self._bins.get((source, self._bin(confidence)), (0.0, 0.0))
        return (accepted + self._BELIEF * confidence) / (tested + self._BELIEF)

    def overall(self, source: str) -> float:
        """Chance that a token of unknown confidence is accepted."""
        accepted, tested = self._all.get(source, (0.0, 0.0))
        return (accepted + 0.7 * self._BELIEF) / (tested + self._BELIEF)

    def _bin(self, confidence: float) -> int:
        return sum(confidence >= edge for edge in self._EDGES)

    def _count(self, counts: tuple[float, float], accepted: float) -> tuple[float, float]:
        fade = min(1.0, self._MEMORY / (counts[1] + 1))
        return (fade * (counts[0] + accepted), fade * (counts[1] + 1))


class RecentLoss:
    """Time that drafting cost over the last 200 tokens, in target-token times.

    Rounds without a draft lose nothing by definition. ``speed`` is that of the rounds with
    a draft among them, 1 where there are none.
    """

    _N_TOKENS = 200

    def __init__(self, max_loss: float) -> None:
        self._limit = max_loss * self._N_TOKENS
        self._rounds: deque[tuple[int, float, bool]] = deque()
        self._n_tokens = 0

    def add(self, round: Round, target_s: float) -> None:
        """Take in a round; ``target_s`` is the time of one target token now."""
        spent = (round.draft_s + round.verify_s + round.other_s) / target_s
        drafted = round.n_draft_rows > 0
        self._rounds.append(
            (round.n_emitted, spent if drafted else float(round.n_emitted), drafted)
        )
        self._n_tokens += round.n_emitted
        while self._n_tokens - self._rounds[0][0] >= self._N_TOKENS:
            self._n_tokens -= self._rounds.popleft()[0]

    @property
    def lost(self) -> float:
        """Target-token times lost, negative when drafting gained."""
        return sum(spent - n for n, spent, _ in self._rounds)

    @property
    def exhausted(self) -> bool:
        return self.lost >= self._limit

    @property
    def speed(self) -> float:
        """Tokens per target-token time over the rounds with a draft."""
        drafted = [(n, spent) for n, spent, was_drafted in self._rounds if was_drafted]
        spent = sum(s for _, s in drafted)
        return sum(n for n, _ in drafted) / spent if spent else 1.0

    def affords(self, loss: float) -> bool:
        """True if a round that is expected to lose this much stays within the limit."""
        return self.lost + loss < self._limit
