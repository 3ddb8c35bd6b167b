"""A pair, opened: target and draft loaded, ready to generate. The Python API."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from qdraft.decoding.drafters.cascade import CascadeDrafter
from qdraft.decoding.drafters.hybrid import HybridDrafter
from qdraft.decoding.drafters.model import ModelDrafter
from qdraft.decoding.drafters.ngram import NgramDrafter
from qdraft.decoding.drafters.protocol import Drafter, NoDrafter
from qdraft.decoding.policy.learned import Learned
from qdraft.decoding.records import DecodeParams, Round, SamplingParams
from qdraft.errors import EngineError, PairError, UsageError
from qdraft.gguf.facts import require_model
from qdraft.llama.context import LlamaContext
from qdraft.llama.kv_copy import KvCopy, couple
from qdraft.llama.model import LlamaModel
from qdraft.llama.params import EngineParams
from qdraft.llama.placed import not_as_asked
from qdraft.llama.progress import Progress, no_progress
from qdraft.llama.repack_probe import extra_buffers_are_safe
from qdraft.llama.sequence import LlamaSequence
from qdraft.llama.spec import Both, PairSpec
from qdraft.llama.vocab import LlamaVocab, require_same_vocab
from qdraft.session import store as machine
from qdraft.session.bit_identity import BitIdentity
from qdraft.session.contention import Contention
from qdraft.session.generation import Generation
from qdraft.session.text import encode_prompt

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One loaded file."""

    path: Path
    n_bytes: int
    file_type: str


@dataclass(frozen=True, slots=True)
class Sequences:
    """A sequence of the target, one of the draft if there is a draft, and the copy between them.

    ``kv_copy`` is None if the draft does not get the target's KV cells.
    """

    target: LlamaSequence
    draft: LlamaSequence | None
    kv_copy: KvCopy | None


