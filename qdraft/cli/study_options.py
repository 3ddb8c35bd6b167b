"""Options that the studies share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from qdraft.cli import options as opt
from qdraft.cli.machine_options import Machine
from qdraft.errors import UsageError
from qdraft.pairs.registry import Entry
from qdraft.study.replay import Costs

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


def machine_of(entry: Entry | None, threads: int) -> Machine:
    """How an entry has its files loaded; ``threads`` wins where it is given."""
    told = dict(entry.options if entry else {})
    return Machine.of_entry({**told, "threads": str(threads)} if threads else told)
