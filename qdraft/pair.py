"""A pair, opened: target and draft loaded, ready to generate. The Python API."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from qdraft.check import Check, check
from qdraft.core.rng import SeededRng
from qdraft.core.sampling import Sampler
from qdraft.core.schedule import FixedSchedule
from qdraft.decode import decode
from qdraft.drafters.base import Drafter, NoDrafter
from qdraft.drafters.model import ModelDrafter
from qdraft.engine.extra_buffers import extra_buffers_are_safe
from qdraft.engine.llama import LlamaEngine, LlamaModel
from qdraft.engine.vocab import require_same_vocab
from qdraft.errors import EngineError, PairError
from qdraft.gguf.identify import require_gguf
from qdraft.metrics import Summary, summarize
from qdraft.text import TextReader, encode_prompt
from qdraft.types import Chunk, DecodeParams, EngineParams, FinishReason, Round, SamplingParams

log = logging.getLogger(__name__)

LoadProgress = Callable[[str, float], None]  # file name, share loaded

DEFAULT_N_CTX = 4096


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One loaded file."""

    path: Path
    n_bytes: int
    file_type: str


class Pair:
    """A target and its draft (or none). Use as a context manager, or call ``close``.

    One text at a time: a second request waits for the first.
    """

    def __init__(
        self,
        target: Path,
        draft: Path | None = None,
        params: EngineParams | None = None,
        *,
        draft_params: EngineParams | None = None,
        progress: LoadProgress | None = None,
    ) -> None:
        """Load both files and prove that their vocabularies are the same.

        ``draft_params`` None loads the draft like the target. Raises ModelFileError,
        PairError, UsageError or EngineError; whatever was loaded by then is freed.
        """
        params = params or EngineParams()
        draft_params = draft_params or params
        for path in filter(None, (target, draft)):
            require_gguf(path)
        self._lock = threading.Lock()
        self._user: int | None = None
        self._models: list[LlamaModel] = []
        self._engines: list[LlamaEngine] = []
        try:
            self.target_engine = self._open(target, params, progress)
            self.draft_engine = self._open(draft, draft_params, progress) if draft else None
        except BaseException:
            self.close()
            raise
        self.target = _info(self._models[0])
        self.draft = _info(self._models[-1]) if draft else None

    def _open(self, path: Path, params: EngineParams, progress: LoadProgress | None) -> LlamaEngine:
        """Load a file, or share its weights if it is open, and make a context."""
        is_target = not self._models
        model = next((m for m in self._models if m.path.samefile(path)), None)
        if model is None:
            # The target's rows are bit-identical at small widths without the extra buffers;
            # the draft, which is never trusted, takes the speed.
            wanted = params.extra_buffers if params.extra_buffers is not None else not is_target
            model = LlamaModel(
                path,
                params,
                extra_buffers=wanted and extra_buffers_are_safe(),
                progress=None if progress is None else lambda share: progress(path.name, share),
            )
            self._models.append(model)
        if not is_target:
            self._require_pair(self._models[0], model)
        n_ctx = params.n_ctx
        if n_ctx is None:
            n_ctx = min(DEFAULT_N_CTX, model.n_ctx_train)
        elif n_ctx > model.n_ctx_train:
            log.warning("%s was trained on %d tokens, not %d", path.name, model.n_ctx_train, n_ctx)
        engine = LlamaEngine(model, replace(params, n_ctx=n_ctx))
        self._engines.append(engine)
        return engine

    @staticmethod
    def _require_pair(target: LlamaModel, draft: LlamaModel) -> None:
        for model in (target, draft):
            if not model.can_roll_back:
                raise PairError(
                    f"{model.path.name} is recurrent or hybrid: it cannot take tokens back",
                    hint="run it without a draft (--no-draft)",
                )
        if target is not draft:
            require_same_vocab(target.vocab, draft.vocab)

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

    def drafter(self, params: DecodeParams) -> Drafter:
        """The drafter for one request."""
        if self.draft_engine is None or params.n_draft == 0:
            return NoDrafter()
        return ModelDrafter(self.draft_engine, self.target_engine.vocab.n_tokens)

    def close(self) -> None:
        """Free contexts and models; harmless when repeated."""
        for engine in self._engines:
            engine.close()
        for model in self._models:
            model.close()
        self._engines.clear()
        self._models.clear()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """One text or check at a time; another thread waits, the same thread is told."""
        if not self._engines:
            raise EngineError("the pair is closed")
        if self._user == threading.get_ident():
            raise EngineError(
                "this pair is in the middle of a text",
                hint="iterate it to its end, or close its iterator, before the next one",
            )
        with self._lock:
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


