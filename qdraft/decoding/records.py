"""The records that the parts exchange: frozen, with no behaviour beyond look-ups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from qdraft.decoding.constraint import ConstraintSpec
from qdraft.decoding.drafters.kinds import KINDS
from qdraft.decoding.logprobs import Logprobs
from qdraft.errors import require

# Tokens that a verify batch repeats at most, in front of the draft, after a recurrent state went
# back to a checkpoint. Beyond it a round drafts nothing: its pass over the weights reads these
# tokens and emits one, as the target alone would. Not measured: chosen so that the rows of a batch
# stay few on a CPU, where each costs 1 to 10 % of a pass.
MAX_N_REREAD = 16

# One verify batch holds n_draft + 1 rows of n_vocab floats: this bounds its memory.
MAX_N_DRAFT = 63
RULES = ("block", "token", "coupled")  # of verification


class FinishReason(str, Enum):
    """Why a text ended."""

    END_OF_GENERATION = "end_of_generation"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    CONTEXT_FULL = "context_full"
    INTERRUPTED = "interrupted"
    ERROR = "error"


class Origin(str, Enum):
    """What an emitted token came from."""

    DRAFT = "draft"  # drafted, verified, accepted
    RESIDUAL = "residual"  # replaces the first rejected draft token
    BONUS = "bonus"  # follows a fully accepted draft
    TARGET = "target"  # a round without a draft


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """A distribution over token ids.

    ``probs`` has shape [n] and sums to 1. ``ids`` holds the token of each entry, ascending; if it
    is None, ``probs`` is indexed by token id.
    """

    probs: NDArray[np.float64]
    ids: NDArray[np.intp] | None = None

    def prob(self, token: int) -> float:
        """The probability of ``token``; 0 outside the support."""
        return float(self.probs_of(np.array([token], dtype=np.intp))[0])

    def probs_of(self, tokens: NDArray[np.intp]) -> NDArray[np.float64]:
        """The probabilities of ``tokens``, shape [n]; 0 outside the support."""
        if self.ids is None:
            entries = np.minimum(tokens, len(self.probs) - 1)
            known = tokens < len(self.probs)
        else:
            entries = np.minimum(np.searchsorted(self.ids, tokens), len(self.ids) - 1)
            known = self.ids[entries] == tokens
        return np.where(known, self.probs[entries], 0.0)

    def token(self, entry: int) -> int:
        """The token id of an entry of ``probs``."""
        return entry if self.ids is None else int(self.ids[entry])

    def dense(self, n_vocab: int) -> NDArray[np.float64]:
        """The same distribution as an array indexed by token id, shape [n_vocab]."""
        if self.ids is None:
            return np.pad(self.probs, (0, max(0, n_vocab - len(self.probs))))[:n_vocab]
        out = np.zeros(n_vocab)
        out[self.ids] = self.probs
        return out


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """The k tokens proposed for one round, and what the drafter did for them.

    ``probs[i]`` is exactly the distribution q that ``tokens[i]`` was drawn from, after all
    truncation; ``probs`` is None if the tokens were not drawn (a point mass each). ``source``
    names the drafter. ``confidence[i]`` is the largest probability of q at ``tokens[i]``, or
    another measure from 0 to 1. ``n_rows`` counts the draft rows that the round paid for,
    ``n_caught_up`` the tokens of the text that the drafter had to read first. ``dropped`` is True
    if bad logits made the drafter give the round up. ``forced`` holds the places of the tokens that
    a constraint forces, which cost no row.
    """

    tokens: tuple[int, ...] = ()
    probs: tuple[Distribution, ...] | None = None
    source: str = ""
    confidence: tuple[float, ...] = ()
    n_rows: int = 0
    n_caught_up: int = 0
    dropped: bool = False
    forced: tuple[int, ...] = ()

    @property
    def n(self) -> int:
        """k, the number of draft tokens: gamma in Leviathan et al., K in Chen et al."""
        return len(self.tokens)

    def without_probs(self) -> Draft:
        """This draft without its distributions, to keep: each may hold n_vocab floats."""
        return self if self.probs is None else replace(self, probs=None)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification decided.

    ``tokens`` are the accepted draft tokens and the one token after them, before the text's end
    cuts them. ``n_tested`` counts the draft tokens that were judged: the accepted ones and the
    first rejected one. ``origin`` is where the last token came from.
    """

    tokens: tuple[int, ...]
    n_tested: int
    origin: Origin

    @property
    def n_accepted(self) -> int:
        """How many draft tokens stand."""
        return len(self.tokens) - 1


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one round: drafting, the target's decode, and the rest."""

    draft_s: float
    verify_s: float
    other_s: float

    @property
    def target_s(self) -> float:
        """The target's part: its decode and the rest of the round, without the draft."""
        return self.verify_s + self.other_s

    @property
    def total_s(self) -> float:
        return self.draft_s + self.verify_s + self.other_s


