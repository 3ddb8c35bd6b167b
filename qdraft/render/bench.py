"""A bench, for people: tables, charts and the JSON object."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from qdraft.decoding.intervals import Ratio
from qdraft.decoding.rates import ratio
from qdraft.render.tables import Entry, Sheet
from qdraft.study.bench_rows import Bench, BenchRow
from qdraft.study.chart_data import BarChart, Chart, costs_chart, places_chart


def sheets(bench: Bench) -> list[Sheet]:
    """Speed by kind and temperature, and acceptance by task, temperature and place."""
    speeds = (
        "kind", "T", "alone", "t/s", "x alone", "low", "high", "predicted", "ttft s", "alone s",
    )  # fmt: skip
    rows = [*bench.rows, bench.total] if len(bench.rows) > 1 else [bench.total]
    found = [
        Sheet(
            f"tokens per second, total over total of {bench.total.n_texts} texts",
            speeds,
            tuple(map(_speed, rows)),
        )
    ]
    rates = ("by", "alpha", "draft yield", "tau", "x alone", "low", "high")
    grouped = [
        *((f"T {row.temperature:g}", row) for row in bench.by_temperature),
        *((row.kind or "", row) for row in bench.by_kind),
        ("all", bench.total),
    ]
    found.append(
        Sheet(
            "acceptance and speed-up by task and temperature",
            rates,
            tuple((name, *_rates(row)) for name, row in grouped),
        )
    )
    total = bench.total
    if len(total.sources) > 1:
        counts = ("source", "drafted", "tested", "accepted", "alpha")
        found.append(
            Sheet(
                "by source of the draft", counts, tuple(_source(*s) for s in total.sources.items())
            )
        )
    if total.alpha_at:
        places = tuple((i + 1, alpha) for i, alpha in enumerate(total.alpha_at))
        found.append(Sheet("acceptance by place in the draft", ("place", "alpha"), places))
    if total.rounds_by_accepted:
        counted = tuple(enumerate(total.rounds_by_accepted))
        found.append(Sheet("rounds by tokens accepted", ("accepted", "rounds"), counted))
    if bench.v:
        costs: tuple[tuple[Entry, ...], ...] = tuple((n, x) for n, x in sorted(bench.v.items()))
        of_draft = ", ".join(f"c of {source} {x:.3f}" for source, x in bench.c.items())
        found.append(Sheet(f"costs in target tokens: {of_draft}", ("rows", "v"), costs))
    return found


def charts(bench: Bench) -> list[Chart]:
    """Speed-up and acceptance by kind and temperature, acceptance by place, costs."""
    total = bench.total
    groups = [*bench.by_temperature, *bench.by_kind]
    names = tuple(row.kind if row.kind is not None else f"T {row.temperature:g}" for row in groups)
    ratios = [row.speedup for row in groups]
    found: list[Chart] = [
        BarChart(
            "Speed-up", "times the target alone", names,
            {
                "achieved": tuple(r.value if r else None for r in ratios),
                "predicted": tuple(row.predicted for row in groups),
            },
            even=1.0,
            low={
                "achieved": tuple(r.low if r else None for r in ratios),
                "predicted": (None,) * len(groups),
            },
            high={
                "achieved": tuple(r.high if r else None for r in ratios),
                "predicted": (None,) * len(groups),
            },
        )
    ]  # fmt: skip
    if total.n_tested:
        found.append(
            BarChart("Acceptance", "alpha", names, {"alpha": tuple(row.alpha for row in groups)})
        )
        found.append(places_chart(total.alpha_at))
    if bench.v:
        lengths = total.rounds_by_accepted
        used = round(total.n_drafted / sum(lengths)) if sum(lengths) else None
        found.append(costs_chart(bench.v, bench.c.get("model"), used))
    return found


def report(bench: Bench, about: dict[str, Any]) -> dict[str, Any]:
    """The JSON object; ``about`` names files, machine and settings."""
    whole = asdict(bench)
    whole["v"] = {str(n): x for n, x in bench.v.items()}
    whole["verdict"] = whole.pop("conclusion")
    return {**about, **whole}


def _speed(row: BenchRow) -> tuple[Entry, ...]:
    return (
        row.kind or "all", _number(row.temperature), row.alone_per_second,
        row.per_second, *_ends(row.speedup), row.predicted, row.ttft_s, row.alone_ttft_s,
    )  # fmt: skip


def _rates(row: BenchRow) -> tuple[Entry, ...]:
    return (row.alpha, row.draft_yield, row.tau, *_ends(row.speedup))


def _ends(speedup: Ratio | None) -> tuple[Entry, Entry, Entry]:
    return (speedup.value, speedup.low, speedup.high) if speedup else (None, None, None)


def _source(name: str, counts: dict[str, int]) -> tuple[Entry, ...]:
    tested, accepted = counts["n_tested"], counts["n_accepted"]
    return (name, counts["n_drafted"], tested, accepted, ratio(accepted, tested))


def _number(temperature: float | None) -> str:
    return "" if temperature is None else f"{temperature:g}"
