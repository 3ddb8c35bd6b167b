"""What studies generate: tasks, and how many tokens of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from qdraft.cli.options.group import Group, option
from qdraft.cli.options.sampling import TemperatureOptions
from qdraft.errors import UsageError
from qdraft.study.prompts import Task, built_in, read_tasks

_PANEL, _COSTS = "Tasks", "Costs"


@dataclass(frozen=True, kw_only=True)
class TaskOptions(Group):
    """The tasks that a study generates texts for."""

    prompts: Annotated[
        Path | None,
        option(
            _PANEL,
            "--prompts",
            help='JSONL file of tasks: {"kind": ..., "prompt": ...} per line, or the questions of '
            "Spec-Bench.",
            default="built-in tasks",
        ),
    ] = None
    kinds: Annotated[
        str | None,
        option(
            _PANEL, "--kinds", help="Kinds of tasks, for example code,story.", default="all kinds"
        ),
    ] = None
    per_kind: Annotated[
        int,
        option(_PANEL, "--per-kind", min=1, max=2, help="Number of built-in tasks of each kind."),
    ] = 1
    repeats: Annotated[
        int,
        option(
            _PANEL,
            "-r",
            "--repeats",
            min=1,
            max=100,
            help="Repeat the whole set this many times.",
        ),
    ] = 1
    n_predict: Annotated[
        int,
        option(_PANEL, "-n", "--n-predict", min=2, help="Tokens to generate per text at most."),
    ] = 64
    ignore_eos: Annotated[
        bool, option(_PANEL, "--ignore-eos", help="End no text before --n-predict tokens.")
    ] = False

    def tasks(self) -> list[Task]:
        """Return the tasks. Raises UsageError."""
        names = (name.strip() for name in (self.kinds or "").split(","))
        kinds = [name for name in names if name] or None
        return read_tasks(self.prompts, kinds) if self.prompts else built_in(kinds, self.per_kind)


@dataclass(frozen=True, kw_only=True)
class BenchTaskOptions(TaskOptions, TemperatureOptions):
    """The tasks of a bench, and the temperatures to sample them at."""


@dataclass(frozen=True, kw_only=True)
class CostOptions(Group):
    """The costs of a pair, in the time of one target token."""

    c: Annotated[
        float | None,
        option(_COSTS, "--c", min=0, help="Time of one draft token, in target tokens."),
    ] = None
    v: Annotated[
        str | None,
        option(
            _COSTS,
            "--v",
            help="Time of target decodes by number of rows, in target tokens, for example "
            "2=1.06,8=1.1.",
        ),
    ] = None


def parse_costs(text: str) -> dict[int, float]:
    """Return the times by number of rows of a list such as 2=1.06,8=1.1. Raises UsageError."""
    try:
        costs = {int(n): float(x) for n, x in (part.split("=") for part in text.split(","))}
    except ValueError:
        costs = {}
    if not costs or any(n < 2 or not 0 < x < float("inf") for n, x in costs.items()):
        raise UsageError(
            f"--v is {text} but must be times by number of rows",
            hint="give, for example, --v 2=1.06,8=1.1",
        )
    return costs
