"""Findings of `qdraft explain`, for people and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from qdraft.render.tables import Sheet
from qdraft.study.explain import Finding, Situation


def sheets(found: Sequence[Finding]) -> list[Sheet]:
    """One row a finding."""
    rows = tuple((one.topic, one.speedup, one.n_draft, one.words) for one in found)
    return [Sheet("", ("situation", "x alone", "n_draft", "why"), rows)]


def report(found: Sequence[Finding], known: dict[str, Any], situation: Situation) -> dict[str, Any]:
    """The JSON object."""
    figures = {
        key: {str(k): x for k, x in value.items()} if isinstance(value, dict) else value
        for key, value in known.items()
    }
    return {
        "figures": figures,
        "situation": asdict(situation),
        "findings": [asdict(one) for one in found],
    }
