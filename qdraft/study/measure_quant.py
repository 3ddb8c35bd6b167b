"""One rung of a quantization ladder against the reference: quality, speed, worth as a draft.

``job`` runs in a child process (see ``qdraft.llama.child``).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qdraft.decoding.policy.model import Costs, best_n_draft
from qdraft.decoding.records import DecodeParams, SamplingParams
from qdraft.errors import UsageError
from qdraft.gguf.facts import require_model
from qdraft.host import resident_memory
from qdraft.llama.context import LlamaContext
from qdraft.llama.model import LlamaModel
from qdraft.llama.params import EngineParams
from qdraft.llama.progress import Progress, renamed
from qdraft.llama.rpc import connect
from qdraft.llama.sequence import LlamaSequence
from qdraft.llama.spec import Both, ModelSpec, PairSpec
from qdraft.making.costs import (
    N_PROMPT,
    measure_costs,
    measure_prompt_seconds,
    measure_token_seconds,
)
from qdraft.making.overlap import Overlap, measure_overlap
from qdraft.placement.buffers import require_memory
from qdraft.session.opening import fit, open_spec
from qdraft.session.store import describe_machine
from qdraft.study import bench
from qdraft.study.bench_rows import BenchRow, fold
from qdraft.study.logit_store import LogitsWriter, read_blocks
from qdraft.study.perplexity import Divergence, evaluate, rows_at_once
from qdraft.study.prompts import built_in
from qdraft.study.rung_result import AsDraft, ReferenceResult, RungResult

PLAIN = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)


@dataclass(frozen=True, slots=True)
class ReferenceJob:
    """Score the reference over ``chunks`` of tokens, and write its logits to ``store``."""

    reference: Path
    store: Path
    chunks: list[list[int]]
    params: EngineParams
    servers: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {"do": "reference", **asdict(self)}


@dataclass(frozen=True, slots=True)
class RungJob:
    """Score ``rung`` against the logits in ``store``, then measure it as the reference's draft.

    ``texts`` are those that acceptance is measured over: the number of prompt tokens and all
    tokens of each. ``n_predict`` is the number of tokens of each text of the short bench.
    """

    reference: Path
    rung: Path
    store: Path
    chunks: list[list[int]]
    n_vocab: int
    texts: list[tuple[int, list[int]]]
    temperatures: tuple[float, ...]
    n_predict: int
    params: EngineParams
    servers: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {"do": "rung", **asdict(self)}


def job(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Do a ``ReferenceJob`` or a ``RungJob``, given as JSON, and return its result as JSON."""
    kind, fields = request["do"], {name: x for name, x in request.items() if name != "do"}
    fields["params"] = EngineParams.of_json(fields["params"])
    for name in ("reference", "rung", "store"):
        if name in fields:
            fields[name] = Path(fields[name])
    connect(fields["servers"])
    if kind == "reference":
        return measure_reference(ReferenceJob(**fields), progress).as_json()
    return measure_rung(RungJob(**fields), progress).as_json()


def measure_reference(job: ReferenceJob, progress: Progress) -> ReferenceResult:
    """Score the reference, and keep its logits."""
    before = resident_memory()
    with _opened(job.reference, job.params) as sequence:
        with job.store.open("wb") as out:
            about = {"n_vocab": sequence.vocab.n_tokens, "chunks": len(job.chunks)}
            writer = LogitsWriter(out, about)
            scores = evaluate(
                sequence,
                job.chunks,
                keep=writer.write,
                progress=renamed(progress, "scoring the reference"),
            )
            writer.close()
        memory = _added_since(before)
        prompt_s = measure_prompt_seconds(sequence, job.chunks[0], time.perf_counter)
    return ReferenceResult(scores.perplexity(), N_PROMPT / prompt_s, memory, describe_machine())


