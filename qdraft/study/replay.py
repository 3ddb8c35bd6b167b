"""Drafting replayed on a recording: the real loop, policies and verification, without the models.

Target and draft become sequences that return the recorded rows of a position, whatever tokens the
loop has chosen so far: the next position is as likely or unlikely as it was in the recorded text.
Times come from a table of costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
from numpy.typing import NDArray

from qdraft.decoding.drafters.kinds import KINDS
from qdraft.decoding.drafters.model import ModelDrafter
from qdraft.decoding.engine import n_common
from qdraft.decoding.gumbel import GumbelNoise
from qdraft.decoding.loop import Decoding
from qdraft.decoding.policy.constants import CONSTANTS, PolicyConstants
from qdraft.decoding.policy.learned import Learned
from qdraft.decoding.policy.model import Costs
from qdraft.decoding.policy.schedule import schedule_for
from qdraft.decoding.rates import alpha_by_place, by_place, count
from qdraft.decoding.records import DecodeParams, Round, SamplingParams
from qdraft.decoding.rng import SeededRng
from qdraft.decoding.sampling import Sampler
from qdraft.errors import ParameterError, UsageError
from qdraft.study.logit_store import Rows
from qdraft.study.recording import Logs, Recording, TextRecording

# Steps that look at the text, or at all tokens of a position.
_NEED_TOKENS = (
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "dry_multiplier",
    "top_n_sigma",
)
_HOTTEST = 1.5  # temperature up to which the kept tokens of a position are enough


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a way to draft gave over all texts that were replayed."""

    n_tokens: int
    alpha: float | None
    draft_yield: float | None
    tau: float | None
    speedup: float
    alpha_at: tuple[float | None, ...] = field(default=())


class _Vocab:
    def __init__(self, n_tokens: int) -> None:
        self.n_tokens = n_tokens

    def is_end(self, token: int) -> bool:
        return False

    def piece(self, token: int) -> bytes:
        return b""


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class _Recorded:
    """A sequence that returns recorded rows by position."""

    def __init__(self, n_tokens: int, text: TextRecording, clock: _Clock) -> None:
        self.vocab = _Vocab(n_tokens)
        self.tokens: list[int] = []
        self.n_ctx = text.n_prompt + text.n
        self._first = text.n_prompt  # tokens in the cache when the row of position 0 comes
        self._clock = clock

    @property
    def n_past(self) -> int:
        return len(self.tokens)

    def eval(self, tokens: Sequence[int], logits: int) -> Rows:
        start = self.n_past
        self.tokens += tokens
        if start:  # a replay does not time reading the prompt
            self._clock.now += self.cost(len(tokens))
        last = self.n_past - self._first
        rows = [self.row(position) for position in range(last - logits + 1, last + 1)]
        return np.array(rows, np.float32).reshape(logits, self.vocab.n_tokens)

    def cost(self, n_rows: int) -> float:
        raise NotImplementedError

    def row(self, position: int) -> Rows:
        raise NotImplementedError

    def checkpoint(self, n_ahead: int | None = None) -> None:
        pass

    def truncate(self, n_past: int) -> None:
        del self.tokens[n_past:]

    def keep(self, tokens: Sequence[int]) -> int:
        self.truncate(n_common(self.tokens, tokens))
        return self.n_past

    def close(self) -> None:
        pass


class _Target(_Recorded):
    def __init__(self, rows: Rows, text: TextRecording, clock: _Clock, costs: Costs) -> None:
        super().__init__(rows.shape[1], text, clock)
        self._rows, self._costs = rows, costs

    def cost(self, n_rows: int) -> float:
        return self._costs.v_at(n_rows)

    def row(self, position: int) -> Rows:
        row: Rows = self._rows[position]
        return row


