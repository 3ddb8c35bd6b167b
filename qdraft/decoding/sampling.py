"""From a row of logits to the token that follows, or to the distribution it is drawn from.

The steps and their order are those of llama.cpp's default sampler chain: logit bias, penalties,
DRY, top-n-sigma, top-k, typical-p, top-p, min-p, XTC, temperature. Bias, penalties and DRY are
processors, which change the row itself; the others truncate the distribution. Target and draft go
through one Sampler, so that p and q are always made in the same way. Temperature 0 takes the
likeliest of the tokens that top-k and typical-p leave; typical-p may rule out the likeliest of all.

llama.cpp tosses a coin for XTC at each token. Here p is the mixture of both outcomes: the same law.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from qdraft.decoding.constraint import Constraint
from qdraft.decoding.dry import Breakers, dry_penalties
from qdraft.decoding.gumbel import GumbelNoise
from qdraft.decoding.records import Distribution, SamplingParams
from qdraft.decoding.rng import Rng
from qdraft.decoding.truncation import (
    Floats as Floats,
)
from qdraft.decoding.truncation import (
    Row as Row,
)
from qdraft.decoding.truncation import (
    dynamic_temperature,
    keep_min_p,
    keep_top_p,
    keep_typical_p,
    keep_xtc,
    within_sigmas,
)
from qdraft.decoding.truncation import (
    softmax as softmax,
)
from qdraft.errors import ConstraintError, LogitsError, ParameterError, UsageError


@dataclass(frozen=True, slots=True)
class History:
    """The text before a row: the tokens of the text, and the draft tokens after them."""

    context: Sequence[int]
    drafted: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.context) + len(self.drafted)

    def last(self, n: int) -> list[int]:
        """The last ``n`` tokens, oldest first; -1: all of them."""
        if n < 0:
            return [*self.context, *self.drafted]
        n_context = max(0, n - len(self.drafted))
        return [
            *self.context[max(0, len(self.context) - n_context) :],
            *self.drafted[max(0, len(self.drafted) - n) :],
        ]


class Processor(Protocol):
    """Changes the logits of a row, on the target's side and the draft's alike."""

    def __call__(self, row: Row, history: History) -> Row:
        """Return the row, shape [n_vocab], changed for the text in ``history``.

        The result must depend on ``row`` and the tokens of ``history`` alone: p stays the
        target's law only if the processor always changes a row after the same tokens in the same
        way. It may keep state by prefix, never by position: other tokens follow in place of
        rejected ones. It may write to ``row``, which is a copy, and must not keep ``history``.
        """
        ...


class LogitBias:
    """Adds ``bias`` to the logits of its tokens; -inf bans a token."""

    def __init__(self, ids: NDArray[np.intp], bias: Row) -> None:
        self._ids, self._bias = ids, bias

    def __call__(self, row: Row, history: History) -> Row:
        row[self._ids] += self._bias
        return row


class Penalties:
    """llama.cpp's penalties on the last ``repeat_last_n`` tokens.

    Divides their logits by ``repeat_penalty`` (multiplies those below 0), then lowers them by
    ``frequency_penalty`` for each occurrence and by ``presence_penalty`` once.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._params = params

    def __call__(self, row: Row, history: History) -> Row:
        params = self._params
        tokens = np.asarray(history.last(params.repeat_last_n), dtype=np.intp)
        ids, counts = np.unique(tokens, return_counts=True)
        logits = row[ids]
        logits = np.where(
            logits > 0, logits / params.repeat_penalty, logits * params.repeat_penalty
        )
        row[ids] = logits - counts * params.frequency_penalty - params.presence_penalty
        return row


class Dry:
    """Lowers the logits of tokens that would make a repetition longer; see ``dry_penalties``."""

    def __init__(self, params: SamplingParams, breakers: Breakers) -> None:
        self._params, self._breakers = params, breakers

    def __call__(self, row: Row, history: History) -> Row:
        tokens = history.last(self._params.dry_penalty_last_n)
        for token, penalty in dry_penalties(tokens, self._params, self._breakers).items():
            row[token] -= penalty
        return row


def processors_for(
    params: SamplingParams, n_vocab: int, breakers: Breakers | None = None
) -> list[Processor]:
    """The processors that ``params`` ask for, in llama.cpp's order.

    Raises ParameterError for a biased token that is not in the vocabulary, and UsageError for DRY
    without ``breakers``.
    """
    unknown = [token for token in params.logit_bias if token >= n_vocab]
    if unknown:
        raise ParameterError(
            f"logit_bias names token {unknown[0]}, but the vocabulary has {n_vocab} tokens"
        )
    processors: list[Processor] = []
    if params.logit_bias:
        ids = np.array(list(params.logit_bias), dtype=np.intp)
        bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
        processors.append(LogitBias(ids, bias))
    penalties = (params.repeat_penalty - 1, params.presence_penalty, params.frequency_penalty)
    if params.repeat_last_n != 0 and any(penalties):
        processors.append(Penalties(params))
    if params.uses_dry:
        if breakers is None:
            raise UsageError("a sampler with dry_multiplier needs the breakers of its vocabulary")
        processors.append(Dry(params, breakers))
    return processors


