"""A quantization ladder, for people: tables, charts and the JSON object."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qdraft.render.tables import Cell, Sheet
from qdraft.study.chart_data import BarChart, Chart, LineChart, costs_chart, line_of
from qdraft.study.ranking import Comparison, Measured


def sheets(found: Comparison) -> list[Sheet]:
    """Size and speed, quality, worth as a draft; failed rungs at the end."""
    rows = [row for row in found.rows if not row.error]
    names = labels(found)
    everyone = [found.reference, *rows]
    speed = rows[0].found["target_per_second"] if rows else None
    out = [
        Sheet(
            "size and speed of each file alone",
            ("file", "type", "MB", "bits", "memory MB", "prompt t/s", "t/s", "x reference"),
            tuple((names[row.path], *_alone(row, speed)) for row in everyone),
        ),
        Sheet(
            "perplexity and KL divergence, with standard errors",
            (
                "file", "PPL(Q)", "±", "PPL ratio", "± ratio", "Mean KLD", "± KLD", "Median KLD",
                "99.0% KLD",
            ),
            tuple((names[row.path], *_divergence(row)) for row in everyone),
        ),
        Sheet(
            "probability of the text's next token and the same top token, in %",
            ("file", "Mean Δp", "±", "RMS Δp", "± RMS", "Same top p", "± top"),
            tuple((names[row.path], *_probabilities(row)) for row in rows),
        ),
    ]  # fmt: skip
    if rows:
        columns = (
            "file", "T", "c", "alpha own", "shared", "n_draft", "predicted", "measured", "low",
            "high",
        )  # fmt: skip
        lines = tuple((names[row.path], *line) for row in rows for line in _draft(row))
        out.append(Sheet(f"as a draft of {found.reference.name}", columns, lines))
    failed = tuple((row.name, row.error) for row in found.rows if row.error)
    if failed:
        out.append(Sheet("not measured", ("file", "why"), failed))
    return out


def labels(found: Comparison) -> dict[Path, str]:
    """Short names: the file's type where no other file has it, else its name."""
    rows = (found.reference, *found.rows)
    counts = Counter(row.file_type for row in rows)
    return {
        row.path: row.file_type if counts[row.file_type] == 1 else row.path.stem for row in rows
    }


def charts(found: Comparison) -> list[Chart]:
    """Quality and acceptance against size, speed-ups, the target's costs."""
    rows = [row for row in found.rows if not row.error]
    if not rows:
        return []
    sizes = [row.n_bytes / 1e6 for row in rows]

    def against_size(
        title: str, label: str, values: list[tuple[str, list[float | None]]]
    ) -> LineChart:
        lines = [line_of(name, list(zip(sizes, y, strict=True))) for name, y in values]
        return LineChart(title, "MB", label, tuple(lines))

    kld = [row.found["quality"]["kld"]["value"] for row in rows]
    temperatures = [of["temperature"] for of in rows[0].found["as_draft"]]
    short = labels(found)
    names = tuple(short[row.path] for row in rows)
    alphas: list[tuple[str, list[float | None]]] = []
    speeds: dict[str, tuple[float | None, ...]] = {}
    low: dict[str, tuple[float | None, ...]] = {}
    high: dict[str, tuple[float | None, ...]] = {}
    for i, t in enumerate(temperatures):
        of = [row.found["as_draft"][i] for row in rows]
        alphas.append((f"T {t:g}", [_value(a["alpha_shared"] or a["alpha_own"]) for a in of]))
        label = f"as a draft, T {t:g}"
        speeds[label] = tuple(_value(a["measured"]) for a in of)
        low[label] = tuple(a["measured"] and a["measured"]["low"] for a in of)
        high[label] = tuple(a["measured"] and a["measured"]["high"] for a in of)
    speeds["the file alone"] = tuple(
        row.found["per_second"] / row.found["target_per_second"] for row in rows
    )
    low["the file alone"] = high["the file alone"] = (None,) * len(rows)
    out: list[Chart] = [
        against_size("KL divergence against size", "mean KLD", [("mean KLD", kld)]),
        against_size("Acceptance against size", "alpha", alphas),
        BarChart("Speed", "times the reference alone", names, speeds, 1.0, low, high),
    ]
    v = {int(n): x for n, x in rows[0].found["v"].items()}
    return [*out, costs_chart(v, None, None)]


def doubts(found: Comparison, today: str) -> list[str]:
    """What the rungs' benches doubted, and which figures are of another day."""
    rows = [row for row in found.rows if not row.error]
    told = sorted({f"{labels(found)[r.path]}: {d}" for r in rows for d in r.found["doubts"]})
    old = sorted({r.found["measured"]["date"] for r in rows if "measured" in r.found} - {today})
    if old:
        told.append(f"some figures are of {', '.join(old)}, kept in the cache: --again measures")
    return told


def report(found: Comparison, about: dict[str, Any]) -> dict[str, Any]:
    """The JSON object: reference, rows and verdict."""
    whole = asdict(found)
    return {
        **about,
        "complete": found.complete,
        "reference": _flat(whole["reference"]),
        "rows": [_flat(row) for row in whole["rows"]],
        "verdict": whole["recommendation"],
    }


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    found = row.pop("found")
    return {**row, **found}


def _alone(row: Measured, reference: float | None) -> tuple[Cell, ...]:
    found = row.found
    memory = found["memory"]
    alone = found.get("per_second")
    return (
        row.file_type, round(row.n_bytes / 1e6), row.bits_per_weight,
        memory and round(memory / 1e6), found["prompt_per_second"], alone or reference,
        alone / found["target_per_second"] if alone else 1.0,
    )  # fmt: skip


def _divergence(row: Measured) -> tuple[Cell, ...]:
    q = row.found["quality"]
    own = (q["ppl"]["value"], q["ppl"]["error"])
    if "kld" not in q:  # the reference itself
        return (*own, *(None,) * 6)
    return (
        *own, q["ppl_ratio"]["value"], q["ppl_ratio"]["error"], q["kld"]["value"],
        q["kld"]["error"], q["kld_median"], q["kld_99"],
    )  # fmt: skip


def _probabilities(row: Measured) -> tuple[Cell, ...]:
    q = row.found["quality"]
    means = (q["dp"], q["rms_dp"], q["same_top"])
    return tuple(100 * mean[key] for mean in means for key in ("value", "error"))


def _draft(row: Measured) -> list[tuple[Cell, ...]]:
    lines: list[tuple[Cell, ...]] = []
    for of in row.found["as_draft"]:
        measured = of["measured"] or {"value": None, "low": None, "high": None}
        lines.append(
            (
                f"{of['temperature']:g}", row.found["c"], _value(of["alpha_own"]),
                _value(of["alpha_shared"]), of["n_draft"], of["predicted"], measured["value"],
                measured["low"], measured["high"],
            )
        )  # fmt: skip
    return lines


def _value(mean: dict[str, float] | None) -> float | None:
    return None if mean is None else mean["value"]
