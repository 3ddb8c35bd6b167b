"""Opening a pair where it fits: planned, loaded, and tried again smaller when memory runs out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from qdraft.errors import DeviceMemoryError, UsageError
from qdraft.llama.params import NO_DEVICE, EngineParams
from qdraft.llama.placed import CPU, chosen_devices, require_placeable
from qdraft.llama.rpc import connect
from qdraft.placement.plan import Given, Plan, make_plan
from qdraft.session.pair import LoadProgress, Pair

log = logging.getLogger(__name__)

# Shares of what the first plan took of the devices, one after another, as long as memory runs out.
_SHARES = (0.9, 0.75, 0.5, 0.25, 0.0)


def open_fitting(
    target: Path,
    draft: Path | None,
    params: EngineParams | None = None,
    *,
    draft_params: EngineParams | None = None,
    servers: Sequence[str] = (),
    share_kv: str = "auto",
    template: str | None = None,
    keep_draft: bool = False,
    progress: LoadProgress | None = None,
) -> Pair:
    """A ``Pair``, whose layers go where ``qdraft plan`` puts them unless the params say how many.

    ``servers`` are HOST:PORT of RPC servers; the draft stays on this machine unless its params
    name a device of theirs. A draft that is better left out is, which is said, unless
    ``keep_draft``, sharing its cells or a number of its layers is asked for. Raises what ``Pair``
    raises, ServerError, and DeviceMemoryError where memory runs out whatever is tried.
    """
    connect(servers)
    params = params or EngineParams()
    draft_params = local(params, draft_params)
    for one in (params, draft_params) if draft else (params,):
        require_placeable(one, chosen_devices(one))

    def opened(draft: Path | None, of_target: EngineParams, of_draft: EngineParams) -> Pair:
        return Pair(
            target, draft, of_target, draft_params=of_draft, share_kv=share_kv, template=template,
            progress=progress,
        )  # fmt: skip

    if not is_planned(params, draft_params if draft else params):
        try:
            pair = opened(draft, params, draft_params)
        except DeviceMemoryError as error:
            hint = _what_fits(target, draft, params, draft_params)
            raise DeviceMemoryError(str(error), hint=hint) from error
        if params.n_gpu_layers is None and chosen_devices(params):
            log.info("how layers are split is given: all of them went to devices")
        return pair
    keep_draft = keep_draft or share_kv == "on" or draft_params.n_gpu_layers is not None
    plan = make_plan(target, draft, params, draft_params, Given(keep_draft=keep_draft))
    taken = [use.target.total + use.draft.total for use in plan.uses if use.device != CPU]
    for share in (*_SHARES, None):
        if draft and not plan.draft:
            log.info("the draft is left out: its place is worth more to the target's layers")
        try:
            return opened(plan.draft, plan.params, plan.draft_params)
        except DeviceMemoryError as error:
            if share is None or not any(taken):
                raise
            log.warning("%s (%s)", error, in_words(plan))
            log.warning("trying again with %.0f %% of that", 100 * share)
        sizes = tuple(int(share * size) for size in taken)
        plan = make_plan(
            target, draft, params, draft_params, Given(sizes, margin=0, keep_draft=keep_draft)
        )
    raise AssertionError("the last try returns or raises")


def fitted(path: Path, params: EngineParams) -> EngineParams:
    """The params that put a file alone where it fits, where that is left to qdraft."""
    return make_plan(path, None, params, params).params if is_planned(params, params) else params


def local(params: EngineParams, draft_params: EngineParams | None) -> EngineParams:
    """The draft's params; without devices of its own it gets the target's on this machine.

    Raises UsageError where layers are asked for and there are only devices of other machines.
    """
    chosen = draft_params or replace(params, devices=())
    if chosen.devices:
        return chosen
    found = chosen_devices(params)
    own = tuple(device.name for device in found if not device.remote)
    if len(own) == len(found):
        return (
            chosen.on_cpu()
            if NO_DEVICE in params.devices
            else replace(chosen, devices=params.devices)
        )
    if own:
        return chosen.elsewhere(own)
    if draft_params and chosen.n_gpu_layers:
        raise UsageError(
            "layers of the draft are asked for a device, but all devices are RPC servers",
            hint="the draft is best kept on this machine; --device-draft names a server's device",
        )
    return chosen.on_cpu()


def is_planned(params: EngineParams, draft_params: EngineParams) -> bool:
    """Is it left to qdraft how many layers go where?"""
    free = [one for one in (params, draft_params) if one.n_gpu_layers is None]
    plain = all(
        one.split_mode in ("layer", "none") and not one.tensor_split and not one.override_tensors
        for one in (params, draft_params)
    )
    return plain and any(chosen_devices(one) for one in free)


def in_words(plan: Plan) -> str:
    """What was planned, in figures."""
    gib = 2**30
    return "; ".join(
        f"{use.device}: {use.target.n_layers} layers of the target and {use.draft.n_layers} of "
        f"the draft, {(use.target.total + use.draft.total) / gib:.2f} of {use.free / gib:.2f} GiB"
        for use in plan.uses
        if use.device != CPU
    )


def _what_fits(
    target: Path, draft: Path | None, params: EngineParams, draft_params: EngineParams
) -> str:
    """What a plan would have put where, with the same contexts and caches."""

    def free(params: EngineParams) -> EngineParams:
        return replace(
            params, n_gpu_layers=None, split_mode="layer", main_gpu=0, tensor_split=(),
            override_tensors=(),
        )  # fmt: skip

    plan = make_plan(target, draft, free(params), free(draft_params))
    return f"by qdraft plan this fits: {in_words(plan)}"
