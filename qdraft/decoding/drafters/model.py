"""A draft model, with its own KV cells or with the target's."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from qdraft.decoding.drafters.forced import offer_forced
from qdraft.decoding.drafters.protocol import Offers, Verified
from qdraft.decoding.engine import TokenSequence
from qdraft.decoding.policy.gate import Gate
from qdraft.decoding.records import Draft
from qdraft.decoding.rng import Rng
from qdraft.decoding.sampling import Row, Sampler
from qdraft.errors import ConstraintError, LogitsError

log = logging.getLogger(__name__)


class KvCopy(Protocol):
    """Copies the target's KV cells into the draft's sequence."""

    def copy(self, start: int) -> None:
        """Replace all of the draft's cells from ``start`` on with the target's."""
        ...


class ModelDrafter:
    """Drafts by decoding a second model one token at a time.

    With ``kv_copy`` the draft's cache starts each round as a copy of the target's: it never
    reads the prompt, and sees what the target saw. Without it the draft keeps its own accepted
    cells, and reads what is missing (the prompt at first, the last draft token and the bonus
    token after a full acceptance) as one batch with the next draft.

    A draft with a recurrent state goes back to its checkpoint after a rejection: to the target's
    state as it was copied, or to its own after the first row of the round, which has read nothing
    uncertain. So it reads the accepted tokens again in one batch with its next row.

    Rows are fitted to ``n_vocab`` tokens, the target's vocabulary.
    """

    source = "model"

    def __init__(
        self, sequence: TokenSequence, n_vocab: int, kv_copy: KvCopy | None = None
    ) -> None:
        self.sequence = sequence
        self._n_vocab = n_vocab
        self._n_own_vocab = sequence.vocab.n_tokens
        self._kv_copy = kv_copy
        self._n_shared = 0  # cells at the start that are the target's
        self._n_prompt = 0
        self._has_copied = False  # in this text
        self._has_warned = False

    def begin(self, prompt: Sequence[int]) -> None:
        self._n_shared = min(self._n_shared, self.sequence.keep(prompt[:-1]))
        self._n_prompt = len(prompt)
        self._has_copied = self._has_warned = False

    def draft(self, context: Sequence[int], gate: Gate, sampler: Sampler, rng: Rng) -> Draft:
        offers = Offers()
        offer_forced(offers, context, gate, sampler)
        n_forced = len(offers.tokens)
        if not gate.more(self.source, self.n_behind(context) + n_forced):
            return offers.as_draft("", 0, 0)
        room = self.room(context)
        if room <= n_forced or not self.can_read(context):
            return offers.as_draft("", 0, 0)
        n_caught_up = self.catch_up(context)
        n_good = self.sequence.n_past
        feed = [*context[n_good:], *offers.tokens]
        n_rows = 0
        dropped = False
        try:
            while len(offers.tokens) < room and (n_rows == 0 or gate.more(self.source)):
                if n_rows == 1 and self._kv_copy is None:
                    self.sequence.checkpoint()
                row = self._fit(self.sequence.eval(feed, 1)[0])
                n_rows += 1
                proposal = sampler.propose(row, context, offers.tokens)
                # Sampled drafts record theirs always: the acceptance table learns from it.
                weighed = gate.weighs_confidence or not sampler.chooses
                confidence = proposal.confidence if weighed else 1.0
                if not gate.take(self.source, confidence):
                    break
                token = proposal.token(rng)
                offers.add(token, proposal.probs, confidence)
                if self.sequence.vocab.is_end(token):
                    break
                feed = [token, *offer_forced(offers, context, gate, sampler)]
        except ConstraintError:
            pass  # the target says so if the text gets here
        except LogitsError:
            # Tokens that were drawn stay: dropping them for what followed would change their law.
            # The cells of this round go, because one of them may have made the row bad.
            self.sequence.truncate(n_good)
            dropped = True
        return offers.as_draft(self.source, n_rows, n_caught_up, dropped=dropped)

    def accept(self, verified: Verified) -> None:
        # Whatever is cached before the last token of the text is right: a rejected draft token
        # sits at the position of that token or after it.
        self.sequence.truncate(len(verified.tokens) - 1)

    def n_behind(self, context: Sequence[int]) -> int:
        """Tokens of ``context`` that the draft has to read before it drafts after it."""
        return 0 if self._kv_copy else len(context) - 1 - self.sequence.n_past

    def can_read(self, context: Sequence[int]) -> bool:
        """False for a text with tokens that only the target's vocabulary has."""
        return self._n_own_vocab >= self._n_vocab or max(context) < self._n_own_vocab

    def room(self, context: Sequence[int]) -> int:
        """How many tokens the draft's context has room for; warns once when it is full."""
        # The last draft token is never decoded here, so it needs no cell.
        room = self.sequence.n_ctx - len(context) + 1
        if room < 1 and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the draft's context of %d tokens is full: the target goes on alone",
                self.sequence.n_ctx,
            )
        return room

    def catch_up(self, context: Sequence[int]) -> int:
        """Bring the cache up to the token before the last one of the text, or close to it.

        Returns how many tokens the draft reads for that, or gets with the first copy of a text.
        """
        if self._kv_copy:
            n_before, is_first = self._n_shared, not self._has_copied
            self._kv_copy.copy(n_before)
            self._n_shared, self._has_copied = self.sequence.n_past, True
            n_missing = len(context) - 1 - self._n_shared  # if the target's state went back further
            return n_missing + (self._n_shared - n_before if is_first else 0)
        n_past, n_needed = self.sequence.n_past, len(context) - 1
        n_prompt = min(self._n_prompt, n_needed)
        if n_past < n_prompt:
            # The prompt in a batch of its own, as the target read it: other batch shapes give
            # other roundings, which stay in the cells and cost acceptance.
            self.sequence.eval(context[n_past:n_prompt], 0)
        return n_needed - n_past

    def _fit(self, row: Row) -> Row:
        """A row over the target's vocabulary: cut, or padded with what is never drawn."""
        if len(row) >= self._n_vocab:
            return row[: self._n_vocab]
        return np.pad(row, (0, self._n_vocab - len(row)), constant_values=-np.inf)