def measure_rung(job: RungJob, progress: Progress) -> RungResult:
    """Score a rung alone, then measure it as a draft. Raises UsageError for another vocabulary."""
    before = resident_memory()
    with _opened(job.rung, job.params) as sequence:
        n_vocab = sequence.vocab.n_tokens
        if n_vocab != job.n_vocab:
            raise UsageError(
                f"{job.rung.name} has a vocabulary of {n_vocab} tokens, not of {job.n_vocab}"
            )
        scores = evaluate(
            sequence,
            job.chunks,
            base=read_blocks(job.store, n_vocab),
            progress=renamed(progress, f"scoring {job.rung.name}"),
        )
        memory = _added_since(before)
        prompt_s = measure_prompt_seconds(sequence, job.chunks[0], time.perf_counter)
        # Without repacked weights, as the file runs alone.
        token_s = measure_token_seconds(sequence, time.perf_counter)
    alone = _Alone(scores.divergence(), N_PROMPT / prompt_s, 1 / token_s, memory)
    return _measure_draft(job, alone, progress)


@dataclass(frozen=True, slots=True)
class _Alone:
    """A rung without the reference beside it: its fields of a ``RungResult``."""

    quality: Divergence
    prompt_per_second: float
    per_second: float
    memory: int | None


def _measure_draft(job: RungJob, alone: _Alone, progress: Progress) -> RungResult:
    """Load reference and rung as a pair, and measure costs, acceptance and a short bench."""
    with open_spec(PairSpec.of(job.reference, job.rung, job.params, keep_draft=True)) as pair:
        step = renamed(progress, f"drafting with {job.rung.name}")
        with pair.sequences() as sequences:
            target, draft = sequences.target, sequences.draft
            assert draft
            own = measure_overlap(target, draft, job.texts, None, step, job.temperatures)
            shared = None
            if sequences.kv_copy:
                copy = sequences.kv_copy.copy
                shared = measure_overlap(target, draft, job.texts, copy, step, job.temperatures)
            costs = measure_costs(target, draft, time.perf_counter)
            target_s = measure_token_seconds(target, time.perf_counter)
        samples = list(
            bench.measure(
                pair,
                built_in(),
                bench.at_temperatures(PLAIN, job.temperatures),
                DecodeParams(n_predict=job.n_predict, seed=1),
                progress=progress,
            )
        )
        live = fold(samples, pair.learned.costs.medians())
        return RungResult(
            quality=alone.quality,
            prompt_per_second=alone.prompt_per_second,
            per_second=alone.per_second,
            memory=alone.memory,
            c=costs.of_model,
            v=costs.v,
            target_per_second=1 / target_s,
            shares_kv=pair.kv.shared,
            no_sharing=pair.kv.reason,
            as_draft=tuple(_as_draft(row, own, shared, costs) for row in live.by_temperature),
            doubts=live.doubts,
            measured=describe_machine(),
        )


def _as_draft(row: BenchRow, own: Overlap, shared: Overlap | None, costs: Costs) -> AsDraft:
    """What was measured at the temperature of ``row``, and what the cost model predicts there."""
    t = row.temperature or 0.0
    alpha = (shared or own).by_temperature[t].value
    n_draft, predicted = best_n_draft(alpha, costs.of_model, costs.v)
    return AsDraft(
        temperature=t,
        alpha_own=own.by_temperature[t],
        alpha_shared=shared.by_temperature[t] if shared else None,
        n_draft=n_draft,
        predicted=predicted,
        measured=row.speedup,
        alpha_live=row.alpha,
    )


@contextmanager
def _opened(path: Path, params: EngineParams) -> Iterator[LlamaSequence]:
    """One file, loaded where it fits, with room for the rows of a block."""
    spec = fit(ModelSpec(path, params))
    params = spec.params
    require_memory(Both(spec), Both(require_model(path)))
    model = LlamaModel(path, params)
    try:
        context = LlamaContext(model, params, n_rows=rows_at_once(model.vocab.n_tokens))
        try:
            yield context.sequence()
        finally:
            context.close()
    finally:
        model.close()


def _added_since(before: int | None) -> int | None:
    """Bytes of memory beyond ``before``: weights, cache and buffers of one model."""
    now = resident_memory()
    return None if now is None or before is None else now - before
