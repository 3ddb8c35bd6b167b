"""Ways to draft, for people: as replayed, and live for those that were confirmed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from qdraft.decoding.policy.model import Costs, speedup
from qdraft.render.tables import Entry, Sheet
from qdraft.study.chart_data import Chart, LineChart, costs_chart, line_of, places_chart
from qdraft.study.settings import Setting
from qdraft.study.tune import Tried, choose_n_draft, list_fixed

_MOST = 12  # ways in a table
_WAYS = ("way", "alpha", "draft yield", "tau", "replayed", "live", "low", "high", "live alpha")
_SETTINGS = ("setting", "target t/s", "c", "n_draft", "expected t/s", "note")


def sheets(tried: Sequence[Tried]) -> list[Sheet]:
    """One row for each way, in the order given; the title counts those that are left out."""
    title = "ways to draft, times the target alone"
    if len(tried) > _MOST:
        title += f" (the fastest {_MOST} of {len(tried)}; --json has all)"
    return [Sheet(title, _WAYS, tuple(map(_row, tried[:_MOST])))]


def charts(tried: Sequence[Tried], costs: Costs) -> list[Chart]:
    """Speed-up against n_draft, replayed, by the formula and live; acceptance by place; costs."""
    fixed = list_fixed(tried)
    drawn: list[Chart] = []
    if len(fixed) > 1:
        drawn.append(_lengths_chart(fixed, costs))
        longest = max(fixed, key=lambda way: way.params.n_draft or 0)
        drawn.append(places_chart(longest.replayed.alpha_at))
    return [*drawn, costs_chart(costs.v, costs.of_model, choose_n_draft(tried))]


def _lengths_chart(fixed: Sequence[Tried], costs: Costs) -> LineChart:
    """The speed-up of each fixed draft length."""
    lengths = [(way.params.n_draft or 0, way) for way in fixed]
    c = costs.of_model
    formula = [
        (n, speedup(way.replayed.alpha or 0.0, n, c, costs.v_at(n + 1))) for n, way in lengths
    ]
    lines = [
        line_of("replayed", [(n, way.replayed.speedup) for n, way in lengths]),
        line_of("by the formula at that alpha", formula),
        line_of("live", [(n, way.live.value if way.live else None) for n, way in lengths]),
    ]
    return LineChart(
        "Speed-up by draft length",
        "n_draft (tokens)",
        "speed (times the target alone)",
        tuple(line for line in lines if line.x),
    )


def report(tried: Sequence[Tried], costs: Costs, about: dict[str, Any]) -> dict[str, Any]:
    """The JSON object."""
    return {
        **about,
        "costs": {"c": costs.of_model, "v": {str(n): x for n, x in costs.v.items()}},
        "ways": [{"name": way.name, **way_report(way)} for way in tried],
    }


def way_report(way: Tried) -> dict[str, Any]:
    """One way as JSON; ``verify`` is the rule of verification."""
    params = asdict(way.params)
    renamed = {"verify" if key == "verification" else key: x for key, x in params.items()}
    return {**asdict(way), "params": renamed}


def setting_sheets(settings: Sequence[Setting]) -> list[Sheet]:
    """One row for each setting, as they were tried; no sheet if there are none."""
    if not settings:
        return []
    rows = tuple(
        (
            setting.name,
            setting.target_per_second or None,
            setting.c or None,
            setting.n_draft,
            setting.per_second or None,
            _note(setting),
        )
        for setting in settings
    )
    return [Sheet("settings", _SETTINGS, rows)]


def _note(setting: Setting) -> str:
    if setting.error:
        return setting.error
    return "" if setting.same_output else "changes what the target computes"


def _row(way: Tried) -> tuple[Entry, ...]:
    replayed, live = way.replayed, way.live
    return (
        way.name,
        replayed.alpha,
        replayed.draft_yield,
        replayed.tau,
        replayed.speedup,
        *((live.value, live.low, live.high) if live else (None,) * 3),
        way.live_alpha,
    )