class Generation:
    """One text: iterate once for its chunks; ``text``, ``tokens`` and ``rounds`` grow with it."""

    def __init__(
        self, pair: Pair, prompt: Sequence[int], sampling: SamplingParams, params: DecodeParams
    ) -> None:
        self._pair = pair
        self._params = params
        self._rng = SeededRng(params.seed)
        self._sampler = Sampler(sampling, pair.target_engine.vocab.n_tokens)
        self._chunks = self._run()
        self._ttft_s: float | None = None
        self.prompt = tuple(prompt)
        self.seed = self._rng.seed
        self.rounds: list[Round] = []
        self.text = ""

    def __iter__(self) -> Iterator[Chunk]:
        return self._chunks

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
        """Why the text ended; INTERRUPTED until it has."""
        if self._params.n_predict == 0:
            return FinishReason.LENGTH
        last = self.rounds[-1].finish_reason if self.rounds else None
        return last or FinishReason.INTERRUPTED

    @property
    def summary(self) -> Summary:
        """The figures so far."""
        return summarize(self.rounds, self._ttft_s)

    def check(self) -> Check:
        """Compare with the target alone; see ``qdraft.Check``."""
        with self._pair.exclusive():
            return check(self._pair.target_engine, self.prompt, self.rounds, self._sampler)

    def _run(self) -> Iterator[Chunk]:
        pair, params = self._pair, self._params
        vocab = pair.target_engine.vocab
        reader = TextReader(vocab, params.stop)
        pieces: list[str] = []

        def stop(token: int) -> FinishReason | None:
            pieces.append(reader.push(token))
            if vocab.is_end(token):
                return FinishReason.END_OF_GENERATION
            return FinishReason.STOP_STRING if reader.stopped else None

        started = time.perf_counter()
        with pair.exclusive():
            for round in decode(
                pair.target_engine,
                pair.drafter(params),
                self.prompt,
                self._sampler,
                FixedSchedule(params.n_draft),
                self._rng,
                stop=stop,
                clock=time.perf_counter,
                n_predict=params.n_predict,
                p_min=params.p_min,
            ):
                self.rounds.append(round)
                if self._ttft_s is None:
                    self._ttft_s = time.perf_counter() - started
                for place, text in enumerate(pieces):
                    yield self._emit(text, round.tokens[place], place, round)
                pieces.clear()
            if self.rounds and (text := reader.flush()):
                yield self._emit(text, None, 0, self.rounds[-1])

    def _emit(self, text: str, token: int | None, place: int, round: Round) -> Chunk:
        self.text += text
        return Chunk(text, token, None if token is None else round.origin_of(place), round.index)


def _info(model: LlamaModel) -> ModelInfo:
    return ModelInfo(model.path, model.path.stat().st_size, model.file_type)


def open_pair(
    name: str | None = None,
    *,
    target: Path | str | None = None,
    draft: Path | str | None = None,
    params: EngineParams | None = None,
    draft_params: EngineParams | None = None,
) -> Pair:
    """Open a pair of models.yaml by name (None: the default one), or two files.

    With ``target``, ``draft`` None is the target alone. A pair from a package is built into
    the cache on first use. Raises QDraftError for whatever does not work.
    """
    from qdraft import registry
    from qdraft.engine.library import default_threads
    from qdraft.errors import UsageError
    from qdraft.source import materialize

    if target is None and draft is not None:
        raise UsageError("a draft needs a target beside it")
    if target is not None and name is not None:
        raise UsageError("give either the name of a pair or a target, not both")
    if target is not None:
        return Pair(Path(target), Path(draft) if draft else None, params, draft_params=draft_params)
    threads = (params.n_threads if params else 0) or default_threads()
    files = materialize(registry.load().find(name), threads=threads)
    return Pair(*files, params, draft_params=draft_params)
