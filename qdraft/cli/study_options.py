"""Options that the studies share."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from qdraft.cli import options as opt
from qdraft.errors import UsageError
from qdraft.machine import described
from qdraft.pair import Pair
from qdraft.registry import Entry
from qdraft.study.replay import Costs
from qdraft.types import EngineParams

NPredictStudy = Annotated[
    int, opt.option("Prompt and text", "-n", "--n-predict", min=2, help="Most tokens of a text.")
]
Temperatures = Annotated[
    str, opt.option("Sampling", "--temp", "--temperature", help="One or several, as 0,0.7,1.")
]
OutputFormat = Annotated[
    str, opt.option("Output", "-o", "--output", help="table, json, csv or md, on stdout.")
]
PlotFile = Annotated[
    Path | None, opt.option("Output", "--plot", help="Pictures into this file: .png, .svg or .pdf.")
]
NoPlot = Annotated[bool, opt.option("Output", "--no-plot", help="No pictures in the terminal.")]
ReportFile = Annotated[
    Path | None,
    opt.option("Output", "--report", help="All of it as one HTML file that needs no network."),
]


def parse_temperatures(text: str) -> tuple[float, ...]:
    """Numbers from 0 on, separated by commas."""
    try:
        found = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        found = (-1.0,)
    if any(not 0 <= t < float("inf") for t in found):
        raise UsageError(f"--temp is {text}, but must be numbers from 0 on, such as 0,0.7,1")
    return found


def names_of(text: str) -> list[str]:
    """Names separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def parse_costs(text: str) -> dict[int, float]:
    """Times by number of rows, as 2=1.06,8=1.1. Raises UsageError."""
    try:
        found = {int(n): float(x) for n, x in (part.split("=") for part in text.split(","))}
    except ValueError:
        found = {}
    if not found or any(n < 2 or not 0 < x < float("inf") for n, x in found.items()):
        raise UsageError(f"--v is {text}, but must be times by number of rows, as 2=1.06,8=1.1")
    return found


def costs_with(known: Costs | None, c: float | None, v: str | None) -> Costs:
    """What a record has, or what is given in its place. Raises UsageError where one is missing."""
    if known is None and (c is None or not v):
        raise UsageError("without a record both --c and --v are needed")
    of_draft = c if c is not None else known.c if known else 0.0
    return Costs(of_draft, parse_costs(v) if v else known.v if known else {})


def engines_of(entry: Entry | None, threads: int) -> tuple[EngineParams, EngineParams, str]:
    """How an entry has its files loaded: target, draft, and whether they share KV cells."""
    told = entry.options if entry else {}

    def number(name: str) -> int:
        return int(told.get(name, 0))

    engines = opt.engine_params(
        2048, None, told.get("gpu-layers", "auto"), told.get("gpu-layers-draft", "auto"),
        number("main-gpu"), told.get("tensor-split"), threads or number("threads"),
        number("threads-batch"), told.get("cache-type-k", "f16"), told.get("cache-type-v", "f16"),
        told.get("flash-attn", "auto"), 2048, None,
    )  # fmt: skip
    return *engines, told.get("share-kv", "auto")


def about(pair: Pair, n_threads: int) -> dict[str, Any]:
    """The files, the build and the machine that figures are from."""
    return {
        "target": asdict(pair.target),
        "draft": asdict(pair.draft) if pair.draft else None,
        "kv": asdict(pair.kv),
        **described(n_threads),
    }
