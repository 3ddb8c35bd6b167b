"""The quantization ladder of one model: quality, speed and acceptance of each rung in one table."""

from __future__ import annotations

import glob
import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from qdraft.disk import free_bytes, require_space, show_bytes
from qdraft.errors import EngineError, PairError, QDraftError, UsageError
from qdraft.gguf.facts import Facts, require_model
from qdraft.gguf.pairing import SAME_MODEL, relate
from qdraft.host import default_threads
from qdraft.llama.child import RunJob, run_job
from qdraft.llama.model import LlamaModel
from qdraft.llama.native import build_id
from qdraft.llama.params import EngineParams
from qdraft.llama.progress import Progress, no_progress, renamed
from qdraft.llama.quantize import MOST_BYTES, Recipe, file_types, preview, quantize
from qdraft.llama.rpc import connect
from qdraft.making.make import write_held_out
from qdraft.making.matrix import check_matrix, make_matrix
from qdraft.paths import cache_dir, new_file, sweep
from qdraft.session.store import file_facts, store_path
from qdraft.study.logit_store import read_about, row_bytes
from qdraft.study.measure_quant import ReferenceJob, RungJob
from qdraft.study.perplexity import chunks_of, n_scored
from qdraft.study.ranking import (
    Comparison,
    FailedRung,
    QuantFile,
    Reference,
    Rung,
    conclude,
)
from qdraft.study.rung_result import ReferenceResult, RungResult

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_MODULE = "qdraft.study.measure_quant"
_N_MEASURED = 90  # tokens of held-out text to measure acceptance over
_MUCH = 10**9  # bytes to write of which a user should know
_VERSION = 4  # of what a job measures: qdraft measures results of other versions again


@dataclass(frozen=True, slots=True)
class ComparisonSpec:
    """What a comparison compares, and over which text.

    ``rungs`` are files, or names of types to quantize the reference to. ``n_chunks`` None scores
    all of ``text``. ``imatrix`` None collects an importance matrix for the types, unless
    ``with_imatrix`` is False. Names of control tokens in ``text`` are text, as in llama-perplexity,
    unless ``parse_special``. ``again`` also measures what the cache holds.
    """

    reference: Path
    rungs: tuple[Path | str, ...]
    text: str
    n_ctx: int = 512
    n_chunks: int | None = None
    temperatures: tuple[float, ...] = (0.0, 1.0)
    n_predict: int = 32
    imatrix: Path | None = None
    with_imatrix: bool = True
    params: EngineParams = field(default_factory=EngineParams)
    servers: tuple[str, ...] = ()  # RPC servers
    again: bool = False
    parse_special: bool = False


def compare_rungs(
    spec: ComparisonSpec, *, progress: Progress = no_progress, run: RunJob = run_job
) -> Comparison:
    """Measure the reference, then each rung, and rank the rungs.

    An interrupt after the reference ends the comparison with the rungs that are done; the next
    comparison continues from there. Raises QDraftError if the reference cannot be measured or a
    rung is not another quantization of it.
    """
    ladder = Ladder(spec, progress, run)
    ladder.require_space()
    reference = ladder.measure_reference()
    rungs: list[Rung | FailedRung] = []
    complete = True
    try:
        for rung in ladder.measure_rungs():
            rungs.append(rung)  # noqa: PERF402 (an interrupt keeps these)
    except KeyboardInterrupt:
        complete = False
    return conclude(reference, rungs, complete=complete)