@dataclass(frozen=True, slots=True)
class Round:
    """One round: draft, verify, accept, cut, commit.

    ``n_context`` is the length of the text before the round. ``n_prompt`` counts the prompt
    tokens that the target read in this round (only the first round reads any). ``draft`` comes
    without its distributions. ``tokens`` are the emitted ones: those of ``verdict`` up to the
    first that ends the text. The counts below follow that cut; those of ``verdict`` do not.
    ``n_reread`` counts the tokens that the target read again in this round, because its recurrent
    state had to go back further than the text. ``logprobs`` are those of each token, if the text
    was asked for them.
    """

    index: int
    n_context: int
    n_prompt: int
    draft: Draft
    verdict: Verdict
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    times: Times
    n_reread: int = 0
    logprobs: tuple[Logprobs, ...] = ()

    @property
    def n_rows(self) -> int:
        """Rows of the target's decode: the tokens read again, the last of the text, the draft."""
        return self.n_reread + 1 + self.draft.n

    @property
    def source(self) -> str:
        """The drafter that the draft came from; empty without a draft."""
        return self.draft.source

    @property
    def n_draft(self) -> int:
        """Tokens drafted."""
        return self.draft.n

    @property
    def n_forced(self) -> int:
        """Draft tokens that a constraint forces."""
        return len(self.draft.forced)

    @property
    def n_tested(self) -> int:
        """Draft tokens judged, as far as the text goes."""
        return min(self.verdict.n_tested, len(self.tokens))

    @property
    def n_accepted(self) -> int:
        """Draft tokens emitted."""
        return min(self.verdict.n_accepted, len(self.tokens))

    @property
    def n_emitted(self) -> int:
        """Tokens that the text grew by."""
        return len(self.tokens)

    def origin_of(self, place: int) -> Origin:
        """Where ``tokens[place]`` came from."""
        return Origin.DRAFT if place < self.n_accepted else self.verdict.origin


@dataclass(frozen=True, slots=True)
class Chunk:
    """One emitted token and the text that it released.

    ``text`` may be empty: for a control token, while a character is incomplete, or while the text
    may be the start of a stop string. If text is still held back at the end, a last chunk with
    ``token`` None brings it. ``reasoning`` is what the token released of the reasoning, if that is
    split from the text, and ``logprobs`` are those of the token, if the text was asked for them.
    """

    text: str
    token: int | None
    origin: Origin | None
    round_index: int
    reasoning: str = ""
    logprobs: Logprobs | None = None


_FINITE = (
    "temperature",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "top_n_sigma",
    "dynatemp_exp",
    "dry_base",
)
_RANGES = (
    ("xtc_probability", 0.0, 1.0),
    ("xtc_threshold", 0.0, 1.0),
    ("dynatemp_range", 0.0, 1e6),
    ("dry_multiplier", 0.0, 1e6),
    ("dry_base", 1.0, 1e6),
    ("dry_allowed_length", 0, 2**31 - 1),
    ("dry_penalty_last_n", -1, 2**31 - 1),
)


