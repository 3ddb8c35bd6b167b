"""What is known about a pair before it is explained: from a bench's JSON, and from its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qdraft.errors import UsageError
from qdraft.gguf.facts import read_facts


def read_bench(text: str, path: Path) -> dict[str, Any]:
    """Return the figures in a bench's JSON, by their names in ``Figures``.

    Raises UsageError, which names ``path``, if the text is anything else.
    """
    try:
        data = json.loads(text)
        alphas = {
            row["temperature"]: row["alpha"]
            for row in data["by_temperature"]
            if row["alpha"] is not None
        }
        total, target_s = data["total"], data["target_s"]
        return {
            "alpha": alphas,
            "c": data["c"].get("model"),
            "v": {int(n): x for n, x in data["v"].items()},
            "shares_kv": data["kv"]["shared"],
            "prompt_cost": total["alone_ttft_s"] / max(1.0, total["n_prompt"]) / target_s,
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} is not the output of qdraft bench -o json",
            hint="write it with qdraft bench -o json > FILE",
        ) from error


def read_files(target: Path | None, draft: Path | None) -> dict[str, Any]:
    """Return the sizes, bits and experts of the files, by their names in ``Figures``."""
    known: dict[str, Any] = {}
    if target:
        facts = read_facts(target)
        known["target_bytes"], known["target_bits"] = facts.n_bytes, facts.bits_per_weight
        if facts.n_experts and facts.n_experts_used:
            known["experts"] = (facts.n_experts_used, facts.n_experts)
    if draft:
        known["draft_bytes"] = read_facts(draft).n_bytes
    return known