class Ladder:
    """The files of a comparison. A child job measures each, and the cache keeps its result."""

    def __init__(
        self, spec: ComparisonSpec, progress: Progress = no_progress, run: RunJob = run_job
    ) -> None:
        """Check all files and cut the text into chunks. Raises QDraftError."""
        connect(spec.servers, hold=False)  # each job is a client of its own
        self._spec, self._progress, self._run = spec, progress, run
        self._facts = require_model(spec.reference)
        self._files = [_check_rung(rung, self._facts) for rung in spec.rungs]
        if spec.imatrix:
            check_matrix(spec.imatrix, self._facts)
        model = LlamaModel(self._facts.path, spec.params, dry=True)  # for its vocabulary
        try:
            vocab = model.vocab
            tokens = vocab.tokenize(spec.text, parse_special=spec.parse_special)
            self._chunks = chunks_of(tokens, spec.n_ctx, spec.n_chunks, vocab.chunk_bos)
            self._n_vocab = vocab.n_tokens
        finally:
            model.close()
        self._key = (
            file_facts(self._facts.path, spec.params),
            _digest(json.dumps(self._chunks)),
            f"{spec.n_ctx} {_VERSION}",
        )
        self._store = store_path("logits", *self._key).with_suffix(".bin")
        self._params = replace(spec.params, n_ctx=max(1024, spec.n_ctx))
        self._texts: list[tuple[int, list[int]]] = []

    def require_space(self) -> None:
        """Say what the comparison writes to the cache if that is much.

        Raises DiskSpaceError if it does not fit. What killed comparisons have left goes first.
        """
        cache = cache_dir()
        sweep(cache, below=True)
        free = free_bytes(cache)
        is_kept = self._has_logits() and not self._spec.again
        n_rows = 0 if is_kept else sum(n_scored(len(chunk)) for chunk in self._chunks)
        n_logits = n_rows * row_bytes(self._n_vocab)
        kinds = self._missing_kinds()
        most = n_logits + len(kinds) * MOST_BYTES * self._facts.n_parameters
        if most < min(free, _MUCH):
            return
        n_files = sum(map(self._size_of, kinds))
        n_chunks = len(self._chunks)
        hint = "set QDRAFT_CACHE_DIR to a folder on another disk"
        n_fewer = (free - n_files) * n_chunks // n_logits if n_logits else 0
        if n_fewer > 0:
            n_bytes = n_files + n_logits * n_fewer // n_chunks
            hint += f", or score less: --chunks {n_fewer} takes {show_bytes(n_bytes)}"
        require_space(cache, n_files + n_logits, "the comparison", hint)
        log.info(
            "the comparison writes %s to %s, which stay there for the next one",
            show_bytes(n_files + n_logits),
            cache,
        )

    def _missing_kinds(self) -> list[str]:
        """The types that are not files in the cache yet, whatever importance matrix they need."""
        stem = glob.escape(self._facts.path.stem)
        kinds = [file for file in self._files if isinstance(file, str)]
        return [kind for kind in kinds if not any(self._folder.glob(f"{stem}-{kind}*.gguf"))]

    def _size_of(self, kind: str) -> int:
        """The size of the reference in this type; 0 if it cannot be quantized to it."""
        try:
            return preview(self._facts.path, Recipe(kind)).n_bytes
        except EngineError:
            return 0  # the rung fails for itself

    def measure_reference(self) -> Reference:
        """The reference, from the cache if its result and its logits are there."""
        kept = _Kept(store_path("compare", *self._key))
        result = None
        if not self._spec.again and self._has_logits():
            result = kept.read(ReferenceResult.of_json)
        elif not self._spec.again and self._store.exists():
            log.warning("%s is damaged: qdraft writes it again", self._store)
        if result is None:
            with new_file(self._store) as part:  # in this process: an interrupt kills the child
                job = ReferenceJob(
                    self._facts.path, part, self._chunks, self._params, self._spec.servers
                )
                data = self._run(_MODULE, job.as_json(), self._progress)
            kept.write(data)
            result = ReferenceResult.of_json(data)
        return Reference(_describe(self._facts), result)

    def _has_logits(self) -> bool:
        """Are the reference's logits in the cache, and whole?"""
        try:
            read_about(self._store)
        except UsageError:
            return False
        return True

    def measure_rungs(self) -> Iterator[Rung | FailedRung]:
        """Each rung in turn; results in the cache come at once. Needs the reference's logits.

        A rung that is a type becomes a file in the cache.
        """
        for file in self._files:
            name = file if isinstance(file, str) else file.path.name
            try:
                yield self._measure_rung(file, name)
            except QDraftError as error:
                log.warning("%s: %s", name, error)
                yield FailedRung(name, str(error))

    def _measure_rung(self, file: Facts | str, name: str) -> Rung:
        spec = self._spec
        facts = file if isinstance(file, Facts) else self._quantize(file)
        bench = f"{spec.temperatures} {spec.n_predict}"
        kept = _Kept(store_path("compare", *self._key, file_facts(facts.path, spec.params), bench))
        result = None if spec.again else kept.read(RungResult.of_json)
        if result is None:
            if not self._texts:
                self._texts = write_held_out(
                    self._facts.path, spec.params, _N_MEASURED, self._progress
                )
            job = RungJob(
                self._facts.path,
                facts.path,
                self._store,
                self._chunks,
                self._n_vocab,
                self._texts,
                spec.temperatures,
                spec.n_predict,
                self._params,
                spec.servers,
            )
            data = self._run(_MODULE, job.as_json(), self._progress)
            kept.write(data)
            result = RungResult.of_json(data)
        return Rung(_describe(facts, name), result)

    @property
    def _folder(self) -> Path:
        """The folder in the cache for the reference in other types."""
        target = self._facts.path
        stat = target.stat()
        identity = f"{target.resolve()} {stat.st_size} {stat.st_mtime_ns} {build_id()}"
        return cache_dir() / "ladder" / _digest(identity)

    def _quantize(self, kind: str) -> Facts:
        """The reference quantized to a type, in the cache."""
        spec, target, folder = self._spec, self._facts.path, self._folder
        matrix = spec.imatrix
        if matrix is None and spec.with_imatrix:
            matrix = folder / "imatrix.gguf"
            if not matrix.exists():
                make_matrix(target, matrix, spec.params, progress=self._progress)
        suffix = ""
        if matrix:
            suffix = f"-{_digest(f'{matrix.resolve()}{matrix.stat().st_mtime_ns}')[:6]}"
        path = folder / f"{target.stem}-{kind}{suffix}.gguf"
        if not path.exists():
            quantize(
                target,
                path,
                Recipe(kind, matrix),
                threads=spec.params.n_threads or default_threads(),
                progress=renamed(self._progress, f"building {kind}"),
            )
        return require_model(path)


