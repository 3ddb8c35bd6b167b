"""The JSON object of a run; docs/schema/run.json describes it."""

from __future__ import annotations

import dataclasses
from typing import Any

from qdraft.decoding.records import Round
from qdraft.llama.native import library_version
from qdraft.render.placed import placed_report
from qdraft.session.check import Check
from qdraft.session.generation import Generation
from qdraft.session.pair import ModelInfo, Pair


def run_report(pair: Pair, generation: Generation, check: Check | None) -> dict[str, Any]:
    """Everything about one text, ready for json.dumps."""
    summary = dataclasses.asdict(generation.summary)
    summary["v"] = {str(width): ratio for width, ratio in summary["v"].items()}
    return {
        "text": generation.text,
        "tokens": generation.tokens,
        "finish_reason": generation.finish_reason.value,
        "seed": generation.seed,
        "rounds": [_round(r) for r in generation.rounds],
        "summary": summary,
        "check": None
        if check is None
        else {**dataclasses.asdict(check), "explained": check.explained},
        "target": _model(pair.target),
        "draft": _model(pair.draft) if pair.draft else None,
        "kv": dataclasses.asdict(pair.kv),
        "placed": placed_report(pair),
        "exact": None
        if generation.bit_identity is None
        else dataclasses.asdict(generation.bit_identity),
        "library": f"llama-cpp-python {library_version()}",
    }


def _round(round: Round) -> dict[str, Any]:
    names = ("source", "n_prompt", "n_draft", "n_tested", "n_accepted", "n_emitted")
    return {
        **{name: getattr(round, name) for name in names},
        "dropped": round.draft.dropped,
        **dataclasses.asdict(round.times),
    }


def _model(info: ModelInfo) -> dict[str, Any]:
    return {"path": str(info.path), "n_bytes": info.n_bytes, "file_type": info.file_type}
