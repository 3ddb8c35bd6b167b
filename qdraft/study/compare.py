"""The quantization ladder of one model: quality, speed and acceptance of each rung in one table."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qdraft.errors import PairError, QDraftError, UsageError
from qdraft.gguf.facts import Facts, require_model
from qdraft.gguf.pairing import SAME_MODEL
from qdraft.gguf.pairing import compare as compare_files
from qdraft.host import default_threads
from qdraft.llama.child import RunJob, run_job
from qdraft.llama.model import LlamaModel
from qdraft.llama.native import build_id
from qdraft.llama.params import EngineParams
from qdraft.llama.progress import Progress, no_progress, renamed
from qdraft.llama.quantize import Recipe, file_types, quantize
from qdraft.llama.rpc import connect
from qdraft.making.make import write_held_out
from qdraft.making.matrix import make_matrix
from qdraft.paths import cache_dir, new_file
from qdraft.session.store import file_facts, store_path
from qdraft.study.measure_quant import ReferenceJob, RungJob
from qdraft.study.perplexity import chunks_of
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

_MODULE = "qdraft.study.measure_quant"
_N_MEASURED = 90  # tokens of held-out text to measure acceptance over
_VERSION = 3  # of what a job measures: qdraft measures results of other versions again


@dataclass(frozen=True, slots=True)
class ComparisonSpec:
    """What a comparison compares, and over which text.

    ``rungs`` are files, or names of types to quantize the reference to. ``n_chunks`` None scores
    all of ``text``. ``imatrix`` None collects an importance matrix for the types, unless
    ``with_imatrix`` is False. ``again`` also measures what the cache holds.
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


def compare(
    spec: ComparisonSpec, *, progress: Progress = no_progress, run: RunJob = run_job
) -> Comparison:
    """Measure the reference, then each rung, and rank the rungs.

    An interrupt after the reference ends the comparison with the rungs that are done; the next
    comparison continues from there. Raises QDraftError if the reference cannot be measured or a
    rung is not another quantization of it.
    """
    ladder = Ladder(spec, progress, run)
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
        model = LlamaModel(self._facts.path, spec.params, dry=True)  # for its vocabulary
        try:
            vocab = model.vocab
            tokens = vocab.tokenize(spec.text)
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

    def measure_reference(self) -> Reference:
        """The reference, from the cache if its result and its logits are there."""
        kept = _Kept(store_path("compare", *self._key))
        data = None if self._spec.again or not self._store.exists() else kept.read()
        if data is None:
            with new_file(self._store) as part:  # in this process: an interrupt kills the child
                job = ReferenceJob(
                    self._facts.path, part, self._chunks, self._params, self._spec.servers
                )
                data = self._run(_MODULE, job.as_json(), self._progress)
            kept.write(data)
        return Reference(_describe(self._facts), ReferenceResult.of_json(data))

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
        data = None if spec.again else kept.read()
        if data is None:
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
        return Rung(_describe(facts, name), RungResult.of_json(data))

    def _quantize(self, kind: str) -> Facts:
        """The reference quantized to a type, in the cache."""
        spec, target = self._spec, self._facts.path
        stat = target.stat()
        identity = f"{target.resolve()} {stat.st_size} {stat.st_mtime_ns} {build_id()}"
        folder = cache_dir() / "ladder" / _digest(identity)
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

    def read(self) -> dict[str, Any] | None:
        """The kept result; None if there is none, or if it is damaged."""
        try:
            value = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return value if isinstance(value, dict) else None

    def write(self, data: dict[str, Any]) -> None:
        with new_file(self._path) as part:
            part.write_text(json.dumps(data), encoding="utf-8")


def _check_rung(rung: Path | str, reference: Facts) -> Facts | str:
    """The facts of a file that is another quantization of the reference, or the name of a type."""
    if isinstance(rung, str):
        if rung not in file_types():
            known = ", ".join(file_types())
            raise UsageError(f"{rung} is neither a file nor a type", hint=f"use one of {known}")
        return rung
    facts = require_model(rung)
    pairing = compare_files(reference, facts)
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