class _Kept:
    """The result of a job, kept in the cache as JSON."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, parse: Callable[[dict[str, Any]], Result]) -> Result | None:
        """What ``parse`` makes of the kept result; None if there is none, or if it is damaged."""
        try:
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            if kept["sha256"] != _digest_of(kept["result"]):
                raise ValueError("it has changed")
            return parse(kept["result"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.debug("%s: %s", self._path, error)
        log.warning("%s is damaged or of another version: qdraft measures again", self._path)
        return None

    def write(self, data: dict[str, Any]) -> None:
        kept = {"sha256": _digest_of(data), "result": data}
        with new_file(self._path) as part:
            part.write_text(json.dumps(kept), encoding="utf-8")


def _digest_of(data: dict[str, Any]) -> str:
    return _digest(json.dumps(data, sort_keys=True))


def _check_rung(rung: Path | str, reference: Facts) -> Facts | str:
    """The facts of a file that is another quantization of the reference, or the name of a type."""
    if isinstance(rung, str):
        if rung not in file_types():
            known = ", ".join(file_types())
            raise UsageError(f"{rung} is neither a file nor a type", hint=f"use one of {known}")
        return rung
    facts = require_model(rung)
    pairing = relate(reference, facts)
    if pairing.relation != SAME_MODEL:
        different = "; ".join(
            f"{d.what}: {d.first} and {d.second}" for d in pairing.differences[:2]
        )
        raise PairError(
            f"{facts.path.name} is not another quantization of {reference.path.name}: {different}",
            hint=f"list all differences with qdraft inspect {reference.path} {facts.path}",
        )
    return facts


def _describe(facts: Facts, name: str = "") -> QuantFile:
    return QuantFile(
        name or facts.path.name, facts.path, facts.file_type, facts.n_bytes, facts.bits_per_weight
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