class Proposal(Protocol):
    """What the draft says about the next token. Borrows its row: use it before the next eval."""

    @property
    def probs(self) -> Distribution | None:
        """q, the distribution that ``token`` draws from; None if it draws nothing."""
        ...

    @property
    def confidence(self) -> float:
        """The largest probability, in (0, 1]; computed when asked for."""
        ...

    def confidence_in(self, token: int) -> float:
        """How sure the draft is of ``token``; 0 if it would never propose it."""
        ...

    def token(self, rng: Rng) -> int:
        """The proposed token. A draw must be used: dropping it would change its law."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """What a token is chosen by: the one with the largest of ``values``, shape [n].

    ``ids`` holds the token of each entry, ascending; if it is None, the entries are the tokens.
    """

    values: Row | Floats
    ids: NDArray[np.intp] | None = None

    @property
    def best(self) -> int:
        """The chosen token. Raises LogitsError if the values hold NaN or nothing finite."""
        entry = _argmax(self.values)
        return entry if self.ids is None else int(self.ids[entry])

    def of(self, token: int) -> float | None:
        """The score of a token; None if it is not among the candidates."""
        if self.ids is None:
            return float(self.values[token])
        entry = int(np.searchsorted(self.ids, token))
        known = entry < len(self.ids) and self.ids[entry] == token
        return float(self.values[entry]) if known else None


@dataclass(frozen=True, slots=True, eq=False)
class ChosenToken:
    """A proposal that nothing is drawn for: the token with the largest score."""

    scores: Scores
    best: int
    probs: Distribution | None = None

    @property
    def confidence(self) -> float:
        values = self.scores.values
        return 1.0 / float(np.exp(values - values.max()).sum(dtype=np.float64))

    def confidence_in(self, token: int) -> float:
        return self.confidence if token == self.best else 0.0

    def token(self, rng: Rng) -> int:
        return self.best


@dataclass(frozen=True, slots=True, eq=False)
class DrawnToken:
    """A sampled proposal: a draw from q."""

    probs: Distribution

    @property
    def confidence(self) -> float:
        return float(self.probs.probs.max())

    def confidence_in(self, token: int) -> float:
        return self.probs.prob(token)

    def token(self, rng: Rng) -> int:
        return draw(self.probs, rng)


class Sampler:
    """Turns rows of logits, shape [n_vocab], into tokens and distributions, for one text.

    ``context`` is the text so far and ``drafted`` the draft tokens after it that precede the row:
    processors see both, so that a row depends on the tokens before it, drafted or emitted alike.
    ``constraint`` rules tokens out first, so that the steps after it choose among those that may
    follow; ``processors`` come after those of ``params``. Without any, no row is copied.

    With ``gumbel`` a token is chosen by its logit and its noise at its place, which gives it the
    same law as drawing it: the rule "coupled" of verification. DRY needs ``breakers``.
    """

    def __init__(
        self,
        params: SamplingParams,
        n_vocab: int,
        processors: Sequence[Processor] = (),
        gumbel: GumbelNoise | None = None,
        breakers: Breakers | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        self.params = params
        self.gumbel = gumbel
        self.constraint = constraint
        self._processors = [*processors_for(params, n_vocab, breakers), *processors]

    @property
    def greedy(self) -> bool:
        return self.params.greedy

    @property
    def chooses(self) -> bool:
        """True if a row and its place determine the token: greedy, or with Gumbel noise."""
        return self.greedy or self.gumbel is not None

    def prepare(self, context: Sequence[int], drafted: Sequence[int]) -> None:
        """Get ready for the rows of a block: those before and after each of ``drafted``."""
        if self.constraint is not None:
            self.constraint.prepare(context, drafted)

    def process(self, row: Row, context: Sequence[int], drafted: Sequence[int] = ()) -> Row:
        """The row after the constraint and all processors; rows are borrowed: these get a copy.

        Raises ConstraintError if no token is left.
        """
        allowed = None if self.constraint is None else self.constraint.allowed(context, drafted)
        if allowed is None and not self._processors:
            return row
        row = row.copy() if allowed is None else np.where(allowed, row, np.float32(-np.inf))
        history = History(context, drafted)
        for processor in self._processors:
            row = processor(row, history)
        if allowed is not None and row.max() == -np.inf:
            raise ConstraintError(
                "every token that the constraint allows here is banned by a bias or has no logit",
                hint="ban fewer tokens, or allow more with the constraint",
            )
        return row

    def argmax(self, row: Row, context: Sequence[int], drafted: Sequence[int] = ()) -> int:
        """The likeliest token after all processors; greedy typical-p may rule tokens out first.

        Raises LogitsError if the row holds NaN or nothing finite.
        """
        return _argmax(self._with_candidates(self.process(row, context, drafted)))

    def scores(self, row: Row, context: Sequence[int], drafted: Sequence[int] = ()) -> Scores:
        """What a sampler that ``chooses`` chooses by: logits, or ln p + G with Gumbel noise.

        Raises LogitsError if the row holds NaN or nothing finite.
        """
        row = self.process(row, context, drafted)
        if self.greedy or self.gumbel is None:
            return Scores(self._with_candidates(row))
        probs, ids = self._probs(row)
        tokens = np.arange(len(probs)) if ids is None else ids
        noise = self.gumbel.at(len(context) + len(drafted), tokens)
        with np.errstate(divide="ignore"):
            return Scores(np.log(probs) + noise, ids)

    def choose(self, row: Row, context: Sequence[int], drafted: Sequence[int] = ()) -> int:
        """The token that a sampler that ``chooses`` chooses.

        Raises LogitsError if the row holds NaN or nothing finite.
        """
        return self.scores(row, context, drafted).best

    def distribution(
        self, row: Row, context: Sequence[int], drafted: Sequence[int] = ()
    ) -> Distribution:
        """The distribution of the next token.

        Raises LogitsError if the row holds NaN or nothing finite.
        """
        return Distribution(*self._probs(self.process(row, context, drafted)))

    def _probs(self, row: Row) -> tuple[Floats, NDArray[np.intp] | None]:
        """The probabilities of the candidates of a processed row, and their tokens (None: all)."""
        params = self.params
        logits, ids = self._truncate(row)
        probs = self._at_temperature(logits)
        if params.uses_xtc:
            kept = keep_xtc(softmax(logits), params.xtc_threshold)
            probs *= 1 - params.xtc_probability
            probs[kept] += params.xtc_probability * self._at_temperature(logits[kept])
        return probs, ids

    def _at_temperature(self, logits: Floats) -> Floats:
        params = self.params
        temperature = params.temperature
        if params.dynatemp_range > 0:
            temperature = dynamic_temperature(
                logits, temperature, params.dynatemp_range, params.dynatemp_exp
            )
        if temperature > 0:
            return softmax(logits, temperature)
        likeliest = np.zeros(len(logits))
        likeliest[logits.argmax()] = 1.0
        return likeliest

    def _truncate(self, row: Row) -> tuple[Floats, NDArray[np.intp] | None]:
        """The logits that top-n-sigma to min-p leave, and their tokens (None: all)."""
        params = self.params
        _check_finite(row.max())
        if params.top_n_sigma > 0:
            row = within_sigmas(row, params.top_n_sigma)
        ids: NDArray[np.intp] | None = None
        if 0 < params.top_k < len(row):
            ids = np.sort(np.argpartition(row, -params.top_k)[-params.top_k :])
            row = row[ids]
        logits = row.astype(np.float64)
        for limit, off, keep in (
            (params.typical_p, 1, keep_typical_p),
            (params.top_p, 1, keep_top_p),
            (params.min_p, 0, keep_min_p),
        ):
            if limit != off:
                kept = keep(softmax(logits), limit)
                logits, ids = logits[kept], kept if ids is None else ids[kept]
        return logits, ids

    def _with_candidates(self, row: Row) -> Row:
        """The row with -inf for the tokens that greedy sampling does not choose from.

        Only typical-p rules out the likeliest token; top-k, top-p and min-p always leave it.
        """
        if not self.greedy or self.params.typical_p == 1:
            return row
        _, ids = self._truncate(row)
        candidates = np.full_like(row, -np.inf)
        candidates[ids] = row[ids]
        return candidates

    def propose(self, row: Row, context: Sequence[int], drafted: Sequence[int] = ()) -> Proposal:
        """What a draft row proposes, after all processors.

        Raises LogitsError if the row holds NaN or nothing finite.
        """
        if not self.chooses:
            return DrawnToken(self.distribution(row, context, drafted))
        scores = self.scores(row, context, drafted)
        return ChosenToken(scores, scores.best)


def draw(distribution: Distribution, rng: Rng) -> int:
    """One token from a distribution."""
    return distribution.token(rng.draw(distribution.probs))


def point_mass(token: int) -> Distribution:
    """All probability on one token."""
    return Distribution(np.ones(1), np.array([token], dtype=np.intp))


def _argmax(row: Row | Floats) -> int:
    token = int(row.argmax())
    _check_finite(row[token])
    return token


def _check_finite(top: np.floating) -> None:
    # NaN wins both max and argmax in numpy: if a row holds one, its largest value is NaN.
    if not np.isfinite(top):
        raise LogitsError(f"the largest logit of a row is {top}, not a finite number")
