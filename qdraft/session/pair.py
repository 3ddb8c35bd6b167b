"""A loaded pair: target and draft, their contexts, and what they share. The Python API."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from qdraft.constraints.vocabulary import ConstraintVocabulary
from qdraft.decoding.drafters.kinds import KINDS
from qdraft.decoding.policy.gate import would_draft
from qdraft.decoding.policy.learned import Learned
from qdraft.decoding.records import DecodeParams, Round, SamplingParams
from qdraft.decoding.sampling import Processor
from qdraft.errors import EngineError, PairError
from qdraft.gguf.facts import Facts, require_model
from qdraft.llama.chat_template import NO_OPTIONS, TemplateOptions
from qdraft.llama.context import LlamaContext
from qdraft.llama.held_pages import HeldPages, can_hold
from qdraft.llama.kv_copy import KvCopy, couple
from qdraft.llama.model import LlamaModel
from qdraft.llama.placed import CPU, surprises_of
from qdraft.llama.progress import Progress, no_progress
from qdraft.llama.repack_probe import extra_buffers_are_safe
from qdraft.llama.sequence import LlamaSequence
from qdraft.llama.spec import Both, ModelSpec, PairSpec
from qdraft.llama.state_proof import require_way_back
from qdraft.llama.vocab import LlamaVocab, require_same_vocab
from qdraft.placement.buffers import require_memory
from qdraft.placement.needs import dry_run
from qdraft.placement.outlook import describe, foresee
from qdraft.placement.plan import ALPHA
from qdraft.placement.residency import find_residency, stretches_to_hold
from qdraft.session.bit_identity import BitIdentity
from qdraft.session.draft_limits import describe_limits
from qdraft.session.first_costs import measure_first_costs
from qdraft.session.generation import Generation
from qdraft.session.held_weights import HeldWeights
from qdraft.session.learning import Learning, MakeLearning
from qdraft.session.session import Session
from qdraft.session.store import file_facts, find_bit_identity
from qdraft.session.threads import Threads

log = logging.getLogger(__name__)

_WIDE = 0.1  # of the free memory: what the buffers of a wide physical batch may take


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One loaded file."""

    path: Path
    n_bytes: int
    file_type: str


@dataclass(frozen=True, slots=True)
class Sequences:
    """A sequence of the target, one of the draft if there is a draft, and the KV copy to it.

    ``kv_copy`` is None if the draft does not get the target's KV cells.
    """

    target: LlamaSequence
    draft: LlamaSequence | None
    kv_copy: KvCopy | None

    def keep_places(self) -> None:
        """Let recurrent states remember places for the texts that follow.

        A draft that gets the target's state needs none of its own.
        """
        self.target.keeps_places = True
        if self.draft is not None and self.kv_copy is None:
            self.draft.keeps_places = True

    @property
    def are_whole(self) -> bool:
        """Tell whether both caches hold what their tokens say."""
        return self.target.is_whole and (self.draft is None or self.draft.is_whole)

    def close(self) -> None:
        """Give the cells back; harmless when repeated."""
        self.target.close()
        if self.draft is not None:
            self.draft.close()


