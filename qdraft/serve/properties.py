"""What a server says of its pairs: /props and the entries of /v1/models."""

from __future__ import annotations

import dataclasses
from typing import Any

from qdraft import __version__
from qdraft.llama.native import build_id
from qdraft.llama.placed import describe_placed
from qdraft.serve.models import Loaded
from qdraft.session.pair import ModelInfo


def describe_model(name: str, loaded: Loaded | None) -> dict[str, Any]:
    """Return an entry of /v1/models; ``meta`` needs a loaded pair."""
    entry: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": loaded.created if loaded else 0,
        "owned_by": "qdraft",
        "status": {"value": "loaded" if loaded else "unloaded"},
    }
    if loaded is not None:
        facts = loaded.pair.facts.target
        entry["meta"] = {
            "n_vocab": loaded.pair.vocab.n_tokens,
            "n_ctx": loaded.n_ctx,
            "n_ctx_train": facts.n_ctx_train,
            "n_embd": facts.n_embd,
            "n_params": facts.n_parameters,
            "size": facts.n_bytes,
            "ftype": facts.file_type,
            "draft": _describe_draft(loaded),
        }
    return entry


def properties(loaded: Loaded) -> dict[str, Any]:
    """Return llama-server's properties of a pair, and under ``qdraft`` what it has not."""
    pair, defaults = loaded.pair, loaded.defaults
    sampling = {
        name: value
        for name, value in dataclasses.asdict(defaults.sampling).items()
        if isinstance(value, (int, float))
    }
    decode = defaults.decode
    return {
        "default_generation_settings": {
            "n_ctx": loaded.n_ctx,
            "params": {
                **sampling,
                "n_predict": decode.n_predict,
                "max_tokens": decode.n_predict,
                "seed": decode.seed,
                "stop": list(decode.stop),
            },
        },
        "total_slots": 1,
        "model_alias": loaded.name,
        "model_path": str(pair.target.path),
        "model_ftype": pair.facts.target.file_type,
        "chat_template": pair.spec.template or pair.facts.target.chat_template,
        "modalities": {"vision": False, "audio": False},
        "build_info": build_id(),
        "is_sleeping": False,
        "qdraft": {
            "version": __version__,
            "draft": _describe_draft(loaded),
            "drafter": decode.drafter,
            "draft_policy": decode.draft_policy,
            "n_draft": decode.most_drafted,
            "verification": decode.verification,
            "exact": decode.exact,
            "kv": dataclasses.asdict(pair.kv),
            "placed": [describe_placed(placed) for placed in pair.placed],
            "recommended": pair.recommended.used_in(defaults.sampling),
        },
    }


def describe_loaded(loaded: Loaded) -> list[str]:
    """Say in lines what runs: files, drafting, devices and context."""
    pair, decode = loaded.pair, loaded.defaults.decode
    target, *draft = (
        f"{_describe_file(info)}, {describe_placed(placed)}"
        for info, placed in zip(pair.models, pair.placed, strict=True)
    )
    lines = [f"target {target}"]
    lines.append(f"draft {draft[0]}" if draft else "no draft file")
    if decode.most_drafted == 0 or (decode.drafter == "model" and not draft):
        lines.append("drafting: none, the target runs alone")
    else:
        how = {
            "auto": f"up to {decode.most_drafted} tokens a round, as many as pay off",
            "fixed": f"{decode.most_drafted} tokens a round",
            "confidence": f"up to {decode.most_drafted} tokens a round, while the draft is sure",
        }
        kv = "the target's KV cells" if pair.kv.shared else "KV cells of its own"
        cells = f", {kv}" if draft else ""
        lines.append(
            f"drafting: {decode.drafter}, {how[decode.draft_policy]}, {decode.verification} "
            f"verification{cells}"
        )
    lines.append(f"context {loaded.n_ctx} tokens")
    return lines


def _describe_file(info: ModelInfo) -> str:
    return f"{info.path.name} ({info.file_type}, {info.n_bytes / 2**30:.2f} GiB)"


def _describe_draft(loaded: Loaded) -> dict[str, Any] | None:
    draft = loaded.pair.draft
    if draft is None:
        return None
    return {"path": str(draft.path), "ftype": draft.file_type, "size": draft.n_bytes}
