"""A quantization ladder, for people: tables, charts and the JSON object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qdraft.decoding.intervals import Mean, Ratio
from qdraft.render.tables import Entry, Sheet
from qdraft.study.chart_data import (
    BarChart,
    Chart,
    Line,
    LineChart,
    costs_chart,
    line_of,
    speed_chart,
)
from qdraft.study.ranking import Comparison, QuantFile, Reference, Rung

_QUALITY = (
    "file",
    "PPL(Q)",
    "±",
    "PPL ratio",
    "± ratio",
    "Mean KLD",
    "± KLD",
    "Median KLD",
    "99.0% KLD",
)
_SIZES = ("file", "type", "MB", "bits", "memory MB", "prompt t/s", "t/s", "x reference")
_PROBABILITIES = ("file", "Mean Δp", "±", "RMS Δp", "± RMS", "Same top p", "± top")
_AS_DRAFT = (
    "file",
    "T",
    "c",
    "alpha own",
    "shared",
    "n_draft",
    "predicted",
    "measured",
    "low",
    "high",
)


def sheets(comparison: Comparison) -> list[Sheet]:
    """Size and speed, quality, worth as a draft; the rungs that failed at the end."""
    reference, rungs = comparison.reference, comparison.rungs
    names = comparison.labels
    own = reference.result.quality.ppl
    tables = [
        Sheet(
            "size and speed of each file alone",
            _SIZES,
            (
                (names[reference.file.path], *_reference_speed(reference, rungs)),
                *((names[rung.file.path], *_rung_speed(rung)) for rung in rungs),
            ),
        ),
        Sheet(
            "perplexity and KL divergence, with standard errors",
            _QUALITY,
            (
                (names[reference.file.path], own.value, own.error, *(None,) * 6),
                *((names[rung.file.path], *_divergence(rung)) for rung in rungs),
            ),
        ),
        Sheet(
            "probability of the text's next token and the same top token, in %",
            _PROBABILITIES,
            tuple((names[rung.file.path], *_probabilities(rung)) for rung in rungs),
        ),
    ]
    if rungs:
        lines = tuple((names[rung.file.path], *line) for rung in rungs for line in _as_draft(rung))
        tables.append(Sheet(f"as a draft of {reference.file.name}", _AS_DRAFT, lines))
    if comparison.failed:
        failed = tuple((rung.name, rung.error) for rung in comparison.failed)
        tables.append(Sheet("not measured", ("file", "why"), failed))
    return tables


def charts(comparison: Comparison) -> list[Chart]:
    """Quality and acceptance against size, speed-ups, and the reference's costs."""
    rungs = comparison.rungs
    if not rungs:
        return []
    short = comparison.labels
    names = tuple(short[rung.file.path] for rung in rungs)
    temperatures = [draft.temperature for draft in rungs[0].result.as_draft]
    alphas = [
        _against_size(f"T {t:g}", rungs, names, [r.result.as_draft[i].alpha.value for r in rungs])
        for i, t in enumerate(temperatures)
    ]
    kld = [rung.result.quality.kld.value for rung in rungs]
    size = "file size (MB)"
    return [
        LineChart(
            "KL divergence against size",
            size,
            "mean KL divergence (nats)",
            (_against_size("mean KLD", rungs, names, kld),),
        ),
        LineChart("Acceptance against size", size, "acceptance rate alpha", tuple(alphas)),
        _speed_chart(rungs, names, temperatures),
        costs_chart(rungs[0].result.v, None, None),
    ]


def report(comparison: Comparison, about: dict[str, Any]) -> dict[str, Any]:
    """The JSON object: reference, rows and verdict."""
    reference = comparison.reference
    return {
        **about,
        "complete": comparison.complete,
        "reference": _row(reference.file, reference.result.as_json()),
        "rows": [
            *(_row(rung.file, rung.result.as_json()) for rung in comparison.rungs),
            *(
                _row(QuantFile(rung.name, Path(rung.name), "", 0, 0.0), {}, rung.error)
                for rung in comparison.failed
            ),
        ],
        "verdict": asdict(comparison.recommendation),
    }


def _row(file: QuantFile, result: dict[str, Any], error: str | None = None) -> dict[str, Any]:
    return {**asdict(file), "error": error, **result}


def _against_size(
    label: str, rungs: Sequence[Rung], names: Sequence[str], values: Sequence[float]
) -> Line:
    sizes = [rung.file.n_bytes / 1e6 for rung in rungs]
    return line_of(label, list(zip(sizes, values, strict=True)), names)


def _speed_chart(
    rungs: Sequence[Rung], names: tuple[str, ...], temperatures: Sequence[float]
) -> BarChart:
    """Each rung as a draft at each temperature, and alone."""
    groups: dict[str, list[Ratio | None]] = {
        f"as a draft, T {t:g}": [rung.result.as_draft[i].measured for rung in rungs]
        for i, t in enumerate(temperatures)
    }
    groups["the file alone"] = [Ratio(rung.result.speedup_alone) for rung in rungs]
    x_label = "speed (times the reference alone)"
    return speed_chart("Speed", x_label, "file type", names, groups)


def _reference_speed(reference: Reference, rungs: Sequence[Rung]) -> tuple[Entry, ...]:
    speed = rungs[0].result.target_per_second if rungs else None
    result = reference.result
    return _speed(reference.file, result.memory, result.prompt_per_second, speed, 1.0)


def _rung_speed(rung: Rung) -> tuple[Entry, ...]:
    result = rung.result
    return _speed(
        rung.file,
        result.memory,
        result.prompt_per_second,
        result.per_second,
        result.speedup_alone,
    )


def _speed(
    file: QuantFile,
    memory: int | None,
    prompt_per_second: float,
    per_second: float | None,
    speedup: float,
) -> tuple[Entry, ...]:
    return (
        file.file_type,
        round(file.n_bytes / 1e6),
        file.bits_per_weight,
        None if memory is None else round(memory / 1e6),
        prompt_per_second,
        per_second,
        speedup,
    )


def _divergence(rung: Rung) -> tuple[Entry, ...]:
    q = rung.result.quality
    means = (q.ppl, q.ppl_ratio, q.kld)
    return (*(x for mean in means for x in (mean.value, mean.error)), q.kld_median, q.kld_99)


def _probabilities(rung: Rung) -> tuple[Entry, ...]:
    q = rung.result.quality
    means: tuple[Mean, ...] = (q.dp, q.rms_dp, q.same_top)
    return tuple(100 * x for mean in means for x in (mean.value, mean.error))


def _as_draft(rung: Rung) -> Iterator[tuple[Entry, ...]]:
    for draft in rung.result.as_draft:
        measured = draft.measured
        yield (
            f"{draft.temperature:g}",
            rung.result.c,
            draft.alpha_own.value,
            draft.alpha_shared.value if draft.alpha_shared else None,
            draft.n_draft,
            draft.predicted,
            *((measured.value, measured.low, measured.high) if measured else (None,) * 3),
        )
