"""A plan, as tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from qdraft.llama.placed import Share, States
from qdraft.placement.outlook import Outlook, describe
from qdraft.placement.plan import Plan
from qdraft.placement.run_options import run_options
from qdraft.render.layout import wrapped
from qdraft.render.tables import Entry, Sheet, as_table
from qdraft.session.compare_loaded import MemoryRow

_GIB = 2**30
_MIB = 2**20
_KINDS = ("weights", "KV", "compute")


def plan_view(plan: Plan) -> RenderableType:
    """What each device needs and has, and what follows from it."""
    needs: tuple[tuple[Entry, ...], ...] = tuple(
        (use.device, model, share.n_layers, *(_gib(x) for x in _sizes(share, _has_state(plan))))
        for use in plan.uses
        for model, share in (("target", use.target), ("draft", use.draft))
        if share.total
    )
    room = tuple(
        (use.device, use.description, _gib(use.free), _gib(use.margin), _gib(use.left))
        for use in plan.uses
    )
    kinds = ("weights", "KV", "state", "compute") if _has_state(plan) else _KINDS
    columns = ("device", "model", "layers", *kinds, "sum")
    return Group(
        as_table(Sheet("Memory needed, GiB", columns, needs)),
        as_table(
            Sheet(
                "Memory of each device, GiB",
                ("device", "description", "free", "margin", "left"),
                room,
            )
        ),
        *_fit_lines(plan),
        *_speed_lines(plan),
        *wrapped(
            "context",
            f"{plan.n_ctx} tokens; up to {plan.n_ctx_most} fit with these layers, and the model "
            f"was trained on {plan.n_ctx_train}",
        ),
        *_state_lines(plan),
        *_advice_lines(plan),
    )


def _has_state(plan: Plan) -> bool:
    return any(states.n_bytes for states in plan.states)


def _sizes(share: Share, has_state: bool) -> tuple[int, ...]:
    state = (share.state,) if has_state else ()
    return share.weights, share.kv, *state, share.compute, share.total


def _gib(n_bytes: int) -> float:
    return round(n_bytes / _GIB, 3)


def _fit_lines(plan: Plan) -> list[Text]:
    """Whether everything fits, and how many layers are on devices."""
    n_layers = sum(use.target.n_layers for use in plan.uses)
    n_on_devices = sum(use.target.n_layers for use in plan.on_devices)
    if plan.outlook:
        sentence = describe(plan.outlook)
        if plan.outlook.drafted:
            sentence += f" (assuming an acceptance rate of {plan.outlook.alpha:g})"
    elif not plan.fits:
        sentence = (
            f"does not fit {', '.join(plan.too_small)}: use a smaller context (-c), cache type "
            "(-ctk, -ctv) or file"
        )
    elif plan.on_devices:
        sentence = f"{n_on_devices} of {n_layers} layers of the target on devices"
    else:
        sentence = "everything fits on the CPU"
    return wrapped("fit", sentence)


def _speed_lines(plan: Plan) -> list[Text]:
    """The speed to expect, what it rests on, and why there is no draft if it is left out."""
    if not plan.on_devices:
        return []
    lines = wrapped(
        "speed",
        f"about {plan.best.speed:.1f} times the target on the CPU alone: {_describe_draft(plan)}; "
        f"assumed: memory of devices {plan.given.device_speed:g} times as fast as the CPU's",
    )
    if with_draft := plan.left_out:
        lines += wrapped(
            "draft",
            "left out: that memory is better spent on target layers (with the draft "
            f"{with_draft.speed:.1f} times)",
        )
    return lines


def _state_lines(plan: Plan) -> list[Text]:
    """What the recurrent states take, and of what they are."""
    names = ("target", "draft")
    kept = [(name, of) for name, of in zip(names, plan.states, strict=False) if of.n_bytes]
    return wrapped("states", "; ".join(_describe_states(*each) for each in kept)) if kept else []


def _describe_states(name: str, states: States) -> str:
    back = f" with {states.n_back} earlier ones each" if states.n_back else ""
    per_text = states.n_bytes / states.n_texts / (1 + states.n_back) / _MIB
    return (
        f"the {name} keeps {states.n_texts} recurrent states of {per_text:.3g} MiB{back}, "
        f"{states.n_bytes / _MIB:.3g} MiB whatever the context"
    )


def _describe_draft(plan: Plan) -> str:
    best = plan.best
    if best.draft is None:
        return "the target alone"
    if best.n_draft == 0:
        return "the draft is not expected to pay off"
    return (
        f"drafts of {best.n_draft} tokens, {best.c:.2f} target tokens per draft token, an "
        f"acceptance rate of {plan.given.alpha:g}"
    )


def _advice_lines(plan: Plan) -> list[Text]:
    """What else could be done, and how to run the plan."""
    lines = []
    if plan.smaller_draft:
        file_type, size = plan.smaller_draft
        lines += wrapped(
            "hint",
            f"a draft of type {file_type}, about {size / _GIB:.2f} GiB, would fit whole: make one "
            f"with qdraft make {plan.models.target.path} --type {file_type}",
        )
    lines += _streaming_advice(plan)
    if plan.estimated:
        lines += wrapped(
            "note",
            "this machine has no such device: qdraft assumes that its compute buffers are as "
            "large as the CPU's",
        )
    if run := run_options(plan):
        default = "" if plan.given.sizes else ", which is what qdraft run does by itself"
        lines += wrapped("run", f"qdraft run {run}{default}")
    return lines


def _streaming_advice(plan: Plan) -> list[Text]:
    """What would help if the target does not fit in memory."""
    if plan.outlook is None:
        return []
    lines = []
    path = plan.models.target.path
    if plan.outlook.smaller_draft:
        file_type, size = plan.outlook.smaller_draft
        lines += wrapped(
            "hint",
            f"the draft does not stay in memory: one of type {file_type}, about "
            f"{size / _GIB:.1f} GiB, would (qdraft make {path} --type {file_type})",
        )
    if plan.outlook.smaller_target:
        file_type, size = plan.outlook.smaller_target
        lines += wrapped(
            "hint",
            f"a target of type {file_type}, about {size / _GIB:.1f} GiB, would fit, with another "
            "distribution",
        )
    return lines


def plan_report(plan: Plan, rows: Sequence[MemoryRow] | None) -> dict[str, Any]:
    """The plan and its comparison with llama.cpp for JSON; sizes are in bytes."""
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
        "states": [asdict(states) for states in plan.states],
        "outlook": outlook_report(plan.outlook),
        "given": asdict(plan.given),
        "run": run_options(plan),
        "verified": None if rows is None else [_row_report(row) for row in rows],
    }


def outlook_report(outlook: Outlook | None) -> dict[str, Any] | None:
    """What to expect of a target that does not fit, for JSON; sizes are in bytes."""
    if outlook is None:
        return None
    residency = outlook.residency
    return {
        "free": residency.free,
        "target": residency.target,
        "draft": residency.draft,
        "read_per_pass": residency.n_streamed,
        "disk_speed": outlook.disk_speed,
        "tokens_per_second_alone": outlook.alone,
        "tokens_per_second": outlook.drafted,
        "n_draft": outlook.n_draft,
        "smaller_target": outlook.smaller_target,
        "smaller_draft": outlook.smaller_draft,
    }


def _row_report(row: MemoryRow) -> dict[str, Any]:
    """A row for JSON, whose key for llama.cpp's figure is "told"."""
    fields = asdict(row)
    fields["told"] = fields.pop("reported")
    return {**fields, "off": row.off, "agrees": row.agrees}


def memory_view(rows: Sequence[MemoryRow]) -> RenderableType:
    """The planned memory beside the memory that llama.cpp reports."""
    table = tuple(
        (
            row.device,
            row.model,
            row.kind,
            _gib(row.planned),
            None if row.span is None else _gib(row.span),
            _gib(row.reported),
            f"{100 * row.off:.1f} %",
            "" if row.agrees else "differs",
        )
        for row in rows
    )
    columns = ("device", "model", "kind", "planned", "mapped", "llama.cpp", "off", "")
    views: list[RenderableType] = [as_table(Sheet("Memory as loaded, GiB", columns, table))]
    if any(row.span not in (None, row.planned) or row.repacked for row in rows):
        views += wrapped(
            "note",
            "mapped is the stretch of the file from the first to the last tensor of a device, "
            "which llama.cpp counts; only the tensors that llama.cpp reads take memory, and it "
            "counts repacked weights a second time",
        )
    return Group(*views)
