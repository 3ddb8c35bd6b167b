"""A draft model with its own KV cache."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from qdraft.core.acceptance import draw
from qdraft.core.rng import Rng
from qdraft.core.sampling import Sampler
from qdraft.engine.protocol import Engine
from qdraft.errors import LogitsError
from qdraft.types import Distribution, Draft

log = logging.getLogger(__name__)


class ModelDrafter:
    """Drafts by decoding a second model one token at a time.

    The cache always holds a prefix of the text: accepted cells are kept, and what is
    missing (the whole prompt at first, the last draft token and the bonus token after
    a full acceptance) is fed as one batch with the next draft. Rows are cut to
    ``n_vocab`` tokens, the target's vocabulary.
    """

    source = "model"

    def __init__(self, engine: Engine, n_vocab: int) -> None:
        self.engine = engine
        self._n_vocab = n_vocab
        self._n_prompt = 0
        self._told_full = False

    def begin(self, prompt: Sequence[int]) -> None:
        self.engine.truncate(0)
        self._n_prompt = len(prompt)
        self._told_full = False

    def draft(
        self, context: Sequence[int], n_draft: int, sampler: Sampler, rng: Rng, *, p_min: float = 0
    ) -> Draft:
        room = self.engine.n_ctx - len(context) + 1  # the last draft token is never decoded here
        if room < n_draft and not self._told_full:
            self._told_full = True
            log.warning(
                "the draft's context of %d tokens is full: the target goes on alone",
                self.engine.n_ctx,
            )
        tokens: list[int] = []
        probs: list[Distribution] = []
        n_before = self.engine.n_past
        try:
            if n_before == 0 and room > 0:
                # The prompt in a batch of its own, as the target read it: other batch shapes
                # give other roundings, which stay in the cells and cost acceptance.
                self.engine.eval(context[: self._n_prompt], 0)
            feed = context[self.engine.n_past :]
            for _ in range(min(n_draft, room)):
                row = self.engine.eval(feed, 1)[0, : self._n_vocab]
                if p_min > 0 and sampler.confidence(row) < p_min:
                    break
                if sampler.greedy:
                    token = sampler.argmax(row, context, tokens)
                else:
                    probs.append(sampler.distribution(row, context, tokens))
                    token = draw(probs[-1], rng)
                tokens.append(token)
                if self.engine.vocab.is_end(token):
                    break
                feed = [token]
        except LogitsError:
            # Whatever made the row bad may sit in the cells of this round: take them out.
            self.engine.truncate(n_before)
            return Draft(source=self.source, dropped=True)
        return Draft(tuple(tokens), None if sampler.greedy else tuple(probs), self.source)

    def accept(self, n_accepted: int, context: Sequence[int]) -> None:
        # All but the last token of the new context is known to be cached correctly, as far
        # as it is cached: a rejected draft token sits at that last place or after it.
        self.engine.truncate(min(self.engine.n_past, len(context) - 1))

    def close(self) -> None:
        self.engine.close()
