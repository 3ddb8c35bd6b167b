"""The loop of speculative decoding: draft, verify, accept, cut, commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from qdraft.decoding.drafters.contract import CountedGate, check_draft
from qdraft.decoding.drafters.protocol import Drafter, Verified
from qdraft.decoding.engine import Features, TokenSequence
from qdraft.decoding.logprobs import Logprobs, logprobs_of
from qdraft.decoding.policy.schedule import Schedule
from qdraft.decoding.records import MAX_N_DRAFT, MAX_N_REREAD, RULES, FinishReason, Round, Times
from qdraft.decoding.rng import Rng
from qdraft.decoding.sampling import Sampler
from qdraft.decoding.verification import verify
from qdraft.errors import ContextError, UsageError, require

Clock = Callable[[], float]


class Reader(Protocol):
    """Reads the tokens of a text in order, and says where the text ends."""

    def take(self, tokens: Sequence[int]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Read the tokens of one round, up to and including the first that ends the text.

        Returns the tokens that were read, and the reason if one of them ended the text. The
        tokens after that one are never part of the text, and the reader must not keep them.
        """
        ...


class TokenReader:
    """Reads token ids; ends the text at a token for which ``is_end`` is true (default: none)."""

    def __init__(self, is_end: Callable[[int], bool] = lambda token: False) -> None:
        self._is_end = is_end

    def take(self, tokens: Sequence[int]) -> tuple[tuple[int, ...], FinishReason | None]:
        for i, token in enumerate(tokens):
            if self._is_end(token):
                return tuple(tokens[: i + 1]), FinishReason.END_OF_GENERATION
        return tuple(tokens), None


