"""What a command prints, and where."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from qdraft.cli.options.group import Group, option
from qdraft.errors import UsageError
from qdraft.render.charts import require_plotting
from qdraft.render.tables import FORMATS

PANEL = "Output"


@dataclass(frozen=True, kw_only=True)
class OutputOptions(Group):
    """One JSON object or text for people, with or without progress."""

    as_json: Annotated[bool, option(PANEL, "--json", help="Print one JSON object.")] = False
    quiet: Annotated[bool, option(PANEL, "--quiet", help="Print no progress and no notes.")] = False


@dataclass(frozen=True, kw_only=True)
class RunOutputOptions(OutputOptions):
    """What ``run`` prints."""

    quiet: Annotated[
        bool,
        option(PANEL, "--quiet", help="Print only the text, errors and the result of --check."),
    ] = False
    verbose: Annotated[
        bool, option(PANEL, "--verbose", help="Print llama.cpp's log on stderr.")
    ] = False
    color: Annotated[
        bool,
        option(
            PANEL,
            "--color",
            help="Style each token by where it comes from: draft, bonus, residual or target.",
        ),
    ] = False
    raw_output: Annotated[
        bool,
        option(
            PANEL,
            "--raw-output",
            help="Write control characters of the text to a terminal as they are.",
        ),
    ] = False
    logprobs: Annotated[
        int,
        option(
            PANEL,
            "--logprobs",
            help="With --json, report the log-probability of each token and of this many likeliest "
            "tokens; 0 reports none.",
        ),
    ] = 0
    check: Annotated[
        bool, option(PANEL, "--check", help="Compare the text with the target alone afterwards.")
    ] = False

    def __post_init__(self) -> None:
        if self.as_json and self.color:
            raise UsageError("--color cannot be combined with --json")
        if self.logprobs and not self.as_json:
            raise UsageError("--logprobs needs --json", hint="add --json")
        if self.quiet and self.verbose:
            raise UsageError("--verbose cannot be combined with --quiet")

    def set_log_levels(self) -> None:
        """Set what the loggers of qdraft and of llama.cpp let through."""
        _set_log_levels(verbose=self.verbose, quiet=self.quiet)


@dataclass(frozen=True, kw_only=True)
class ServerOutputOptions(Group):
    """What a server prints."""

    quiet: Annotated[bool, option(PANEL, "--quiet", help="Print errors alone.")] = False
    verbose: Annotated[
        bool, option(PANEL, "--verbose", help="Print llama.cpp's log on stderr.")
    ] = False

    def __post_init__(self) -> None:
        if self.quiet and self.verbose:
            raise UsageError("--verbose cannot be combined with --quiet")

    def set_log_levels(self) -> None:
        """Set what the loggers of qdraft and of llama.cpp let through."""
        _set_log_levels(verbose=self.verbose, quiet=self.quiet)


def _set_log_levels(*, verbose: bool, quiet: bool) -> None:
    if verbose:
        logging.getLogger("qdraft.llama.cpp").setLevel(logging.DEBUG)
    if quiet:
        logging.getLogger("qdraft").setLevel(logging.ERROR)


@dataclass(frozen=True, kw_only=True)
class StudyOutputOptions(OutputOptions):
    """What a study prints, and the files that it writes."""

    output: Annotated[
        str, option(PANEL, "-o", "--output", help="Format on stdout: table, json, csv or md.")
    ] = "table"
    plot: Annotated[
        Path | None,
        option(PANEL, "--plot", help="Draw the charts into this file: .png, .svg or .pdf."),
    ] = None
    no_plot: Annotated[bool, option(PANEL, "--no-plot", help="Draw no charts in the terminal.")] = (
        False
    )
    report: Annotated[
        Path | None,
        option(PANEL, "--report", help="Write everything to one HTML file."),
    ] = None

    def __post_init__(self) -> None:
        if self.output not in FORMATS:
            raise UsageError(f"--output is {self.output} but must be one of {', '.join(FORMATS)}")
        if self.as_json and self.output not in ("table", "json"):
            raise UsageError(f"--json cannot be combined with --output {self.output}")
        if self.plot and self.no_plot:
            raise UsageError("--plot cannot be combined with --no-plot")
        for path in (self.plot, self.report):
            if path and not path.absolute().parent.is_dir():
                raise UsageError(f"{path.parent} is not a folder")
        if self.plot or self.report:  # refused before anything is measured
            require_plotting(self.plot)

    @property
    def form(self) -> str:
        """The format on stdout."""
        return "json" if self.as_json else self.output