class Pair:
    """A target and its draft (or none). Use as a context manager, or call ``close``.

    One text at a time: a second request waits for the first.
    """

    def __init__(self, spec: PairSpec, progress: Progress = no_progress) -> None:
        """Load what ``spec`` describes, as it says, and check that the vocabularies are the same.

        Connects to no server and plans nothing: see ``open_spec``. ``kv`` says whether the draft
        got the target's KV cells. Raises ModelFileError, PairError, UsageError or EngineError, and
        frees what it has loaded by then.
        """
        share_kv, template = spec.share_kv, spec.template
        target, params = spec.models.target.path, spec.models.target.params
        draft = spec.models.draft.path if spec.models.draft else None
        draft_params = spec.models.draft.params if spec.models.draft else params
        about = require_model(target)
        about_draft = require_model(draft) if draft else None
        target, draft = about.path, about_draft.path if about_draft else None
        self._lock = threading.Lock()
        self._user: int | None = None
        self.running: Generation | None = None  # the text in the making
        self._models: list[LlamaModel] = []
        self._contexts: list[LlamaContext] = []
        try:
            target_context = self._open(target, params, progress)
            if template is not None:
                target_context.vocab.use_template(template)
            draft_context = self._open(draft, draft_params, progress) if draft else None
            self.contexts = Both(target_context, draft_context)
            flash_attn = "off" not in (params.flash_attn, draft_params.flash_attn)
            self.kv = couple(target_context, draft_context, share_kv, flash_attn=flash_attn)
            self.target_engine = target_context.sequence()
            self.draft_engine = draft_context.sequence() if draft_context else None
            self.courier = self._kv_copy(self.target_engine, self.draft_engine)
            self._target_facts = machine.file_facts(target, params)
            facts = [machine.file_facts(draft, draft_params)] if draft else []
            self._costs_path: Path | None = machine.store_path(
                "costs", self._target_facts, *facts, str(self.kv.shared)
            )
            self.placed = [context.placed for context in self.contexts]  # the target first
            over_a_link = bool(self.placed[0].remote)
            self.learned = Learned(machine.load_costs(self._costs_path, over_a_link=over_a_link))
            # Threads matter where the CPU computes, and a link has delays of its own.
            on_cpu = self.placed[0].n_offloaded < len(self.placed[0].layers)
            watched = on_cpu and not over_a_link
            self._contention = Contention(self.learned.costs.target_s) if watched else None
        except BaseException:
            self.close()
            raise
        if about_draft and about.n_experts:
            log.warning(
                "%s is a mixture of experts (%s of %d a token): a verify batch reads the experts "
                "of all its rows, so drafting gains less than on a dense model",
                target.name, about.n_experts_used, about.n_experts,
            )  # fmt: skip
        self.target = ModelInfo(target, about.n_bytes, about.file_type)
        self.draft = (
            ModelInfo(about_draft.path, about_draft.n_bytes, about_draft.file_type)
            if about_draft
            else None
        )
        for placed, asked, path in zip(
            self.placed, (params, draft_params), (target, draft), strict=False
        ):
            for surprise in not_as_asked(placed, asked):
                log.warning("%s: %s", path.name if path else "", surprise)

    def _open(self, path: Path, params: EngineParams, progress: Progress) -> LlamaContext:
        """Load a file, or share its weights if it is open, and make a context."""
        is_target = not self._models
        model = next(
            (m for m in self._models if m.path.samefile(path) and m.params.same_place(params)), None
        )
        if model is None:
            # The target's rows are bit-identical at small widths without the extra buffers;
            # the draft, which is never trusted, takes the speed.
            wanted = params.extra_buffers if params.extra_buffers is not None else not is_target
            model = LlamaModel(
                path,
                params,
                extra_buffers=wanted and extra_buffers_are_safe(),
                progress=progress,
            )
            self._models.append(model)
        if not is_target:
            self._require_pair(self._models[0], model)
        if (params.n_ctx or 0) > model.n_ctx_train:
            log.warning(
                "%s was trained on %d tokens, not %d", path.name, model.n_ctx_train, params.n_ctx
            )
        context = LlamaContext(model, params)
        self._contexts.append(context)
        return context

    def _kv_copy(self, target: LlamaSequence, draft: LlamaSequence | None) -> KvCopy | None:
        """The copy from one sequence to the other; None if the draft has its own cells."""
        return KvCopy(target, draft) if draft and self.kv.shared else None

    def keep_costs(self) -> None:
        """Keep what the rounds so far have shown of the costs, for the next run."""
        if self._costs_path:
            machine.save_costs(self._costs_path, self.learned.costs)

    def watch(self, round: Round) -> None:
        """Halve the threads where others want the processor too: see ``session.contention``."""
        if self._contention is None or not self._contention.add(round):
            return
        n = max(context.n_threads for context in self.contexts)
        told = f"decoding takes {self._contention.times_slower:.0f} times as long as it did"
        if n == 1:
            log.warning("%s: something else is using this machine", told)
            self._contention = None
            return
        log.warning("%s: others use the processor, threads from now on: %d", told, n // 2)
        for context in self.contexts:
            context.use_threads(max(1, context.n_threads // 2))
        self._contention = Contention()
        self._costs_path = None  # costs of so many threads are not those to keep

    def bit_identity(self, n_most: int) -> BitIdentity:
        """How long drafts may be, up to ``n_most``, for bit-identical verify rows.

        Probed once for the target as it is loaded and kept from run to run.
        """
        return machine.find_bit_identity(self.target_engine, self._target_facts, n_most)

    @staticmethod
    def _require_pair(target: LlamaModel, draft: LlamaModel) -> None:
        for model in (target, draft):
            Pair._require_rollback(model)
        if target is not draft:
            require_same_vocab(target.vocab, draft.vocab)

    @staticmethod
    def _require_rollback(model: LlamaModel) -> None:
        if not model.can_roll_back:
            raise PairError(
                f"{model.path.name} is recurrent or hybrid: it cannot take tokens back",
                hint="run it without a draft (--no-draft)",
            )

    def generate(
        self,
        prompt: str,
        sampling: SamplingParams | None = None,
        decode: DecodeParams | None = None,
        *,
        system: str | None = None,
        raw: bool = False,
    ) -> Generation:
        """Start a text after ``prompt``; iterate the result for its chunks.

        The prompt goes through the model's chat template, with ``system`` in front,
        unless the model has none or ``raw`` is set. Raises UsageError for an empty prompt.
        """
        tokens = encode_prompt(self.target_engine.vocab, prompt, system=system, raw=raw)
        return Generation(self, tokens, sampling or SamplingParams(), decode or DecodeParams())

    @property
    def vocab(self) -> LlamaVocab:
        """The target's vocabulary."""
        return self.target_engine.vocab

    @contextmanager
    def sequences(self) -> Iterator[Sequences]:
        """Sequences of their own for a study or a check, which are empty and closed at the end."""
        for own in Both(self.target_engine, self.draft_engine):
            own.truncate(0)  # so that the study has the whole context
        with ExitStack() as stack:
            target = stack.enter_context(closing(self.contexts.target.sequence()))
            draft = None
            if self.contexts.draft:
                draft = stack.enter_context(closing(self.contexts.draft.sequence()))
            yield Sequences(target, draft, self._kv_copy(target, draft))

    @property
    def can_draft(self) -> bool:
        """False for a recurrent or hybrid target, which cannot take tokens back."""
        return self._models[0].can_roll_back

    def drafter(self, params: DecodeParams, n_most: int) -> Drafter:
        """The drafter for one request, of which drafts of up to ``n_most`` tokens are wanted."""
        if n_most == 0:
            return NoDrafter()
        if params.drafter == "ngram":
            self._require_rollback(self._models[0])
            return NgramDrafter()
        if self.draft_engine is None:
            if params.drafter == "hybrid":
                raise UsageError("the hybrid drafter needs a draft model beside the target")
            return NoDrafter()
        model = ModelDrafter(self.draft_engine, self.target_engine.vocab.n_tokens, self.courier)
        if params.drafter == "model":
            return model
        ngram = NgramDrafter()
        return HybridDrafter(ngram, CascadeDrafter(ngram, model), model)

    def close(self) -> None:
        """Free contexts and models, after the text that another thread is making.

        Harmless when repeated. In the thread that makes a text, ends that text.
        """
        if self._user == threading.get_ident() and self.running:
            self.running.close()
        with self._lock:
            for context in self._contexts:
                context.close()
            for model in self._models:
                model.close()
            self._contexts.clear()
            self._models.clear()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """One text or check at a time; another thread waits, the same thread is told."""
        if self._user == threading.get_ident():
            raise EngineError(
                "this pair is in the middle of a text",
                hint="read that text to its end, or close it, before the next one",
            )
        with self._lock:
            if not self._contexts:
                raise EngineError("the pair is closed")
            self._user = threading.get_ident()
            try:
                yield
            finally:
                self._user = None

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
