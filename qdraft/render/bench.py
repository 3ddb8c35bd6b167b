"""A bench, for people: tables, charts and the JSON object."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from qdraft.decoding.intervals import Ratio
from qdraft.decoding.rates import Counts
from qdraft.render.tables import Entry, Sheet
from qdraft.study.bench_rows import Bench, BenchRow
from qdraft.study.chart_data import BarChart, Chart, costs_chart, places_chart, speed_chart

_SPEEDS = (
    "kind",
    "T",
    "alone",
    "t/s",
    "x alone",
    "low",
    "high",
    "predicted",
    "ttft s",
    "alone s",
)
_RATES = ("by", "alpha", "draft yield", "tau", "x alone", "low", "high")
_SOURCES = ("source", "drafted", "tested", "accepted", "alpha")


def sheets(bench: Bench) -> list[Sheet]:
    """Speed by kind and temperature; acceptance by kind, temperature, source and place; costs."""
    total = bench.total
    rows = [*bench.rows, total] if len(bench.rows) > 1 else [total]
    groups = [
        *((f"T {row.temperature:g}", row) for row in bench.by_temperature),
        *((row.kind or "", row) for row in bench.by_kind),
        ("all", total),
    ]
    tables = [
        Sheet(
            f"tokens per second, total over total of {total.n_texts} texts",
            _SPEEDS,
            tuple(map(_speed, rows)),
        ),
        Sheet(
            "acceptance and speed-up by kind and temperature",
            _RATES,
            tuple((name, *_rates(row)) for name, row in groups),
        ),
    ]
    if len(total.sources) > 1:
        counts = tuple(_source(name, of_source) for name, of_source in total.sources.items())
        tables.append(Sheet("by source of the draft", _SOURCES, counts))
    if total.alpha_at:
        places = tuple((i + 1, alpha) for i, alpha in enumerate(total.alpha_at))
        tables.append(Sheet("acceptance by place in the draft", ("place", "alpha"), places))
    if total.rounds_by_accepted:
        counted = tuple(enumerate(total.rounds_by_accepted))
        tables.append(Sheet("rounds by tokens accepted", ("accepted", "rounds"), counted))
    if bench.v:
        costs: tuple[tuple[Entry, ...], ...] = tuple(sorted(bench.v.items()))
        c = ", ".join(f"c of {source} {x:.3f}" for source, x in bench.c.items())
        tables.append(Sheet(f"costs in target tokens: {c}", ("rows", "v"), costs))
    return tables


def charts(bench: Bench) -> list[Chart]:
    """Speed-up and acceptance by kind and temperature, acceptance by place, costs."""
    total = bench.total
    groups = [*bench.by_temperature, *bench.by_kind]
    names = tuple(row.kind if row.kind is not None else f"T {row.temperature:g}" for row in groups)
    by = "temperature or kind of task"
    predicted = [None if row.predicted is None else Ratio(row.predicted) for row in groups]
    drawn: list[Chart] = [
        speed_chart(
            "Speed-up",
            "speed (times the target alone)",
            by,
            names,
            {"achieved": [row.speedup for row in groups], "predicted": predicted},
        )
    ]
    if total.n_tested:
        alphas = {"alpha": tuple(row.alpha for row in groups)}
        drawn.append(BarChart("Acceptance", "acceptance rate alpha", by, names, alphas))
        drawn.append(places_chart(total.alpha_at))
    if bench.v:
        n_rounds = sum(total.rounds_by_accepted)
        used = round(total.n_drafted / n_rounds) if n_rounds else None
        drawn.append(costs_chart(bench.v, bench.c.get("model"), used))
    return drawn


def report(bench: Bench, about: dict[str, Any]) -> dict[str, Any]:
    """The JSON object; ``about`` names files, machine and settings."""
    whole = asdict(bench)
    whole["v"] = {str(n): x for n, x in bench.v.items()}
    whole["verdict"] = whole.pop("conclusion")
    return {**about, **whole}


def _speed(row: BenchRow) -> tuple[Entry, ...]:
    return (
        row.kind or "all",
        "" if row.temperature is None else f"{row.temperature:g}",
        row.alone_per_second,
        row.per_second,
        *_ends(row.speedup),
        row.predicted,
        row.ttft_s,
        row.alone_ttft_s,
    )


def _rates(row: BenchRow) -> tuple[Entry, ...]:
    return (row.alpha, row.draft_yield, row.tau, *_ends(row.speedup))


def _ends(speedup: Ratio | None) -> tuple[Entry, Entry, Entry]:
    return (speedup.value, speedup.low, speedup.high) if speedup else (None, None, None)


def _source(name: str, counts: dict[str, int]) -> tuple[Entry, ...]:
    known = Counts(**counts)
    return (name, known.n_drafted, known.n_tested, known.n_accepted, known.alpha)