class Pair:
    """A target and its draft, if there is one. Use as a context manager, or call ``close``.

    Several texts can be in the making, in one thread or in several: each has its own sequences, and
    the steps of all of them take turns.

    Of target and draft, ``models`` (also ``target`` and ``draft``) describes the loaded files,
    ``facts`` says what is in them, ``contexts`` holds the llama.cpp contexts, and ``placed`` says
    what is on which device. ``spec``
    is what was loaded, ``vocab`` the target's vocabulary, and ``kv`` says whether the draft gets
    the target's KV cells. ``learned`` is what the drafting policy has learned, ``can_draft`` says
    whether the target can verify drafts, ``threads`` chooses how many threads they use, and whoever
    uses ``contexts`` holds ``lock``.
    ``recommended`` is how the target's file recommends to sample.
    """

    def __init__(
        self,
        spec: PairSpec,
        progress: Progress = no_progress,
        learning: MakeLearning = Learning.fresh,
    ) -> None:
        """Load what ``spec`` describes, as it says, and check that the vocabularies are the same.

        This connects to no server and makes no plan; ``open_spec`` does. It also has the pair start
        from the costs of earlier runs (``Learning.stored``). Raises HostMemoryError before loading
        if the caches do not fit this machine, ModelFileError, PairError, UsageError or EngineError,
        and then frees what it has loaded.
        """
        self.lock = threading.RLock()
        self._sessions: set[Session] = set()  # those that hold sequences
        self._resources = ExitStack()
        self._closed = False
        facts = spec.models.map(lambda model: require_model(model.path))
        self.spec = replace(spec, models=_at_paths(spec.models, facts))
        self.facts = facts
        self.recommended = facts.target.sampling
        self.models = facts.map(lambda of: ModelInfo(of.path, of.n_bytes, of.file_type))
        require_memory(self.spec.models, facts)
        self.residency = find_residency(self.spec.models)
        self.held: HeldWeights | None = None  # of a target that does not fit in memory
        self._draft_pages: HeldPages | None = None  # of its draft, if it stays mapped
        try:
            if not self.residency.fits:
                self._warn_of_streaming()
                self.spec = replace(self.spec, models=self._keep_draft(self.spec.models))
            self.contexts = self._load(facts, progress)
            self._hold_weights()
            self._no_way_back = self._try_way_back()
            self.kv = couple(
                self.contexts.target,
                self.contexts.draft,
                self.spec.share_kv,
                flash_attn=all(model.params.flash_attn != "off" for model in self.spec.models),
            )
            self.placed = self.contexts.map(lambda context: context.placed)
            self._learning = learning(self.spec, self.placed, self.kv)
            self._measure_first_costs()
            self.threads = self._watch_threads()
        except BaseException:
            self.close()
            raise
        self._warn(facts.target)

    def _load(self, facts: Both[Facts], progress: Progress) -> Both[LlamaContext]:
        """Load the weights and make the contexts."""
        models = self.spec.models
        weights = self._load_weights(models.target, progress, is_target=True)
        wide = self.residency.n_streamed and models.target.params.n_ubatch is None
        make = self._make_wide_context if wide else self._make_context
        target = make(weights, models.target)
        if self.spec.template is not None:
            weights.vocab.use_template(self.spec.template)
        if models.draft is None:
            return Both(target)
        draft_weights = weights
        if not _is_same(models.target, models.draft):
            draft_weights = self._load_weights(models.draft, progress, is_target=False)
        if draft_weights is not weights:
            hashes = {of.tokens_sha256 for of in facts}
            require_same_vocab(weights.vocab, draft_weights.vocab, same_texts=len(hashes) == 1)
        return Both(target, self._make_context(draft_weights, models.draft))

    def _load_weights(self, spec: ModelSpec, progress: Progress, *, is_target: bool) -> LlamaModel:
        # The target's rows are bit-identical at small widths if its weights are not repacked. The
        # draft need not be exact, so it takes the speed.
        wanted = spec.params.extra_buffers
        repack = (not is_target if wanted is None else wanted) and extra_buffers_are_safe()
        model = LlamaModel(spec.path, spec.params, extra_buffers=repack, progress=progress)
        self._resources.callback(model.close)
        return model

    def _make_context(self, model: LlamaModel, spec: ModelSpec) -> LlamaContext:
        if (spec.params.n_ctx or 0) > model.n_ctx_train:
            log.warning(
                "%s was trained on %d tokens, but the context has %d",
                spec.path.name,
                model.n_ctx_train,
                spec.params.n_ctx,
            )
        context = LlamaContext(model, spec.params)
        self._resources.callback(context.close)
        return context

    def _try_way_back(self) -> PairError | None:
        """Return why the target cannot verify drafts, if it cannot; raise that if there is a draft.

        Only a recurrent state can make it so.
        """
        try:
            for context in self.contexts:
                require_way_back(context)
        except PairError as error:
            if self.draft is not None:
                raise
            return error
        return None

    def _measure_first_costs(self) -> None:
        """Let the policy know what drafts cost before the first round."""
        if self.contexts.draft is None:
            return
        with self.sequences() as sequences:
            assert sequences.draft
            costs = measure_first_costs(
                sequences.target,
                sequences.draft,
                KINDS["model"].source,
                streams=bool(self.residency.n_streamed),
            )
        if costs:
            self.learned.costs.start(costs)
        if self.held:
            self.learned.costs.rents[KINDS["model"].source] = self.held.rent

    def _watch_threads(self) -> Threads:
        # Fewer threads help only if the CPU computes. The delays of a link look like contention.
        placed, costs = self.placed.target, self.learned.costs
        on_cpu = placed.n_offloaded < len(placed.layers) and not costs.over_a_link
        streams = self.held is not None  # and so do those of a disk
        target_s = costs.medians().target_s
        return Threads(tuple(self.contexts), target_s, watched=on_cpu and not streams)

    def _make_wide_context(self, model: LlamaModel, spec: ModelSpec) -> LlamaContext:
        """Make the context of a target that does not fit, so that a prompt takes few passes.

        Each physical batch reads all of the weights. It is as wide as the logical one if its
        buffers take at most a tenth of the memory, which else could hold weights.
        """
        n_ubatch = spec.params.n_batch
        while n_ubatch > spec.params.physical_batch:
            wide = replace(spec, params=replace(spec.params, n_ubatch=n_ubatch))
            if dry_run(spec.path, wide.params).shares[CPU].compute < _WIDE * self.residency.free:
                return self._make_context(model, wide)
            n_ubatch //= 2
        return self._make_context(model, spec)

    def _warn_of_streaming(self) -> None:
        outlook = foresee(self.spec.models, ALPHA, self.residency)
        if outlook:
            log.warning("%s %s", self.target.path.name, describe(outlook))

    def _keep_draft(self, models: Both[ModelSpec]) -> Both[ModelSpec]:
        """Return the models with a draft that stays in memory beside a target that streams.

        The system drops what it can read again, and that is all of a mapped file. So the draft's
        file is locked, as it is: repacked weights would not be those of the file, and gain nothing
        in decodes of one token. Where the system does not let qdraft lock that much, the draft is
        read into memory of its own.
        """
        draft = models.draft
        if draft is None or draft.params.load_mode != "auto" or _is_same(models.target, draft):
            return models
        if can_hold() and not draft.params.extra_buffers:
            pages = HeldPages(stretches_to_hold(draft, whole=True))
            self._resources.callback(pages.close)
            pages.hold(pages.size)
            if not pages.refusal:
                self._draft_pages = pages
                params = replace(draft.params, extra_buffers=False)
                return Both(models.target, replace(draft, params=params))
            pages.close()
        return Both(models.target, replace(draft, params=replace(draft.params, load_mode="none")))

    def _hold_weights(self) -> None:
        """Keep a part of the target's mapped weights in memory if they do not fit."""
        target = self.spec.models.target
        if self.residency.n_streamed and target.params.load_mode == "auto":
            self.held = HeldWeights(target, self.contexts, self.residency.draft, self._draft_pages)
            self._resources.callback(self.held.close)

    def _warn(self, target: Facts) -> None:
        """Warn of experts, which make drafting gain less, and of layers on the wrong device."""
        if self.draft and target.n_experts:
            log.warning(
                "%s is a mixture of experts (%s of %d a token): a verify batch reads the experts "
                "of all its rows, so drafting gains less than on a dense model",
                target.path.name,
                target.n_experts_used,
                target.n_experts,
            )
        for limit in describe_limits(self.spec.models, self.contexts, self.kv):
            log.warning("%s", limit)
        for each in target.sampling.ignored:
            log.warning(
                "%s recommends to sample with %s, which qdraft does not have",
                target.path.name,
                each,
            )
        for placed, model in self.placed.zip(self.spec.models):
            for surprise in surprises_of(placed, model.params):
                log.warning("%s: %s", model.path.name, surprise)

    @property
    def target(self) -> ModelInfo:
        return self.models.target

    @property
    def draft(self) -> ModelInfo | None:
        return self.models.draft

    @property
    def vocab(self) -> LlamaVocab:
        """The target's vocabulary."""
        return self.contexts.target.vocab

    @cached_property
    def constraint_vocabulary(self) -> ConstraintVocabulary:
        """The target's vocabulary for constraints. Raises UsageError without llguidance."""
        return ConstraintVocabulary(self.vocab)

    @property
    def learned(self) -> Learned:
        """What the drafting policy has learned about this pair, from text to text."""
        return self._learning.learned

    @property
    def can_draft(self) -> bool:
        """False if the target has a recurrent state that cannot go back after a rejection."""
        return self._no_way_back is None

    def choose_drafter(self, params: DecodeParams) -> DecodeParams:
        """Return ``params`` with the drafter that this pair can serve.

        If there is no draft, the fallback of the asked drafter takes over: repetitions in the text
        are better than no draft, and cost nothing.
        """
        fallback = KINDS[params.drafter].fallback
        if self.draft is not None or fallback is None or not self.can_draft:
            return params
        return replace(params, drafter=fallback)

    def generate(  # noqa: PLR0913 (each says one thing of the text)
        self,
        prompt: str,
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
        """Start a text after ``prompt``; iterate the result for its chunks.

        ``sampling`` None is what the target's file recommends, else llama.cpp's defaults. The
        prompt goes through the model's chat template, with ``system`` before it, unless the model
        has none or ``raw`` is set. ``parse_special`` says whether the names of control tokens in
        your own text are these tokens; None takes them as text in a chat, and as tokens otherwise.
        ``template`` is what the chat template gets beside the messages. ``split_reasoning`` puts
        what the model writes between the marks of its template into ``reasoning``, apart from
        ``text``.
        Each of ``processors`` maps ``(row, history)`` to a row of logits, on the target's side and
        the draft's, after those of ``sampling``; it keeps state by prefix only (see ``Processor``).
        The text gives its cells back when it ends; a ``session`` keeps them for the next text.
        Raises UsageError for an empty prompt.
        """
        session = Session(self, keep=False)
        return session.generate(
            prompt,
            sampling,
            decode,
            system=system,
            raw=raw,
            parse_special=parse_special,
            template=template,
            split_reasoning=split_reasoning,
            processors=processors,
        )

    def session(self) -> Session:
        """Open a session, whose texts reuse the cells of the tokens that they have in common."""
        return Session(self)

    @contextmanager
    def sequences(self) -> Iterator[Sequences]:
        """Open empty sequences for a study or a check; they are closed at the end.

        Other threads wait until then. Raises EngineError if the pair is closed or a context has no
        sequence left.
        """
        with self.lock:
            opened = self.open_sequences()
            try:
                yield opened
            finally:
                opened.close()

    def open_sequences(self) -> Sequences:
        """Open a sequence in each context. The caller holds the lock, and closes them.

        Raises EngineError if the pair is closed or a context has no sequence left.
        """
        if self._closed:
            raise EngineError("the pair is closed")
        target = self.contexts.target.sequence()
        if self.contexts.draft is None:
            return Sequences(target, None, None)
        try:
            draft = self.contexts.draft.sequence()
        except BaseException:
            target.close()
            raise
        return Sequences(target, draft, KvCopy(target, draft) if self.kv.shared else None)

    def register(self, session: Session) -> None:
        """Note that a session holds sequences, so that it closes with the pair."""
        self._sessions.add(session)

    def forget(self, session: Session) -> None:
        """Note that a session no longer holds sequences."""
        self._sessions.discard(session)

    def show_progress(self, progress: Progress) -> None:
        """Report the tokens that are done of each decode of the target that takes long."""
        self.contexts.target.slow_pass.progress = progress

    def cancel_if(self, is_cancelled: Callable[[], bool]) -> None:
        """Ask ``is_cancelled`` between the batches of a prompt, and during a slow decode.

        True ends the step with CancelledError. The caches keep what they have read.
        """
        self.contexts.target.is_cancelled = is_cancelled

    def observe(self, round: Round) -> None:
        """Take in a round; use fewer threads if the rounds show that other programs use the CPU."""
        if self.held:
            source, lent_before = KINDS["model"].source, self.held.lent
            self.held.observe(wanted=would_draft(self.learned, source))
            if self.held.lent and not lent_before:
                self.learned.costs.expect_restart(source, self.held.lent)
        self.threads.watch(round)

    def save_costs(self) -> None:
        """Store the costs of the rounds for later runs, if the pair started from stored ones.

        Costs with fewer threads than asked for are not stored: later runs start with all of them.
        """
        if self.threads.settled:
            self._learning.save()

    def bit_identity(self, n_most: int) -> BitIdentity:
        """Return the longest draft, up to ``n_most`` tokens, whose verify rows are bit-identical.

        qdraft probes once for the target as it is loaded, with all of its threads, and stores the
        result for later runs.
        """
        target = self.spec.models.target
        with self.sequences() as sequences, self.threads.held():
            return find_bit_identity(
                sequences.target,
                file_facts(target.path, target.params),
                n_most,
                n_ctx=self.contexts.target.n_ctx,
            )

    def require_rollback(self) -> None:
        """Raise PairError if the target cannot take tokens back, which every draft needs."""
        if self._no_way_back is not None:
            raise self._no_way_back

    def close(self) -> None:
        """End the texts in the making and free contexts and weights; harmless when repeated.

        A step that runs in another thread ends first.
        """
        with self.lock:
            for session in list(self._sessions):
                session.close()
            self._closed = True
            self._resources.close()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _at_paths(models: Both[ModelSpec], facts: Both[Facts]) -> Both[ModelSpec]:
    """Return the models with the paths of their first parts."""
    draft = None
    if models.draft and facts.draft:
        draft = replace(models.draft, path=facts.draft.path)
    return Both(replace(models.target, path=facts.target.path), draft)


def _is_same(target: ModelSpec, draft: ModelSpec) -> bool:
    """Tell whether target and draft can share weights: one file on the same devices."""
    same_adapters = target.params.lora == draft.params.lora
    same_place = target.params.same_place(draft.params)
    return draft.path.samefile(target.path) and same_place and same_adapters
