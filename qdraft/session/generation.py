"""One text in the making: its chunks, and everything that is known of it so far."""

from __future__ import annotations

import secrets
import time
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING

from qdraft.decoding.loop import Decoding
from qdraft.decoding.policy.schedule import schedule_for
from qdraft.decoding.records import Chunk, DecodeParams, FinishReason, Round, SamplingParams
from qdraft.decoding.rng import SeededRng
from qdraft.decoding.sampling import Sampler
from qdraft.decoding.summary import Summary, summarize
from qdraft.errors import QDraftError
from qdraft.session.bit_identity import BitIdentity
from qdraft.session.check import Check, check
from qdraft.session.text import TextReader

if TYPE_CHECKING:
    from qdraft.session.pair import Pair


class Generation:
    """One text: iterate once for its chunks; ``text``, ``tokens`` and ``rounds`` grow with it."""

    def __init__(
        self, pair: Pair, prompt: Sequence[int], sampling: SamplingParams, params: DecodeParams
    ) -> None:
        self._pair = pair
        self._params = params
        self._rng = SeededRng(secrets.randbits(32) if params.seed < 0 else params.seed)
        self._sampler = Sampler(sampling, pair.target_engine.vocab.n_tokens)
        self._chunks = self._run()
        self._ttft_s: float | None = None
        self._failed = False
        self.prompt = tuple(prompt)
        self.seed = self._rng.seed
        self.rounds: list[Round] = []
        self.text = ""
        self.bit_identity: BitIdentity | None = None  # under ``exact``, once the text has begun

    def __iter__(self) -> Iterator[Chunk]:
        """The chunks; leaving the loop early ends the text, which is then INTERRUPTED."""
        try:
            yield from self._chunks
        finally:
            self.close()

    def close(self) -> None:
        """End the text here, so that the pair is free for the next one."""
        self._chunks.close()

    def read(self) -> str:
        """Generate to the end and return the whole text."""
        for _ in self:
            pass
        return self.text

    @property
    def tokens(self) -> list[int]:
        """The emitted token ids; an end-of-generation token is one of them."""
        return [token for round in self.rounds for token in round.tokens]

    @property
    def finish_reason(self) -> FinishReason:
        """Why the text ended; INTERRUPTED until it has, ERROR where an error ended it."""
        if self._params.n_predict == 0:
            return FinishReason.LENGTH
        last = self.rounds[-1].finish_reason if self.rounds else None
        return last or (FinishReason.ERROR if self._failed else FinishReason.INTERRUPTED)

    @property
    def summary(self) -> Summary:
        """The figures so far."""
        auto = self._params.draft_policy == "auto" and self._params.n_draft != 0
        drafts = self._params.drafter == "ngram" or self._pair.draft_engine is not None
        costs = self._pair.learned.costs if auto and drafts else None
        source = "ngram" if self._params.drafter == "ngram" else "model"
        return summarize(self.rounds, self._ttft_s, costs, source)

    def check(self) -> Check:
        """Compare with the target alone; see ``qdraft.Check``."""
        with self._pair.exclusive():
            return check(self._pair.target_engine, self.prompt, self.rounds, self._sampler)

    def _n_most(self) -> int:
        """The longest draft of this text; probes for ``exact`` when nothing is kept of that."""
        wanted = self._params.most_drafted
        nothing = self._params.drafter == "model" and self._pair.draft_engine is None
        if nothing or not (self._params.exact and wanted):
            return 0 if nothing else wanted
        self.bit_identity = self._pair.bit_identity(max(8, wanted))
        return min(wanted, self.bit_identity.n_draft)

    def _run(self) -> Generator[Chunk]:
        pair, params = self._pair, self._params
        reader = TextReader(pair.target_engine.vocab, params.stop)
        started = time.perf_counter()
        with pair.exclusive():
            pair.running = self
            try:
                n_most = self._n_most()
                if n_most:
                    pair.learned.start_text()
                for engine in (pair.target_engine, pair.draft_engine):
                    if engine:
                        engine.truncate(0)  # this text starts from empty caches
                for round in Decoding(
                    pair.target_engine,
                    pair.drafter(params, n_most),
                    self.prompt,
                    self._sampler,
                    schedule_for(params, n_most, pair.learned),
                    self._rng,
                    time.perf_counter,
                    reader,
                    params.n_predict,
                    params.verification,
                ):
                    self.rounds.append(round)
                    if round.index:
                        pair.watch(round)
                    self.text += "".join(reader.pieces)  # all of the round, however it is read
                    if self._ttft_s is None:
                        self._ttft_s = time.perf_counter() - started
                    for place, text in enumerate(reader.pieces):
                        token, origin = round.tokens[place], round.origin_of(place)
                        yield Chunk(text, token, origin, round.index)
                pair.keep_costs()
            except QDraftError:
                self._failed = True
                raise
            finally:
                pair.running = None
                held = reader.flush()
                self.text += held
            if held:
                yield Chunk(held, None, None, self.rounds[-1].index)
