"""One rung of a quantization ladder against the reference: quality, speed, worth as a draft.

Runs in a child process (see ``qdraft.study.child_job``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from qdraft.decoding.engine import Engine
from qdraft.decoding.policy.model import best_n_draft
from qdraft.decoding.records import DecodeParams, SamplingParams
from qdraft.errors import UsageError
from qdraft.llama.context import LlamaEngine, LlamaModel
from qdraft.llama.params import EngineParams
from qdraft.llama.rpc import connect
from qdraft.llama.spec import ModelSpec, PairSpec
from qdraft.making.overlap import overlap
from qdraft.making.try_recipes import measure_costs
from qdraft.session.opening import fit, open_spec
from qdraft.study import bench
from qdraft.study.bench_rows import fold
from qdraft.study.child_job import Progress
from qdraft.study.logit_store import LogitsWriter, read_blocks
from qdraft.study.perplexity import evaluate, rows_at_once
from qdraft.study.prompts import built_in

PLAIN = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)
_PROMPT = 256  # tokens of the prompt that is timed
_REPEATS = 5


def job(task: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """``task["do"]`` is "reference" or "rung"; see the two functions."""
    return (reference if task["do"] == "reference" else rung)(task, progress)


def reference(task: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Score the reference, and keep its logits in ``task["store"]``."""
    chunks: list[list[int]] = task["chunks"]
    path = Path(task["store"])
    before = _resident()
    model, engine = _open(task["target"], task)
    try:
        with path.open("wb") as out:
            writer = LogitsWriter(out, {"n_vocab": engine.vocab.n_tokens, "chunks": len(chunks)})
            scores = evaluate(
                engine, chunks, keep=writer.write,
                progress=lambda done, of: progress("scoring the reference", done, of),
            )  # fmt: skip
            writer.close()
        memory = _grown(before)
        prompt_s = prompt_seconds(engine, chunks[0])
    finally:
        engine.close()
        model.close()
    found = scores.perplexity()
    return {"quality": asdict(found), "prompt_per_second": _PROMPT / prompt_s, "memory": memory}


def rung(task: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Score a rung against the kept logits, then measure it as a draft of the reference."""
    name = Path(task["draft"]).name
    chunks: list[list[int]] = task["chunks"]
    before = _resident()
    model, engine = _open(task["draft"], task)
    try:
        if engine.vocab.n_tokens != task["n_vocab"]:
            raise UsageError(f"{name} has {engine.vocab.n_tokens} tokens, not {task['n_vocab']}")
        scores = evaluate(
            engine, chunks, base=read_blocks(Path(task["store"]), engine.vocab.n_tokens),
            progress=lambda done, of: progress(f"scoring {name}", done, of),
        )  # fmt: skip
        memory = _grown(before)
        prompt_s = prompt_seconds(engine, chunks[0])
        one_s = seconds_of_one(engine)  # as the file runs alone: without extra buffers
    finally:
        engine.close()
        model.close()
    return {
        "quality": asdict(scores.divergence()),
        "prompt_per_second": _PROMPT / prompt_s,
        "per_second": 1 / one_s,
        "memory": memory,
        **_as_draft(task, progress),
    }


def _as_draft(task: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """c, acceptance with own and shared cells, the best length, predicted and measured speed."""
    name = Path(task["draft"]).name
    temperatures: list[float] = task["temperatures"]
    texts: list[tuple[int, list[int]]] = task["texts"]
    params = _engine_params(task)
    files = Path(task["target"]), Path(task["draft"])
    with open_spec(PairSpec.of(*files, params, keep_draft=True)) as pair:
        assert pair.draft_engine
        engines = (pair.target_engine, pair.draft_engine)

        def step(done: float, of: float) -> None:
            progress(f"drafting with {name}", done, of)

        own = overlap(*engines, texts, None, step, temperatures)
        shared = None
        if pair.courier:
            shared = overlap(*engines, texts, pair.courier.copy, step, temperatures)
        c, v = measure_costs(*engines, time.perf_counter)
        target_s = seconds_of_one(pair.target_engine)
        used = shared or own
        chosen = {t: best_n_draft(mean.value, c, v) for t, mean in used.by_temperature.items()}
        samples = list(
            bench.measure(
                pair, built_in(), temperatures, sampling=PLAIN,
                params=DecodeParams(n_predict=task["n_predict"], seed=1), progress=progress,
            )
        )  # fmt: skip
        found = fold(samples, pair.costs.medians())
        rows = {row.temperature: row for row in found.by_temperature}
        return {
            "c": c,
            "v": {str(n): x for n, x in v.items()},
            "target_per_second": 1 / target_s,
            "shares_kv": pair.kv.shared,
            "no_sharing": pair.kv.reason,
            "as_draft": [
                {
                    "temperature": t,
                    "alpha_own": asdict(own.by_temperature[t]),
                    "alpha_shared": asdict(shared.by_temperature[t]) if shared else None,
                    "n_draft": chosen[t][0],
                    "predicted": chosen[t][1],
                    "measured": asdict(ratio) if (ratio := rows[t].speedup) else None,
                    "alpha_live": rows[t].alpha,
                }
                for t in temperatures
            ],
            "doubts": list(found.doubts),
        }


def _open(path: str, task: dict[str, Any]) -> tuple[LlamaModel, LlamaEngine]:
    params = fit(ModelSpec(Path(path), _engine_params(task))).params
    model = LlamaModel(Path(path), params)
    try:
        rows = rows_at_once(model.vocab.n_tokens)
        return model, LlamaEngine(model, params, n_rows=rows)
    except BaseException:
        model.close()
        raise


def _engine_params(task: dict[str, Any]) -> EngineParams:
    connect(task["servers"])
    return EngineParams.of_json(task["params"])


def prompt_seconds(engine: Engine, tokens: Sequence[int]) -> float:
    """Seconds for a prompt of ``_PROMPT`` tokens from an empty cache; the median of three."""
    prompt = [tokens[i % len(tokens)] for i in range(_PROMPT)]
    times = []
    for _ in range(3):
        engine.truncate(0)
        started = time.perf_counter()
        engine.eval(prompt, 1)
        times.append(time.perf_counter() - started)
    engine.truncate(0)
    return median(times)


def seconds_of_one(engine: Engine) -> float:
    """Median seconds of one token after a short text."""
    engine.truncate(0)
    engine.eval(list(range(1, 65)), 0)
    times = []
    for i in range(4 * _REPEATS):
        started = time.perf_counter()
        engine.eval([i + 1], 1)
        times.append(time.perf_counter() - started)
    engine.truncate(0)
    return median(times)


def _grown(before: int | None) -> int | None:
    """Bytes that came into memory since ``before``: weights, cache and buffers of one model."""
    now = _resident()
    return None if now is None or before is None else now - before


def _resident() -> int | None:
    """Bytes of this process in memory; None where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    import resource

    return pages * resource.getpagesize()