def _range_words(low: float, high: float) -> str:
    return f"from {low:g} to {high:g}" if high < 2 else f"{low:g} or more"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is chosen from a row of logits; the defaults are llama.cpp's.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1, ``min_p`` 0, ``typical_p`` 1,
    ``top_n_sigma`` up to 0, ``repeat_penalty`` 1 and penalties of 0 switch a step off. The
    penalties look at the last ``repeat_last_n`` tokens (-1: the whole text). ``logit_bias`` maps
    token ids to an additive bias; -inf bans a token.

    ``xtc_probability`` 0 or an ``xtc_threshold`` above 0.5 switches XTC off, ``dynatemp_range`` 0
    the dynamic temperature, and ``dry_multiplier`` 0 or ``dry_penalty_last_n`` 0 DRY, which looks
    at the last ``dry_penalty_last_n`` tokens (-1: the whole text).
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exp: float = 1.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _FINITE:
            require(math.isfinite(getattr(self, name)), name, getattr(self, name), "finite")
        for name, low, high in _RANGES:
            value = getattr(self, name)
            require(low <= value <= high, name, value, _range_words(low, high))
        require(self.temperature >= 0, "temperature", self.temperature, "0 or more")
        require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1 (off)")
        require(0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 (off) to 1")
        require(0 < self.typical_p <= 1, "typical_p", self.typical_p, "above 0, at most 1 (off)")
        require(self.repeat_penalty > 0, "repeat_penalty", self.repeat_penalty, "above 0")
        require(self.repeat_last_n >= -1, "repeat_last_n", self.repeat_last_n, "-1 or more")
        for token, bias in self.logit_bias.items():
            require(token >= 0, "logit_bias token", token, "0 or more")
            require(not math.isnan(bias) and bias < math.inf, "logit_bias", bias, "below +inf")
        require("" not in self.dry_sequence_breakers, "dry_sequence_breakers", '""', "not empty")

    @property
    def uses_xtc(self) -> bool:
        """True if XTC may take candidates away."""
        return self.xtc_probability > 0 and self.xtc_threshold <= 0.5

    @property
    def uses_dry(self) -> bool:
        """True if DRY may lower logits."""
        return self.dry_multiplier > 0 and self.dry_penalty_last_n != 0

    @property
    def greedy(self) -> bool:
        """True if the row alone determines the token: temperature 0 without XTC and a range."""
        return self.temperature == 0 and not self.uses_xtc and self.dynatemp_range == 0


@dataclass(frozen=True, slots=True)
class DecodeParams:
    """How much to generate, and how to draft.

    ``n_predict`` -1 generates until the text ends or the context is full.

    ``drafter`` is a kind of ``drafters.kinds``: "model" (the pair's draft), "ngram" (repetitions
    in the text), or "hybrid" (repetitions if they pay off, else the model). ``draft_policy`` is
    "auto" (as many tokens as pay off by measured costs, or none), "fixed" (always ``n_draft``), or
    "confidence" (until the largest probability of the draft falls below ``p_min``). ``n_draft`` is
    the most tokens to draft in a round; 0 runs the target alone, None is 63 for auto and 4
    otherwise. ``p_min`` holds under every policy.

    ``verification`` is the rule above temperature 0: "block", "token" or "coupled", under which a
    seed gives the same text whatever is drafted. ``exact`` keeps drafts so short that the target's
    rows are bit for bit those of decoding one token at a time, as a probe determines; if there are
    no such drafts, the target runs alone.

    ``logprobs`` is the number of likeliest tokens to report for each emitted token, from the rows
    that verified it; 0 reports nothing.

    ``stop`` are strings that end the text and are not part of it; one may name control tokens.
    ``special`` makes the names of control tokens part of the text. ``seed`` -1 draws one. Under
    "block" and "token" a seed repeats a text only if the draft lengths are the same, which "auto"
    does not promise. ``constraint`` is what the text must match (extra ``json``).
    """

    n_predict: int = -1
    drafter: str = "model"
    n_draft: int | None = None
    draft_policy: str = "auto"
    p_min: float | None = None
    verification: str = "block"
    exact: bool = False
    stop: tuple[str, ...] = ()
    special: bool = False
    seed: int = -1
    logprobs: int = 0
    constraint: ConstraintSpec | None = None

    def __post_init__(self) -> None:
        require(self.n_predict >= -1, "n_predict", self.n_predict, "-1 (no limit) or more")
        require(
            0 <= (self.n_draft or 0) <= MAX_N_DRAFT, "n_draft", self.n_draft, f"0 to {MAX_N_DRAFT}"
        )
        require(0 <= (self.p_min or 0) <= 1, "p_min", self.p_min, "from 0 (off) to 1")
        require(self.drafter in KINDS, "drafter", self.drafter, f"one of {', '.join(KINDS)}")
        policy, policies = self.draft_policy, ("auto", "fixed", "confidence")
        require(policy in policies, "draft_policy", policy, f"one of {', '.join(policies)}")
        require(-1 <= self.seed < 2**64, "seed", self.seed, "-1 (draw one) or 0 to 2^64 - 1")
        rule = self.verification
        require(rule in RULES, "verification", rule, f"one of {', '.join(RULES)}")
        require(0 <= self.logprobs <= 1000, "logprobs", self.logprobs, "from 0 (off) to 1000")
        require("" not in self.stop, "stop", '""', "a string that is not empty")

    @property
    def most_drafted(self) -> int:
        """``n_draft``, or the default of the policy: as many as pay off for auto, else 4."""
        default = MAX_N_DRAFT if self.draft_policy == "auto" else 4
        return default if self.n_draft is None else self.n_draft
