"""`qdraft plan`: where target and draft go, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from qdraft.cli.opening import describe_pair
from qdraft.cli.options.devices import DeviceOptions, parse_size
from qdraft.cli.options.group import Formerly, Group, Without, option, takes_options
from qdraft.cli.options.models import ModelOptions
from qdraft.cli.options.output import OutputOptions
from qdraft.errors import UsageError
from qdraft.llama.rpc import connect
from qdraft.placement.plan import ALPHA, DEVICE_SPEED, Given, make_plan
from qdraft.render.console import show_json, table_console
from qdraft.render.plan import memory_view, plan_report, plan_view
from qdraft.render.progress import ProgressBars
from qdraft.session.compare_loaded import compare_loaded
from qdraft.session.opening import keep_draft_local

_PANEL = "Plan"


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Group):
    """What a plan assumes, and whether to check it."""

    vram: Annotated[
        str | None,
        option(
            _PANEL,
            "--vram",
            help="Memory of each device, for example 12G or 24G,8G; the devices need not be on "
            "this machine.",
            default="the free memory",
        ),
    ] = None
    margin: Annotated[
        str | None,
        option(
            _PANEL,
            "--margin",
            help="Memory to leave free on each device, for example 500M.",
            default="8 %, 1G at most",
        ),
    ] = None
    alpha: Annotated[
        float, option(_PANEL, "--alpha", min=0, max=1, help="Acceptance rate to expect.")
    ] = ALPHA
    device_speed: Annotated[
        float,
        option(
            _PANEL,
            "--device-speed",
            min=0.1,
            help="Speed of a device's memory to expect, as a multiple of the CPU's.",
        ),
    ] = DEVICE_SPEED
    compare_loaded: Annotated[
        bool,
        option(
            _PANEL,
            "--compare-loaded",
            help="Load the pair as planned, and compare the plan with llama.cpp's figures.",
        ),
        Formerly("--verify"),
    ] = False

    def assumptions(self) -> Given:
        """What the plan assumes. Raises UsageError."""
        sizes = self.vram.split(",") if self.vram else []
        return Given(
            sizes=tuple(parse_size(size, "--vram") for size in sizes),
            margin=parse_size(self.margin, "--margin") if self.margin else None,
            alpha=self.alpha,
            device_speed=self.device_speed,
        )


@takes_options
def plan(
    models: ModelOptions,
    options: PlanOptions,
    devices: Annotated[DeviceOptions, Without("batch_size", "ubatch_size")],
    output: OutputOptions,
) -> None:
    """Show what fits on which device before anything is loaded.

    Shows the memory that target and draft need, which layers go where, how long the context may
    be, and the options that make qdraft run follow the plan.
    """
    given = options.assumptions()
    connect(devices.servers)
    with ProgressBars(quiet=output.quiet) as bars:
        spec = describe_pair(models, devices, bars, with_template=False)
        made = make_plan(keep_draft_local(spec.models), given)
        if options.compare_loaded and made.estimated:
            raise UsageError(
                "--compare-loaded cannot be combined with --vram for devices that this machine "
                "does not have"
            )
        rows = compare_loaded(made, bars.report) if options.compare_loaded else None
    if output.as_json:
        show_json(plan_report(made, rows))
    else:
        console = table_console()
        console.print(plan_view(made))
        if rows is not None:
            console.print(memory_view(rows))
    if rows is not None and not all(row.agrees for row in rows):
        raise typer.Exit(1)