@dataclass(slots=True, eq=False)
class Decoding:
    """One text in the making, a round at a time: call ``step``, or iterate to the end.

    The emitted tokens have the law of the target alone under ``sampler``, whatever ``drafter``
    proposes. ``verification`` is the rule: "block" or "token", or "coupled" for a sampler with
    Gumbel noise. ``n_predict`` -1 sets no limit. ``n_logprobs`` is the number of likeliest tokens
    to report for each emitted one. Several texts may take turns, each on sequences of its own.

    Between rounds the target's cache holds all ``tokens`` but the last one, which is row 0 of the
    next verify batch. The first round reads the part of the prompt that the cache does not hold.
    After a rejection a recurrent state may have gone back further: the tokens in between then stand
    in front of the next batch. If they are more than ``most_reread``, the round drafts nothing.

    Raises ContextError if ``prompt`` (token ids, at least one) leaves no room for a token, and
    UsageError for another rule, or if the drafter needs features and ``target`` offers none.
    """

    target: TokenSequence
    drafter: Drafter
    prompt: Sequence[int]
    sampler: Sampler
    schedule: Schedule
    rng: Rng
    clock: Clock
    reader: Reader = field(default_factory=TokenReader)
    n_predict: int = -1
    verification: str = "block"
    n_logprobs: int = 0
    most_reread: int = MAX_N_REREAD
    tokens: list[int] = field(init=False)
    finish_reason: FinishReason | None = field(init=False)
    n_rounds: int = field(default=0, init=False)
    features: Callable[[int], NDArray[np.float32]] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        rule = self.verification
        require(rule in RULES, "verification", rule, f"one of {', '.join(RULES)}")
        if (rule == "coupled") != (self.sampler.gumbel is not None):
            raise UsageError(
                f"verification is {rule} but only coupled needs a sampler with Gumbel noise"
            )
        n_prompt, n_ctx = len(self.prompt), self.target.n_ctx
        if n_prompt >= n_ctx:
            raise ContextError(
                f"the prompt has {n_prompt} tokens, but the context holds {n_ctx}",
                hint="raise -c, or shorten the prompt; leave room for at least one token",
            )
        if getattr(self.drafter, "needs_features", False):
            if not isinstance(self.target, Features):
                raise UsageError("the drafter needs hidden states, but the target offers none")
            self.features = self.target.features
        self.tokens = list(self.prompt)
        self.finish_reason = FinishReason.LENGTH if self.n_predict == 0 else None
        self.target.keep(self.prompt[:-1])
        self.drafter.begin(self.prompt)

    def __iter__(self) -> Iterator[Round]:
        while self.check_end() is None:
            yield self.step()

    def check_end(self) -> FinishReason | None:
        """Why there is no next round, if there is none: other texts may have taken the room."""
        if self.finish_reason is None and self._room() < 1:
            self.finish_reason = FinishReason.CONTEXT_FULL
        return self.finish_reason

    def step(self) -> Round:
        """Make one round.

        Raises LogitsError if the next token needs a bad row of the target, DrafterError if the
        draft is not what its drafter must offer, and UsageError after the end.
        """
        if reason := self.check_end():
            raise UsageError(f"the text has ended: {reason.value}")
        tokens, target, sampler, rng = self.tokens, self.target, self.sampler, self.rng
        index, n_context, room = self.n_rounds, len(tokens), self._room()
        pending = tokens[target.n_past :]
        n_reread = len(pending) - 1 if index else 0

        # Draft x_1 .. x_k from q_1 .. q_k. The gate chooses k, the papers' gamma. The first round
        # has k = 0, so that the first token does not wait until the draft has read the prompt.
        started = self.clock()
        may_draft = index and n_reread <= self.most_reread
        n_max = min(room - 1, MAX_N_DRAFT) if may_draft else 0
        gate = CountedGate(self.schedule.gate(n_max, n_reread), n_max)
        draft = self.drafter.draft(tokens, gate, sampler, rng)
        if draft.tokens:
            check_draft(draft, min(gate.n_admitted, room - 1), target.vocab.n_tokens)

        # Verify: one decode of k + 1 rows gives p_1 .. p_(k+1).
        drafted = self.clock()
        if draft.tokens:
            target.checkpoint(draft.n)
        rows = target.eval([*pending, *draft.tokens], draft.n + 1)
        verified = self.clock()

        # Accept a prefix and one token more: Leviathan alg. 1, Sun alg. 2, or the choices of both.
        verdict = verify(draft, rows, tokens, sampler, rng, self.verification)

        # Cut at the first token that ends the text, before anything is counted or cached.
        emitted, finish = self.reader.take(verdict.tokens)
        if finish is None and len(emitted) >= room:
            full = n_context + room >= target.n_ctx
            finish = FinishReason.CONTEXT_FULL if full else FinishReason.LENGTH

        logprobs = self._report(rows, emitted)

        # Commit: both caches keep every token but the last, as far as they can.
        tokens += emitted
        features = None
        if self.features:
            n_kept = len(pending) + len(emitted) - 1
            features = self.features(len(pending) + draft.n)[:n_kept]
        target.truncate(len(tokens) - 1)
        self.drafter.accept(Verified(tokens, min(verdict.n_accepted, len(emitted)), features))
        times = Times(drafted - started, verified - drafted, self.clock() - verified)
        n_prompt = len(pending) if index == 0 else 0
        kept = draft.without_probs()
        round = Round(
            index, n_context, n_prompt, kept, verdict, emitted, finish, times, n_reread, logprobs
        )
        self.schedule.observe(round)
        self.n_rounds, self.finish_reason = index + 1, finish
        return round

    def _report(self, rows: NDArray[np.float32], emitted: Sequence[int]) -> tuple[Logprobs, ...]:
        """The log-probabilities of a round, if anyone wants them; row i gave token i."""
        if not self.n_logprobs:
            return ()
        return tuple(logprobs_of(rows[i], x, self.n_logprobs) for i, x in enumerate(emitted))

    def _room(self) -> int:
        """How many tokens the text may still grow by."""
        n_left = self.target.n_ctx - len(self.tokens)
        if self.n_predict < 0:
            return n_left
        return min(n_left, self.n_predict - (len(self.tokens) - len(self.prompt)))
