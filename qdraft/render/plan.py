"""A plan, as tables and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType

from qdraft.llama.placed import CPU, Share
from qdraft.placement.plan import Plan
from qdraft.placement.run_options import run_options
from qdraft.render.layout import wrapped
from qdraft.render.tables import Entry, Sheet, as_table
from qdraft.session.compare_loaded import MemoryRow

_GIB = 2**30


def plan_view(plan: Plan) -> RenderableType:
    """What each device needs, then the verdict."""
    needs: tuple[tuple[Entry, ...], ...] = tuple(
        (use.device, model, share.n_layers, *(_gib(x) for x in _sizes(share)))
        for use in plan.uses
        for model, share in (("target", use.target), ("draft", use.draft))
        if share.total
    )
    room = tuple(
        (use.device, use.description, _gib(use.free), _gib(use.margin), _gib(use.left))
        for use in plan.uses
    )
    columns = ("device", "model", "layers", "weights", "KV", "work", "sum")
    views = [
        as_table(Sheet("Needed, GiB", columns, needs)),
        as_table(Sheet("Room, GiB", ("device", "description", "free", "kept", "left"), room)),
        *(text for label, words in _verdict(plan) for text in wrapped(label, words)),
    ]
    return Group(*views)


def _sizes(share: Share) -> tuple[int, int, int, int]:
    return share.weights, share.kv, share.compute, share.total


def _gib(n_bytes: int) -> float:
    return round(n_bytes / _GIB, 3)


def _verdict(plan: Plan) -> list[tuple[str, str]]:
    """Label and sentence, one after another."""
    told: list[tuple[str, str]] = []
    devices = [use for use in plan.uses if use.device != CPU]
    n_layers = sum(use.target.n_layers for use in plan.uses)
    on_devices = sum(use.target.n_layers for use in devices)
    short = [use.device for use in plan.uses if use.left < 0]
    if short:
        told.append(("fit", f"does not fit {', '.join(short)}: a smaller context (-c), cache type "
                            "(-ctk, -ctv) or file takes less"))  # fmt: skip
    elif devices:
        told.append(("fit", f"{on_devices} of {n_layers} layers of the target on devices"))
    else:
        told.append(("fit", "all on the CPU, where it fits"))
    best = plan.choices[0]
    if devices:
        basis = f"memory of devices {plan.given.device_speed:g} times as fast as the CPU's"
        told.append(("speed", f"about {best.speed:.1f} times the target on the CPU alone: "
                              f"{_drafts(plan)}; assumed: {basis}"))  # fmt: skip
        if best.draft is None and len(plan.choices) > 1:
            told.append(("draft", "left out: its place is worth more to the target's layers "
                                  f"(with it {plan.choices[1].speed:.1f} times)"))  # fmt: skip
    told.append(("context", f"{plan.n_ctx} tokens; with these layers up to {plan.n_ctx_most} fit, "
                            f"the model was trained on {plan.n_ctx_train}"))  # fmt: skip
    if plan.smaller_draft:
        kind, size = plan.smaller_draft
        make = f"qdraft make {plan.models.target.path} --type {kind}"
        told.append(("hint", f"a draft of type {kind}, about {size / _GIB:.2f} GiB, would fit "
                             f"whole: {make}"))  # fmt: skip
    if plan.estimated:
        told.append(("note", "no such device is here: its working memory is taken to be the CPU's"))
    if run := run_options(plan):
        same = "" if plan.given.sizes else ", which is what auto does"
        told.append(("run", f"qdraft run {run}{same}"))
    return told


def _drafts(plan: Plan) -> str:
    best = plan.choices[0]
    if best.draft is None:
        return "the target alone"
    if best.n_draft == 0:
        return "the draft is not expected to pay"
    return (
        f"drafts of {best.n_draft}, a draft token costs {best.c:.2f} target tokens, at an "
        f"acceptance of {plan.given.alpha:g}"
    )


def plan_report(plan: Plan, rows: Sequence[MemoryRow] | None) -> dict[str, Any]:
    """All of it for JSON; bytes."""
    return {
        "target": str(plan.models.target.path),
        "draft": str(plan.models.draft.path) if plan.models.draft else None,
        "fits": plan.fits,
        "estimated": plan.estimated,
        "n_ctx": plan.n_ctx,
        "n_ctx_most": plan.n_ctx_most,
        "devices": [{**asdict(use), "left": use.left} for use in plan.uses],
        "choices": [asdict(choice) for choice in plan.choices],
        "smaller_draft": plan.smaller_draft,
        "given": asdict(plan.given),
        "run": run_options(plan),
        "verified": None if rows is None else [_row_report(row) for row in rows],
    }


def _row_report(row: MemoryRow) -> dict[str, Any]:
    """A row for JSON, whose key for llama.cpp's figure is "told"."""
    fields = asdict(row)
    fields["told"] = fields.pop("reported")
    return {**fields, "off": row.off, "agrees": row.agrees}


def memory_view(rows: Sequence[MemoryRow]) -> RenderableType:
    """The plan against llama.cpp's own figures."""
    table = tuple(
        (
            row.device, row.model, row.kind, _gib(row.planned),
            None if row.span is None else _gib(row.span), _gib(row.reported),
            f"{100 * row.off:.1f} %", "" if row.agrees else "differs",
        )
        for row in rows
    )  # fmt: skip
    columns = ("device", "model", "kind", "planned", "mapped", "llama.cpp", "off", "")
    views: list[RenderableType] = [as_table(Sheet("Loaded, GiB", columns, table))]
    if any(row.span not in (None, row.planned) or row.repacked for row in rows):
        views += wrapped(
            "note", "mapped: the stretch of the file from the first to the last tensor that a "
            "device reads, which llama.cpp counts; only what is read takes memory, and repacked "
            "weights are counted a second time"
        )  # fmt: skip
    return Group(*views)
