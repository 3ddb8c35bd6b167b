"""Ways to draft that were tried, for people: replayed, and live where that was done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from qdraft.decoding.policy.model import Costs, speedup
from qdraft.render.tables import Entry, Sheet
from qdraft.study.chart_data import Chart, LineChart, costs_chart, line_of, places_chart
from qdraft.study.settings import Setting
from qdraft.study.tune import Tried

_MOST = 12  # ways in a table


def sheets(tried: Sequence[Tried]) -> list[Sheet]:
    """One row a way, as they come; those that were slow in the replay are only counted."""
    columns = (
        "way", "alpha", "draft yield", "tau", "replayed", "live", "low", "high", "live alpha",
    )  # fmt: skip
    shown = tried[:_MOST]
    title = "ways to draft, times the target alone"
    if len(shown) < len(tried):
        title += f" (the fastest {_MOST} of {len(tried)}; --json has all)"
    return [Sheet(title, columns, tuple(map(_row, shown)))]


def charts(tried: Sequence[Tried], costs: Costs) -> list[Chart]:
    """Speed-up against n_draft, replayed, by the formula and live; costs; acceptance by place."""
    fixed = [
        one
        for one in tried
        if one.params.draft_policy == "fixed" and one.params.verification == "block"
    ]
    out: list[Chart] = []
    c = costs.c["model"]
    if len(fixed) > 1:
        lengths = [(one.params.n_draft or 0, one) for one in fixed]
        lines = [
            line_of("replayed", [(n, one.replayed.speedup) for n, one in lengths]),
            line_of(
                "by the formula at that alpha",
                [
                    (n, speedup(one.replayed.alpha or 0.0, n, c, costs.v_at(n + 1)))
                    for n, one in lengths
                ],
            ),
            line_of("live", [(n, one.live.value if one.live else None) for n, one in lengths]),
        ]
        kept = tuple(line for line in lines if line.x)
        out.append(LineChart("Speed-up by draft length", "n_draft", "times the target alone", kept))
        longest = max(fixed, key=lambda one: one.params.n_draft or 0)
        out.append(places_chart(longest.replayed.alpha_at))
    best = max(fixed, key=lambda one: one.replayed.speedup, default=None)
    chosen = best.params.n_draft if best and best.replayed.speedup > 1 else None
    return [*out, costs_chart(dict(costs.v), c, chosen)]


def report(tried: Sequence[Tried], costs: Costs, about: dict[str, Any]) -> dict[str, Any]:
    """The JSON object."""
    return {
        **about,
        "costs": {"c": costs.c["model"], "v": {str(n): x for n, x in costs.v.items()}},
        "ways": [{"name": one.name, **asdict(one)} for one in tried],
    }


def words(tried: Sequence[Tried]) -> str:
    """Which way is the fastest by the replay."""
    best = max(tried, key=lambda one: one.replayed.speedup)
    if best.replayed.speedup <= 1:
        return "no way of drafting pays with these costs: the target alone is the fastest"
    alpha = "" if best.replayed.alpha is None else f" at alpha {best.replayed.alpha:.3f}"
    return f"{best.name} is the fastest: {best.replayed.speedup:.2f} times the target alone{alpha}"


def setting_sheets(found: Sequence[Setting]) -> list[Sheet]:
    """One row a setting, as they were tried; none where nothing was."""
    if not found:
        return []
    rows = tuple(
        (
            one.name, one.target_per_second or None, one.c or None, one.n_draft,
            one.per_second or None,
            one.error or ("" if one.same_output else "changes what the target computes"),
        )
        for one in found
    )  # fmt: skip
    return [Sheet("settings", ("setting", "target t/s", "c", "n_draft", "expected t/s", ""), rows)]


def _row(one: Tried) -> tuple[Entry, ...]:
    made, live = one.replayed, one.live
    ends: tuple[Entry, ...] = (live.value, live.low, live.high) if live else (None, None, None)
    return (
        one.name, made.alpha, made.draft_yield, made.tau, made.speedup, *ends, one.live_alpha,
    )  # fmt: skip
