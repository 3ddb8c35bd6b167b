"""How often draft tokens are accepted, learned from the rounds."""

from __future__ import annotations

import math

from qdraft.decoding.policy.constants import CONSTANTS, PolicyConstants
from qdraft.decoding.records import Round

_Counts = tuple[float, float]  # accepted and tested tokens, faded


class AcceptanceTable:
    """Share of tested draft tokens that were accepted, by source and by the draft's confidence.

    A bin of confidence starts from the share over all bins, which a few tests of its own outweigh.
    Old tests fade, because a text may change its kind: with every new test, and with every token
    that the text grows by without one. So a source that does not draft is believed in again.
    """

    def __init__(self, constants: PolicyConstants = CONSTANTS) -> None:
        self._constants = constants
        self._bins: dict[tuple[str, int], _Counts] = {}
        self._all: dict[str, _Counts] = {}

    def add(self, round: Round) -> None:
        """Count the tested tokens of a round, without those that a constraint forces."""
        forced = round.draft.forced
        tested = [i for i in range(round.n_tested) if i not in forced]
        if not tested:
            self._fade(0.5 ** (round.n_emitted / self._constants.n_half_forgotten))
            return
        for i in tested[: len(round.draft.confidence)]:
            accepted = float(i < round.n_accepted)
            key = (round.source, self._bin(round.draft.confidence[i]))
            self._bins[key] = self._count(self._bins.get(key, (0.0, 0.0)), accepted)
            self._all[round.source] = self._count(self._all.get(round.source, (0.0, 0.0)), accepted)

    def start_text(self) -> None:
        """Let what earlier texts have shown count less: another text begins."""
        self._fade(self._constants.carried_over)

    def at(self, source: str, confidence: float) -> float:
        """Chance that a token of this confidence is accepted."""
        counts = self._bins.get((source, self._bin(confidence)), (0.0, 0.0))
        return self._chance(counts, self.overall(source))

    def overall(self, source: str, hope: float = 0.0) -> float:
        """Chance that a token of unknown confidence is accepted.

        ``hope`` adds that many standard deviations of the mean.
        """
        counts = self._all.get(source, (0.0, 0.0))
        return self._chance(counts, self._constants.acceptance_belief, hope)

    def _chance(self, counts: _Counts, belief: float, hope: float = 0.0) -> float:
        """Mean of the Beta distribution that ``belief`` and ``counts`` make, with ``hope``."""
        weight = self._constants.belief_weight
        n = counts[1] + weight
        mean = (counts[0] + weight * belief) / n
        return min(1.0, mean + hope * math.sqrt(mean * (1 - mean) / (n + 1)))

    def _bin(self, confidence: float) -> int:
        return sum(confidence >= edge for edge in self._constants.confidence_edges)

    def _count(self, counts: _Counts, accepted: float) -> _Counts:
        fade = min(1.0, self._constants.n_tests_remembered / (counts[1] + 1))
        return (fade * (counts[0] + accepted), fade * (counts[1] + 1))

    def _fade(self, share: float) -> None:
        """Let all tests count this share of what they counted."""
        self._bins = {key: (share * a, share * n) for key, (a, n) in self._bins.items()}
        self._all = {key: (share * a, share * n) for key, (a, n) in self._all.items()}