class _Draft(_Recorded):
    """The draft. ``base`` is where its own cells begin: the depth of a row counts from there."""

    def __init__(
        self, own: Rows, shared: Rows | None, text: TextRecording, clock: _Clock, costs: Costs
    ) -> None:
        super().__init__(own.shape[1], text, clock)
        self._own, self._shared, self._costs = own, shared, costs
        self._depth: NDArray[np.int8] | None = text.depth
        self.base = 0

    def cost(self, n_rows: int) -> float:
        return self._costs.of_model

    def row(self, position: int) -> Rows:
        row: Rows = self._own[position]
        if self._shared is not None and self._depth is not None:
            depth = position + self._first - self.base
            nearest = int(np.abs(self._depth[:, position].astype(int) - depth).argmin())
            row = self._shared[nearest, position]
        return row


class _KvCopy:
    def __init__(self, source: _Target, destination: _Draft) -> None:
        self._source, self._destination = source, destination

    def copy(self, start: int) -> None:
        self._destination.tokens = list(self._source.tokens)
        self._destination.base = self._source.n_past


@dataclass(frozen=True, slots=True)
class _Way:
    """How to draft the texts of a recording, and at what costs."""

    costs: Costs
    sampling: SamplingParams
    params: DecodeParams
    share_kv: bool
    learned: Learned

    @property
    def is_truncated(self) -> bool:
        """True if sampling never draws from the tokens that a recording leaves out."""
        s = self.sampling
        return s.greedy or bool(s.top_k) or s.top_p < 1 or s.min_p > 0


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How to replay a recording.

    ``share_kv`` drafts on the target's cells. ``repeats`` replays each text several times, each
    time from one position later and with other random numbers, because it matters where rounds
    happen to start. ``constants`` are those of the draft policy.
    """

    share_kv: bool = True
    repeats: int = 1
    constants: PolicyConstants = CONSTANTS


_ONCE = ReplayOptions()


def replay(
    recording: Recording,
    costs: Costs,
    sampling: SamplingParams,
    params: DecodeParams,
    options: ReplayOptions = _ONCE,
) -> Replayed:
    """Draft through the texts that were recorded nearest to ``sampling``'s temperature.

    Raises UsageError for what a recording cannot answer: penalties, n-grams, temperatures above
    1.5.
    """
    _require(recording, sampling, params, options.share_kv)
    learned = Learned.with_constants(options.constants, replace(costs, target_s=1.0))
    way = _Way(costs, sampling, params, options.share_kv, learned)
    nearest = min(recording.temperatures, key=lambda t: abs(t - sampling.temperature))
    texts = [text for text in recording.texts if text.temperature == nearest]
    rounds: list[Round] = []
    for repeat in range(options.repeats):
        for i, text in enumerate(texts):
            learned.start_text()
            rounds += _replay_text(_cut_start(text, repeat), way, SeededRng(1000 * repeat + i))
    return _fold(rounds)


def choose_sampling(recording: Recording, sampling: SamplingParams) -> SamplingParams:
    """``sampling``, but for a synthetic recording the one that leaves its rows as they are."""
    as_recorded = SamplingParams(temperature=1.0, top_k=0, top_p=1, min_p=0)
    return as_recorded if recording.is_synthetic else sampling


def read_recommended(recording: Recording) -> dict[str, float]:
    """How the file of the recorded target recommends to sample, by the names of parameters."""
    values = recording.about.get("recommended")
    names = {each.name for each in fields(SamplingParams)} - {"logit_bias", "dry_sequence_breakers"}
    items = values.items() if isinstance(values, dict) else ()
    return {k: v for k, v in items if k in names and isinstance(v, (int, float))}


def can_share(recording: Recording, share_kv: str) -> bool:
    """Whether the draft reads the target's KV cells: ``share_kv`` is auto, on or off.

    Raises UsageError if it must, and the pair that was recorded does not share its cells.
    """
    sharing = share_kv != "off" and all(text.shared is not None for text in recording.texts)
    if share_kv == "on" and not sharing:
        raise ParameterError("share_kv is on but the recorded pair does not share its KV cells")
    return sharing


def _require(
    recording: Recording, sampling: SamplingParams, params: DecodeParams, share_kv: bool
) -> None:
    if KINDS[params.drafter].reads_text:
        raise UsageError("a recording holds drafts of the draft model only: use --drafter model")
    if sampling.temperature > _HOTTEST:
        raise UsageError(
            f"--temp is {sampling.temperature:g} but must be at most {_HOTTEST:g}: above it a "
            "recording has too few tokens of each position"
        )
    plain = SamplingParams()
    for name in _NEED_TOKENS:
        if getattr(sampling, name) != getattr(plain, name):
            raise ParameterError(
                f"{name} cannot be replayed: a recording has positions, not tokens"
            )
    if share_kv and any(text.shared is None for text in recording.texts):
        raise UsageError(
            "this pair does not share its KV cells", hint="replay it with --share-kv off"
        )


def _cut_start(text: TextRecording, n_positions: int) -> TextRecording:
    """A text without its first positions; at least two positions are left."""
    start = min(n_positions, text.n - 2)
    return replace(
        text,
        n_prompt=text.n_prompt + start,
        target=text.target[start:],
        own=text.own[start:],
        shared=None if text.shared is None else text.shared[:, start:],
        depth=None if text.depth is None else text.depth[:, start:],
    )


def _replay_text(text: TextRecording, way: _Way, rng: SeededRng) -> list[Round]:
    clock = _Clock()
    n_rest = 0 if way.is_truncated else text.n_rest

    def complete(rows: Logs) -> Rows:
        return with_rest(rows.astype(np.float32), n_rest, way.sampling.temperature or 1.0)

    shared = complete(text.shared) if way.share_kv and text.shared is not None else None
    target = _Target(complete(text.target), text, clock, way.costs)
    draft = _Draft(complete(text.own), shared, text, clock, way.costs)
    kv_copy = _KvCopy(target, draft) if way.share_kv else None
    n_vocab = target.vocab.n_tokens
    gumbel = GumbelNoise(rng.seed) if way.params.verification == "coupled" else None
    return list(
        Decoding(
            target,
            ModelDrafter(draft, n_vocab, kv_copy),
            [0] * text.n_prompt,
            Sampler(way.sampling, n_vocab, gumbel=gumbel),
            schedule_for(way.params, way.params.most_drafted, way.learned),
            rng,
            clock,
            verification=way.params.verification,
        )
    )


def with_rest(rows: Rows, n_rest: int, temperature: float) -> Rows:
    """Rows whose last column stands for ``n_rest`` tokens that share its mass evenly.

    At a temperature the column weighs as much as these tokens would together; ``n_rest`` 0 bans it.
    """
    out: Rows = rows.copy()
    if n_rest:
        out[..., -1] += (temperature - 1) * math.log(n_rest)
    else:
        out[..., -1] = -np.inf
    return out


def _fold(rounds: Sequence[Round]) -> Replayed:
    later = [r for r in rounds if not r.n_prompt]
    counts = count(later)
    n_tokens = sum(r.n_emitted for r in later)
    seconds = sum(r.times.total_s for r in later)
    return Replayed(
        n_tokens=n_tokens,
        alpha=counts.alpha,
        draft_yield=counts.draft_yield,
        tau=counts.tau,
        speedup=n_tokens / seconds if seconds else 1.0,
        alpha_at=alpha_by_place(*by_place(later)),
    )


def make_synthetic(alpha: float, n: int = 3000) -> Recording:
    """A recording of ``n`` positions at which each draft token has the acceptance rate ``alpha``.

    p is sure of one token, q gives it ``alpha``: at temperature 1, sum min(p, q) = alpha.
    """
    if not 0 < alpha <= 1:
        raise UsageError(f"--alpha is {alpha} but must be above 0 and at most 1")
    with np.errstate(divide="ignore"):
        p = np.log(np.array([1.0, 0.0, 0.0], np.float64))
        q = np.log(np.array([alpha, 1 - alpha, 0.0], np.float64))
    rows = [np.tile(row.astype(np.float16), (n, 1)) for row in (p, q)]
    text = TextRecording(
        kind="synthetic",
        temperature=1.0,
        n_prompt=1,
        n_rest=0,
        target=rows[0],
        own=rows[1],
        shared=rows[1][None],
        depth=np.ones((1, n), np.int8),
    )
    return Recording({"alpha": alpha}, (text,))
