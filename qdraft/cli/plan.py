"""`qdraft plan`: where two copies of a model go, before anything is loaded."""

from __future__ import annotations

from typing import Annotated

import typer

from qdraft.cli import options as opt
from qdraft.cli.machine_options import Machine, takes_machine
from qdraft.cli.opening import Models, entry_of, files_of
from qdraft.errors import UsageError
from qdraft.llama.rpc import connect
from qdraft.llama.spec import PairSpec
from qdraft.placement.plan import ALPHA, DEVICE_SPEED, Given, make_plan
from qdraft.render.console import show_json, table_console
from qdraft.render.plan import plan_report, plan_view, verified_view
from qdraft.render.progress import Bars
from qdraft.session.compare_loaded import compare_loaded
from qdraft.session.opening import keep_draft_local

_PLAN = "Plan"

Vram = Annotated[
    str | None,
    opt.option(
        _PLAN, "--vram",
        help="Memory of the devices, as 12G or 24G,8G: also of devices that are not here.",
        default="what is free",
    ),
]  # fmt: skip
Margin = Annotated[
    str | None,
    opt.option(_PLAN, "--margin", help="Kept back of each, as 500M.", default="8 %, 1G at most"),
]
Alpha = Annotated[
    float, opt.option(_PLAN, "--alpha", min=0, max=1, help="Acceptance that is expected.")
]
Speed = Annotated[
    float,
    opt.option(_PLAN, "--device-speed", min=0.1, help="Speed of a device's memory over the CPU's."),
]
Verify = Annotated[
    bool, opt.option(_PLAN, "--verify", help="Load the pair so, and compare with llama.cpp.")
]


@takes_machine
def plan(
    target: opt.Target = None,
    draft: opt.DraftFile = None,
    pair: opt.PairName = None,
    models_file: opt.ModelsFile = None,
    no_draft: opt.NoDraft = False,
    vram: Vram = None,
    margin: Margin = None,
    alpha: Alpha = ALPHA,
    device_speed: Speed = DEVICE_SPEED,
    verify_it: Verify = False,
    ctx_size: opt.CtxSize = None,
    ctx_size_draft: opt.CtxSizeDraft = None,
    machine: Machine = Machine(),  # noqa: B008 (frozen)
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Show what target and draft need of each device, and which layers go where, without loading.

    Answers what fits, what to leave out, how long a context may be, and how to run it.
    """
    given = Given(
        sizes=tuple(opt.parse_size(part, "--vram") for part in vram.split(",")) if vram else (),
        margin=opt.parse_size(margin, "--margin") if margin else None,
        alpha=alpha,
        device_speed=device_speed,
    )
    models = Models(target, draft, pair, models_file, no_draft, False)
    of_target, of_draft = machine.engines(ctx_size, ctx_size_draft)
    connect(machine.servers)
    with Bars(quiet=quiet) as bars:
        files = files_of(models, entry_of(models), machine.threads, bars)
        spec = PairSpec.of(*files, of_target, of_draft)
        made = make_plan(keep_draft_local(spec.models), given)
        if verify_it and made.estimated:
            raise UsageError("--verify loads the pair: not for devices that are not here")
        rows = compare_loaded(made, bars.step) if verify_it else None
    if as_json:
        show_json(plan_report(made, rows))
    else:
        out = table_console()
        out.print(plan_view(made))
        if rows is not None:
            out.print(verified_view(rows))
    if rows is not None and not all(row.agrees for row in rows):
        raise typer.Exit(1)
