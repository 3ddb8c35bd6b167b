"""The quantization ladder of one model: quality, speed and acceptance of each rung in one table."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from qdraft.errors import PairError, QDraftError, UsageError
from qdraft.gguf.facts import Facts, require_model
from qdraft.gguf.pairing import SAME_MODEL
from qdraft.gguf.pairing import compare as compare_files
from qdraft.host import default_threads
from qdraft.llama.context import LlamaModel
from qdraft.llama.imatrix import collect
from qdraft.llama.native import build_id
from qdraft.llama.params import EngineParams
from qdraft.llama.quantize import Recipe, file_types, quantize
from qdraft.llama.rpc import connect
from qdraft.llama.spec import ModelSpec
from qdraft.llama.vocab import LlamaVocab
from qdraft.making.calibration import built_in_text, to_chunks
from qdraft.making.make import held_out
from qdraft.paths import cache_dir, new_file
from qdraft.session.opening import fit
from qdraft.session.store import describe_machine, file_facts, store_path
from qdraft.study.child_job import Progress, run_job
from qdraft.study.perplexity import chunks_of
from qdraft.study.ranking import Measured

log = logging.getLogger(__name__)

RunJob = Callable[[str, dict[str, Any], Progress | None], dict[str, Any]]

_RUNG = "qdraft.study.measure_quant"
_N_PLACES = 90  # of held-out text, that acceptance is taken over
_VERSION = 2  # of what a cell measures


@dataclass(frozen=True, slots=True)
class ComparisonSpec:
    """What is compared, over which text."""

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
    spec: ComparisonSpec, *, progress: Progress | None = None, run: RunJob = run_job
) -> Iterator[Measured]:
    """The reference, then each rung as it is measured; those that were measured before at once.

    Types are quantized into the cache. Each cell runs in a child process, and what it found is
    kept, so that a comparison that was interrupted goes on where it was. Raises QDraftError for
    what concerns all of them; a rung that fails is yielded with its error.
    """
    connect(spec.servers, hold=False)  # each cell is a client of its own
    facts = require_model(spec.reference)
    files = [_known(rung, facts) for rung in spec.rungs]
    params = spec.params
    model = LlamaModel(facts.path, params, dry=True)  # for its vocabulary
    try:
        vocab = model.vocab
        chunks = chunks_of(vocab.tokenize(spec.text), spec.n_ctx, spec.n_chunks, vocab.chunk_bos)
        n_vocab = vocab.n_tokens
    finally:
        model.close()
    key = (
        file_facts(facts.path, params), _digest(json.dumps(chunks)), f"{spec.n_ctx} {_VERSION}"
    )  # fmt: skip
    store = store_path("logits", *key).with_suffix(".bin")
    engine = {**asdict(params), "n_ctx": max(1024, spec.n_ctx)}
    task = {
        "do": "reference", "target": str(facts.path), "store": str(store), "chunks": chunks,
        "params": engine, "servers": spec.servers,
    }  # fmt: skip
    wanted = _Kept(store_path("compare", *key), spec.again or not store.exists())
    found = wanted.value
    if found is None:
        with new_file(store) as part:  # here, because an interrupt kills the child
            found = run(_RUNG, {**task, "store": str(part)}, progress)
        found = wanted.keep(found)
    yield _measured(facts, found)
    texts: list[tuple[int, list[int]]] = []
    for file in files:
        name = file if isinstance(file, str) else file.path.name
        try:
            about = file if isinstance(file, Facts) else _make(facts.path, file, spec, progress)
            kept = _Kept(
                store_path(
                    "compare", *key, file_facts(about.path, params),
                    f"{spec.temperatures} {spec.n_predict}",
                ),
                spec.again,
            )  # fmt: skip
            if kept.value is None:
                if not texts:
                    texts = held_out(facts.path, params, _N_PLACES, progress)
                rung = {
                    **task, "do": "rung", "draft": str(about.path), "n_vocab": n_vocab,
                    "texts": texts, "temperatures": spec.temperatures, "n_predict": spec.n_predict,
                }  # fmt: skip
                kept.keep(run(_RUNG, rung, progress))
            assert kept.value
            yield _measured(about, kept.value, name)
        except QDraftError as error:
            log.warning("%s: %s", name, error)
            yield Measured(name, Path(name), "", 0, 0.0, {}, str(error))


class _Kept:
    """What a cell found, kept in the cache until it is asked for afresh."""

    def __init__(self, path: Path, again: bool) -> None:
        self._path = path
        self.value: dict[str, Any] | None = None
        if not again:
            try:
                value = json.loads(path.read_text(encoding="utf-8"))
                self.value = value if isinstance(value, dict) else None
            except (OSError, ValueError):
                pass

    def keep(self, found: dict[str, Any]) -> dict[str, Any]:
        """Also says when it was measured, for those who find it later."""
        self.value = {**found, "measured": describe_machine()}
        with new_file(self._path) as part:
            part.write_text(json.dumps(self.value, allow_nan=False), encoding="utf-8")
        return self.value


def _known(rung: Path | str, reference: Facts) -> Facts | str:
    """The facts of a file that is another quantization of the reference, or the name of a type."""
    if isinstance(rung, str):
        if rung not in file_types():
            known = ", ".join(file_types())
            raise UsageError(f"{rung} is no file and no type", hint=f"known types: {known}")
        return rung
    facts = require_model(rung)
    pairing = compare_files(reference, facts)
    if pairing.verdict != SAME_MODEL:
        different = "; ".join(
            f"{d.what}: {d.first} and {d.second}" for d in pairing.differences[:2]
        )
        raise PairError(
            f"{facts.path.name} is not another quantization of {reference.path.name}: {different}",
            hint=f"qdraft inspect {reference.path} {facts.path} shows all differences",
        )
    return facts


def _make(target: Path, kind: str, spec: ComparisonSpec, progress: Progress | None) -> Facts:
    """The target quantized to a type, in the cache."""
    stat = target.stat()
    which = f"{target.resolve()} {stat.st_size} {stat.st_mtime_ns} {build_id()}"
    folder = cache_dir() / "ladder" / _digest(which)
    matrix = spec.imatrix
    if matrix is None and spec.with_imatrix:
        matrix = _matrix(target, folder / "imatrix.gguf", spec.params, progress)
    told = (
        f"-{_digest(str(matrix.resolve()) + str(matrix.stat().st_mtime_ns))[:6]}" if matrix else ""
    )
    path = folder / f"{target.stem}-{kind}{told}.gguf"
    if not path.exists():
        n_threads = spec.params.n_threads or default_threads()
        step = None if progress is None else lambda n, of: progress(f"building {kind}", n, of)
        quantize(target, path, Recipe(kind, matrix), threads=n_threads, progress=step)
    return require_model(path)


def _matrix(target: Path, path: Path, params: EngineParams, progress: Progress | None) -> Path:
    """The importance matrix of the target over the built-in calibration text, made once."""
    if path.exists():
        return path
    params = fit(ModelSpec(target, params)).params
    model = LlamaModel(target, params)
    try:
        vocab: LlamaVocab = model.vocab
        chunks = to_chunks([vocab.tokenize(built_in_text())], vocab.chunk_bos)
        what = "collecting the importance matrix"
        step = None if progress is None else lambda n, of: progress(what, n, of)
        found = collect(model, chunks, params, progress=step)
    finally:
        model.close()
    found.datasets = ("built in",)
    found.save(path)
    return path


def _measured(facts: Facts, found: dict[str, Any], name: str = "") -> Measured:
    return Measured(
        name or facts.path.name,
        facts.path,
        facts.file_type,
        facts.n_bytes,
        facts.bits_per_weight,
        found,
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
