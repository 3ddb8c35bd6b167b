"""Findings of `qdraft explain`, for people and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from qdraft.render.tables import Sheet
from qdraft.study.explain import Finding, Situation


def sheets(findings: Sequence[Finding]) -> list[Sheet]:
    """One row for each finding."""
    rows = tuple((f.topic, f.speedup, f.n_draft, f.words) for f in findings)
    return [Sheet("", ("situation", "x alone", "n_draft", "why"), rows)]


def report(
    findings: Sequence[Finding], figures: dict[str, Any], situation: Situation
) -> dict[str, Any]:
    """The JSON object; ``figures`` are those of the pair."""
    return {
        "figures": {
            key: {str(k): x for k, x in value.items()} if isinstance(value, dict) else value
            for key, value in figures.items()
        },
        "situation": asdict(situation),
        "findings": [asdict(finding) for finding in findings],
    }
