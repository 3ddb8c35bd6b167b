"""The way to an open pair: connect to servers, place layers, load, and try again with fewer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from qdraft.errors import DeviceMemoryError, UsageError
from qdraft.host import default_threads
from qdraft.llama.params import NO_DEVICE, EngineParams
from qdraft.llama.placed import CPU, chosen_devices, require_placeable
from qdraft.llama.progress import Progress, no_progress
from qdraft.llama.rpc import connect
from qdraft.llama.spec import Both, ModelSpec, PairSpec
from qdraft.pairs import registry
from qdraft.pairs.packages import materialize
from qdraft.placement.plan import Given, Plan, make_plan
from qdraft.session.learning import Learning
from qdraft.session.pair import Pair

log = logging.getLogger(__name__)

# The shares of the first plan's memory to try one after another if memory runs out.
_SHARES = (0.9, 0.75, 0.5, 0.25, 0.0)
_GIB = 2**30


def open_pair(  # noqa: PLR0913 (the public door, whose keywords are documented)
    name: str | None = None,
    *,
    target: Path | str | None = None,
    draft: Path | str | None = None,
    params: EngineParams | None = None,
    draft_params: EngineParams | None = None,
    servers: Sequence[str] = (),
    share_kv: str = "auto",
) -> Pair:
    """Open a pair of models.yaml by its name, or two files.

    ``name`` None opens the default pair. With ``target``, ``draft`` None opens the target alone. A
    packaged pair is quantized into the cache the first time. Of an entry in models.yaml the chat
    template applies; its context, devices and tuned settings apply only to the commands.
    ``servers`` are RPC servers, each HOST:PORT. qdraft decides where layers go, as ``qdraft plan``
    shows, unless the params set their number. Raises QDraftError if anything fails.
    """
    if target is None and draft is not None:
        raise UsageError("draft cannot be given without target")
    if target is not None and name is not None:
        raise UsageError("name cannot be combined with target")
    template = None
    if target is None:
        threads = (params.n_threads if params else 0) or default_threads()
        entry = registry.load().find(name)
        target, draft = materialize(entry, threads=threads)
        template = registry.read_template(entry)
    return open_spec(
        PairSpec.of(
            target,
            draft,
            params,
            draft_params,
            servers=tuple(servers),
            share_kv=share_kv,
            template=template,
        )
    )


def open_spec(spec: PairSpec, progress: Progress = no_progress) -> Pair:
    """Open what ``spec`` describes; a plan places the layers unless the spec sets their number.

    The pair starts from the costs that earlier runs have stored, and stores its own. The draft
    stays on this machine unless its params name a server's device. A plan may leave the draft out,
    and logs that, unless the spec demands the draft, shared KV cells or a number of draft layers.
    Raises what ``Pair`` raises, ServerError, and DeviceMemoryError if memory runs out in every try.
    """
    connect(spec.servers)
    spec = replace(spec, models=keep_draft_local(spec.models))
    for model in spec.models:
        require_placeable(model.params, chosen_devices(model.params))
    if is_planned(spec.models):
        return _open_planned(spec, progress)
    return _open_as_asked(spec, progress)


def fit(model: ModelSpec) -> ModelSpec:
    """Return a model alone, placed where it fits unless its params set the number of layers."""
    alone = Both[ModelSpec](model)
    return make_plan(alone).models.target if is_planned(alone) else model


def is_planned(models: Both[ModelSpec]) -> bool:
    """Tell whether a plan may decide how many layers go where."""
    by_hand = any(
        model.params.split_mode not in ("layer", "none")
        or model.params.tensor_split
        or model.params.override_tensors
        for model in models
    )
    free = [model.params for model in models if model.params.n_gpu_layers is None]
    return not by_hand and any(chosen_devices(params) for params in free)


def keep_draft_local(models: Both[ModelSpec]) -> Both[ModelSpec]:
    """Give a draft without devices of its own those of the target on this machine.

    Returns the models. Raises UsageError if the draft's params put layers on devices, but all
    devices are those of RPC servers.
    """
    draft = models.draft
    if draft is None or (draft.params.devices and not draft.like_target):
        return models
    params = models.target.params
    devices = chosen_devices(params)
    local = tuple(device.name for device in devices if not device.remote)
    if NO_DEVICE in params.devices:
        placed = draft.params.on_cpu()
    elif len(local) == len(devices):
        placed = replace(draft.params, devices=params.devices)
    elif local:
        placed = draft.params.elsewhere(local)
    elif draft.params.n_gpu_layers and not draft.like_target:
        raise UsageError(
            "draft layers cannot go on a device, because all devices are RPC servers",
            hint="leave the draft on this machine, or name a server's device with --device-draft",
        )
    else:
        placed = draft.params.on_cpu()
    return Both(models.target, replace(draft, params=placed))


def _open_as_asked(spec: PairSpec, progress: Progress) -> Pair:
    """Load the models exactly as their params say."""
    try:
        pair = Pair(spec, progress, Learning.stored)
    except DeviceMemoryError as error:
        raise DeviceMemoryError(str(error), hint=_what_fits(spec.models)) from error
    params = spec.models.target.params
    if params.n_gpu_layers is None and chosen_devices(params):
        log.info("the split of layers is set by hand, so all layers go on devices")
    return pair


def _open_planned(spec: PairSpec, progress: Progress) -> Pair:
    """Load the models as planned; whenever memory runs out, plan again with less of it."""
    draft = spec.models.draft
    keep_draft = (
        spec.keep_draft
        or spec.share_kv == "on"
        or (draft is not None and draft.params.n_gpu_layers is not None)
    )
    plan = make_plan(spec.models, Given(keep_draft=keep_draft))
    taken = [use.target.total + use.draft.total for use in plan.uses if use.device != CPU]
    for share in _SHARES:
        try:
            return _open_plan(spec, plan, progress)
        except DeviceMemoryError as error:
            if not any(taken):
                raise
            log.warning(
                "%s (%s); trying again with %.0f %% of that memory",
                error,
                describe_plan(plan),
                100 * share,
            )
        sizes = tuple(int(share * size) for size in taken)
        plan = make_plan(spec.models, Given(sizes, margin=0, keep_draft=keep_draft))
    return _open_plan(spec, plan, progress)


def _open_plan(spec: PairSpec, plan: Plan, progress: Progress) -> Pair:
    if spec.models.draft and not plan.models.draft:
        log.info("running without the draft: that memory is better spent on target layers")
    return Pair(replace(spec, models=plan.models), progress, Learning.stored)


def describe_plan(plan: Plan) -> str:
    """Describe the layers and the memory on each device, in one line."""
    return "; ".join(
        f"{use.device}: {use.target.n_layers} layers of the target and {use.draft.n_layers} of "
        f"the draft, {(use.target.total + use.draft.total) / _GIB:.2f} of "
        f"{use.free / _GIB:.2f} GiB"
        for use in plan.uses
        if use.device != CPU
    )


def _what_fits(models: Both[ModelSpec]) -> str:
    """Return a hint that says how a plan would place these contexts and caches."""

    def free(model: ModelSpec) -> ModelSpec:
        params = replace(
            model.params,
            n_gpu_layers=None,
            split_mode="layer",
            main_gpu=0,
            tensor_split=(),
            override_tensors=(),
        )
        return replace(model, params=params)

    return f"qdraft plan says that this fits: {describe_plan(make_plan(models.map(free)))}"
