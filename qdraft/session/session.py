"""A session: texts one after another that reuse what their caches have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from qdraft.decoding.drafters.build import build_drafter
from qdraft.decoding.drafters.forced import ForcedDrafter
from qdraft.decoding.drafters.hybrid import HybridDrafter
from qdraft.decoding.drafters.kinds import KINDS
from qdraft.decoding.drafters.model import ModelDrafter
from qdraft.decoding.drafters.protocol import Drafter, NoDrafter
from qdraft.decoding.records import DecodeParams, SamplingParams
from qdraft.decoding.sampling import Processor
from qdraft.errors import EngineError, UsageError
from qdraft.llama.chat_template import NO_OPTIONS, TemplateOptions
from qdraft.session.generation import Generation
from qdraft.session.prompt import encode_prompt

if TYPE_CHECKING:
    from qdraft.session.pair import Pair, Sequences


class Session:
    """Texts of one pair, one after another, as in a chat; ``Pair.session`` opens it.

    A session keeps its sequences from text to text: of a new prompt, target and draft read only
    the tokens after the longest prefix that their caches hold already. Use it as a context
    manager, or call ``close``.
    """

    def __init__(self, pair: Pair, *, keep: bool = True) -> None:
        """``keep`` False gives the cells back whenever a text ends."""
        self._pair = pair
        self._keep = keep
        self._sequences: Sequences | None = None
        self._drafters: dict[str, Drafter] = {}
        self._model: ModelDrafter | None = None  # one for all kinds, because it knows its cells
        self._running: Generation | None = None

    @property
    def pair(self) -> Pair:
        return self._pair

    @property
    def sequences(self) -> Sequences | None:
        """The sequences that hold the last text; None while the session holds none."""
        return self._sequences

    def generate(  # noqa: PLR0913 (each says one thing of the text)
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        decode: DecodeParams | None = None,
        *,
        system: str | None = None,
        raw: bool = False,
        parse_special: bool | None = None,
        template: TemplateOptions = NO_OPTIONS,
        split_reasoning: bool = False,
        processors: Sequence[Processor] = (),
    ) -> Generation:
        """Start a text after ``prompt``, which is text or token ids; see ``Pair.generate``.

        The text before must have ended. Token ids get no chat template.
        """
        if isinstance(prompt, str):
            tokens = encode_prompt(
                self._pair.vocab,
                prompt,
                system=system,
                raw=raw,
                parse_special=parse_special,
                template=template,
            )
        else:
            tokens = list(prompt)
        if not tokens:
            raise UsageError("the prompt has no tokens")
        sampling = sampling or self._pair.recommended.params()
        return Generation(
            self,
            tokens,
            sampling,
            decode or DecodeParams(),
            processors,
            split_reasoning=split_reasoning,
        )

    def start(self, text: Generation) -> Sequences:
        """Return the sequences for a text that begins; the caller holds the pair's lock.

        Raises EngineError if another text of this session has not ended, or if the contexts have
        no sequence left.
        """
        if self._running is not None:
            raise EngineError(
                "this session is in the middle of a text",
                hint="read that text to its end or close it, or open another session",
            )
        sequences = self.open()
        self._running = text
        return sequences

    def open(self) -> Sequences:
        """Return the sequences, empty ones if there were none; the caller holds the pair's lock.

        Raises EngineError if the contexts have no sequence left.
        """
        if self._sequences is None:
            self._sequences = self._pair.open_sequences()
            if self._keep:
                self._sequences.keep_places()
            self._pair.register(self)
        return self._sequences

    def drafter(self, params: DecodeParams, n_most: int) -> Drafter:
        """Return the drafter for a text whose drafts have up to ``n_most`` tokens.

        Raises PairError if the target cannot take tokens back, and UsageError if the drafter needs
        a draft model and there is none.
        """
        if n_most == 0:
            return NoDrafter()
        if params.drafter not in self._drafters:
            self._pair.require_rollback()
            self._drafters[params.drafter] = build_drafter(params.drafter, self.model_drafter())
        drafter = self._drafters[params.drafter]
        if params.constraint is not None and not KINDS[params.drafter].needs_draft:
            return HybridDrafter(drafter, ForcedDrafter())  # the model's drafter forces by itself
        return drafter

    def model_drafter(self) -> ModelDrafter | None:
        """Return the one drafter with the draft model; None without sequences or a draft."""
        sequences = self._sequences
        if self._model is None and sequences is not None and sequences.draft is not None:
            n_vocab = self._pair.vocab.n_tokens
            self._model = ModelDrafter(sequences.draft, n_vocab, sequences.kv_copy)
        return self._model

    def end(self, text: Generation, *, intact: bool) -> None:
        """Note that a text has ended; the caller holds the pair's lock.

        The session gives its cells back if they are not ``intact``, and always without ``keep``.
        """
        if self._running is text:
            self._running = None
            if not (intact and self._keep):
                self._drop()

    def _drop(self) -> None:
        """Give the sequences and their cells back."""
        sequences, self._sequences = self._sequences, None
        self._drafters.clear()
        self._model = None
        self._pair.forget(self)
        if sequences is not None:
            sequences.close()

    def close(self) -> None:
        """End the text in the making and give the cells back; harmless when repeated."""
        with self._pair.lock:
            if self._running is not None:
                self._running.close()
            self._drop()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
