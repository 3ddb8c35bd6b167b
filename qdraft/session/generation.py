"""One text in the making: its chunks, and everything known about it so far."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from qdraft.constraints.matcher import Begin, TextConstraint, from_the_start
from qdraft.decoding.constraint import ConstraintSpec
from qdraft.decoding.drafters.kinds import KINDS
from qdraft.decoding.gumbel import GumbelNoise
from qdraft.decoding.loop import Decoding
from qdraft.decoding.policy.schedule import schedule_for
from qdraft.decoding.records import (
    MAX_N_REREAD,
    Chunk,
    DecodeParams,
    FinishReason,
    Round,
    SamplingParams,
)
from qdraft.decoding.rng import SeededRng
from qdraft.decoding.sampling import Processor, Sampler
from qdraft.decoding.summary import Summary, summarize
from qdraft.errors import CancelledError, ContextError, QDraftError, UsageError
from qdraft.llama.spec import Both
from qdraft.session.bit_identity import BitIdentity
from qdraft.session.breakers import breakers_for
from qdraft.session.check import Check, check
from qdraft.session.reasoning import (
    EndOfReasoning,
    ReasoningSplitter,
    Split,
    find_marks,
    is_open,
    mark_tokens,
)
from qdraft.session.text import TextReader

if TYPE_CHECKING:
    from qdraft.session.session import Session

# Tokens of a draft that ``exact`` probes unless more are asked for: each width takes as many single
# decodes as it has rows, at four depths.
_LONGEST_EXACT = 8


class Generation:
    """One text: iterate once for its chunks, or call ``step`` for those of the next round.

    ``text``, ``tokens`` and ``rounds`` grow with it. A text holds the pair's lock only during a
    step, so several texts of a pair can be in the making, each on its own sequences.
    """

    def __init__(
        self,
        session: Session,
        prompt: Sequence[int],
        sampling: SamplingParams,
        params: DecodeParams,
        processors: Sequence[Processor] = (),
        *,
        split_reasoning: bool = False,
    ) -> None:
        self.session = session
        self._pair = session.pair
        self._params = params
        self._rng = SeededRng(secrets.randbits(32) if params.seed < 0 else params.seed)
        gumbel = GumbelNoise(self._rng.seed) if params.verification == "coupled" else None
        vocab = self._pair.vocab
        self._sampler = Sampler(
            sampling,
            vocab.n_tokens,
            processors,
            gumbel,
            breakers_for(sampling, vocab),
            None if params.constraint is None else self._constrain(params.constraint, prompt),
        )
        marks = find_marks(vocab) if split_reasoning else None
        shown = mark_tokens(vocab, marks) if marks else ()
        self._reader = TextReader(vocab, params.stop, special=params.special, shown=shown)
        self._splitter: ReasoningSplitter | None = None
        if marks:
            self._splitter = ReasoningSplitter(marks, opened=is_open(vocab, marks, prompt))
        self._decoding: Decoding | None = None
        self._started_at: float | None = None
        self._ttft_s: float | None = None
        self._ended = False
        self._closed = False  # by ``close``, which may be before the end
        self._failed = False
        self._holds_threads = False
        self.prompt = tuple(prompt)
        self.sampling = sampling
        self.constraint = params.constraint
        self.seed = self._rng.seed
        self.rounds: list[Round] = []
        self.text = ""
        self.reasoning = ""  # if it is split from the text
        # The number of prompt tokens that each cache held when the text began; None for a draft
        # that has no part in the text.
        self.n_reused: Both[int] = Both(0)
        self.bit_identity: BitIdentity | None = None  # under ``exact``, once the text has begun

    def _constrain(self, spec: ConstraintSpec, prompt: Sequence[int]) -> TextConstraint:
        """Return the constraint, which begins after the reasoning if the prompt has begun it."""
        vocab = self._pair.vocab
        marks = find_marks(vocab)
        begin: Begin = from_the_start
        if marks and is_open(vocab, marks, prompt):
            begin = EndOfReasoning(vocab, marks)
        return TextConstraint(spec, self._pair.constraint_vocabulary, len(prompt), begin)

    def __iter__(self) -> Iterator[Chunk]:
        """Give the chunks. Leaving the loop early ends the text, which is then INTERRUPTED."""
        try:
            while chunks := self.step():
                for chunk in chunks:
                    yield chunk
                    if self._closed:
                        return
        finally:
            self.close()

    def step(self) -> list[Chunk]:
        """Make one round and return its chunks; none if the text has ended.

        A text whose room other texts have taken ends with CONTEXT_FULL. Raises ContextError if the
        prompt leaves no room, CancelledError if ``Pair.cancel_if`` says so, EngineError if the pair
        is closed or has no sequence left, and what decoding raises. The text has then ended.
        """
        with self._pair.lock:
            if self._ended:
                return []
            try:
                decoding = self._decoding or self._start()
                if decoding.check_end():  # the caller wants no tokens, or other texts took the room
                    return self._finish()
                return self._take(decoding.step())
            except BaseException as error:
                self._failed = isinstance(error, QDraftError)
                intact = isinstance(error, (CancelledError, ContextError, UsageError))
                if isinstance(error, KeyboardInterrupt) and self.session.sequences:
                    intact = self.session.sequences.are_whole
                self._end(intact=intact)
                raise

    def close(self) -> None:
        """End the text here and give its cells back; harmless when repeated."""
        with self._pair.lock:
            self._closed = True
            self._end()

    def read(self) -> str:
        """Generate to the end and return the whole text."""
        for _ in self:
            pass
        return self.text

    @property
    def tokens(self) -> list[int]:
        """The ids of the emitted tokens, with the end-of-generation token if there is one."""
        return [token for round in self.rounds for token in round.tokens]

    @property
    def finish_reason(self) -> FinishReason:
        """Why the text ended; INTERRUPTED until it has, ERROR if an error ended it."""
        if self._params.n_predict == 0:
            return FinishReason.LENGTH
        reason = self._decoding.finish_reason if self._decoding else None
        return reason or (FinishReason.ERROR if self._failed else FinishReason.INTERRUPTED)

    @property
    def summary(self) -> Summary:
        """The figures of the text so far."""
        auto = self._params.draft_policy == "auto" and self._params.n_draft != 0
        kind = KINDS[self._params.drafter]
        drafts = self._pair.draft is not None or not kind.needs_draft
        costs = self._pair.learned.costs if auto and drafts else None
        return summarize(self.rounds, self._ttft_s, costs, kind.source)

    def check(self) -> Check:
        """Compare with the target alone, on a sequence of its own; see ``qdraft.Check``."""
        with self._pair.sequences() as sequences:
            return check(sequences.target, self.prompt, self.rounds, self._sampler)

    def _start(self) -> Decoding:
        """Take the session's sequences and begin the text."""
        self._started_at = time.perf_counter()
        n_most = self._n_most()
        sequences = self.session.start(self)
        if n_most:
            self._pair.learned.start_text()
        self._decoding = Decoding(
            sequences.target,
            self.session.drafter(self._params, n_most),
            self.prompt,
            self._sampler,
            schedule_for(self._params, n_most, self._pair.learned),
            self._rng,
            time.perf_counter,
            self._reader,
            self._params.n_predict,
            self._params.verification,
            self._params.logprobs,
            # A wider batch than the probe's might not be bit-identical.
            most_reread=0 if self._params.exact else MAX_N_REREAD,
        )
        uses_draft = bool(n_most and KINDS[self._params.drafter].needs_draft)
        n_of_draft = sequences.draft.n_past if sequences.draft and uses_draft else None
        self.n_reused = Both(sequences.target.n_past, n_of_draft)
        return self._decoding

    def _n_most(self) -> int:
        """Return the longest draft of this text.

        ``exact`` holds the threads to the end of the text, and probes if no result is stored.
        """
        wanted = self._params.most_drafted
        if KINDS[self._params.drafter].may_run_alone and self._pair.draft is None:
            return 0
        if not (self._params.exact and wanted):
            return wanted
        if self._params.n_draft is None:
            wanted = min(wanted, _LONGEST_EXACT)
        self._pair.threads.hold()
        self._holds_threads = True
        self.bit_identity = self._pair.bit_identity(max(_LONGEST_EXACT, wanted))
        return min(wanted, self.bit_identity.n_draft)

    def _take(self, round: Round) -> list[Chunk]:
        """Add the text of a round as a whole, and return its chunks."""
        self.rounds.append(round)
        if round.index:
            self._pair.observe(round)
        pieces = self._reader.pieces
        chunks = []
        for place, (token, piece) in enumerate(zip(round.tokens, pieces, strict=True)):
            split = self._splitter.push(piece) if self._splitter else Split(piece)
            origin = round.origin_of(place)
            logprobs = round.logprobs[place] if round.logprobs else None
            chunks.append(
                Chunk(split.content, token, origin, round.index, split.reasoning, logprobs)
            )
            self._add(split)
        if self._ttft_s is None and self._started_at is not None:
            self._ttft_s = time.perf_counter() - self._started_at
        if round.finish_reason is not None:
            chunks += self._finish()
        return chunks

    def _finish(self) -> list[Chunk]:
        """End a text that is whole; the chunk holds what was held back, if there is any."""
        if self.rounds:
            self._pair.save_costs()
        held = self._end()
        if held == Split():
            return []
        return [Chunk(held.content, None, None, len(self.rounds) - 1, held.reasoning)]

    def _add(self, split: Split) -> None:
        self.text += split.content
        self.reasoning += split.reasoning

    def _end(self, *, intact: bool = True) -> Split:
        """End the text and return what was held back of it; the caller holds the pair's lock.

        ``intact`` is False if the caches may not hold what they should.
        """
        if self._ended:
            return Split()
        self.session.end(self, intact=intact)  # first: an interrupt here must not lock the session
        self._ended = True
        if self._holds_threads:
            self._pair.threads.release()
        held = Split(self._reader.flush())
        if self._splitter:
            first, last = self._splitter.push(held.content), self._splitter.flush()
            held = Split(first.content + last.content, first.reasoning + last.reasoning)
        self._add(held)
        return held
