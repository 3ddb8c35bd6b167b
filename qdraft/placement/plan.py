"""The plan: which layers of target and draft go on which device, made before loading them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from qdraft.errors import UsageError
from qdraft.gguf.facts import Facts, require_model
from qdraft.llama.devices import Device, devices, free_memory
from qdraft.llama.params import ALL_LAYERS, NO_DEVICE, EngineParams
from qdraft.llama.placed import CPU, Share, States, chosen_devices, require_placeable
from qdraft.llama.spec import Both, ModelSpec
from qdraft.placement.buffers import default_margin
from qdraft.placement.choose import (
    Counts,
    Needs,
    PlacementChoice,
    Room,
    choose,
    fits_in,
    largest_context,
    shares_of,
)
from qdraft.placement.needs import dry_run, measure_needs
from qdraft.placement.outlook import BITS, Outlook, foresee

ALPHA = 0.8  # the acceptance rate that a plan assumes before qdraft measures it
DEVICE_SPEED = 8.0  # the speed of a device's memory over the CPU's that a plan assumes
_GIB = 2**30
_TRIES = 4  # how often to choose if llama.cpp needs more memory than estimated
# The file types of a smaller draft, the largest first.
_DRAFT_TYPES = ("Q4_K_M", "Q3_K_M", "Q2_K", "IQ2_M", "IQ2_XXS")


@dataclass(frozen=True, slots=True)
class Given:
    """What the user gives to a plan: sizes and assumptions that do not come from this machine.

    ``sizes`` are bytes of memory: of devices here, in place of what is free, or of devices that
    this machine lacks. ``margin`` is the number of bytes to leave free on each device. ``alpha`` is
    the acceptance rate, ``device_speed`` the speed of a device's memory over the CPU's.
    ``keep_draft`` demands the draft.
    """

    sizes: tuple[int, ...] = ()
    margin: int | None = None
    alpha: float = ALPHA
    device_speed: float = DEVICE_SPEED
    keep_draft: bool = False


@dataclass(frozen=True, slots=True)
class Use:
    """One device: its free bytes, the margin, and the shares of target and draft."""

    device: str
    description: str
    remote: bool
    free: int
    margin: int
    target: Share
    draft: Share

    @property
    def left(self) -> int:
        """The bytes that stay free beside the margin; negative if the models do not fit."""
        return self.free - self.margin - self.target.total - self.draft.total


@dataclass(frozen=True, slots=True)
class Plan:
    """The placement that should be fastest.

    ``asked`` are the models as the caller described them, ``models`` the same with params that
    place them; the latter have no draft if there is none or it is better left out. ``choices``
    are the best placement with the draft and the best of the target alone, the better one first.
    ``n_ctx_most`` is the largest context with these layers. ``smaller_draft`` is a file type
    that would be faster, and its bytes. ``states`` are the recurrent states of the placed models,
    without bytes if a model has none. ``outlook`` is what to expect of weights that do not fit in
    the CPU's memory, None if they do. ``estimated`` is True if this machine lacks the devices: a
    device's compute buffers are then assumed to be as large as the CPU's.
    """

    asked: Both[ModelSpec]
    models: Both[ModelSpec]
    n_ctx: int
    n_ctx_most: int
    n_ctx_train: int
    uses: tuple[Use, ...]
    choices: tuple[PlacementChoice, ...]
    smaller_draft: tuple[str, int] | None
    states: Both[States]
    outlook: Outlook | None
    estimated: bool
    given: Given

    @property
    def fits(self) -> bool:
        return not self.too_small

    @property
    def too_small(self) -> list[str]:
        """The devices that lack memory for what is placed on them."""
        return [use.device for use in self.uses if use.left < 0]

    @property
    def on_devices(self) -> list[Use]:
        """The devices but for the CPU."""
        return [use for use in self.uses if use.device != CPU]

    @property
    def best(self) -> PlacementChoice:
        """The placement that is planned."""
        return self.choices[0]

    @property
    def left_out(self) -> PlacementChoice | None:
        """The best placement with the draft if the draft is better left out, else None."""
        return self.choices[1] if self.best.draft is None and len(self.choices) > 1 else None


@dataclass(frozen=True, slots=True)
class _Site:
    """The devices that a plan may use. ``margins`` and ``holders`` end with the CPU."""

    devices: tuple[Device, ...]
    rooms: tuple[Room, ...]
    margins: tuple[int, ...]
    holders: tuple[Device, ...]
    estimated: bool

    @property
    def sizes(self) -> list[int]:
        """Usable bytes of each device; the CPU is not among them."""
        return [room.n_bytes for room in self.rooms]


@dataclass(frozen=True, slots=True)
class _Layout:
    """One choice, and the memory that it takes on each device.

    ``needs`` are the needs of all models, also of a draft that is left out. ``models`` and
    ``shares`` are those of the models that are placed.
    """

    choices: tuple[PlacementChoice, ...]
    needs: Both[Needs]
    models: Both[ModelSpec]
    shares: tuple[Sequence[Share], ...]

    @property
    def placed(self) -> list[tuple[Needs, Counts]]:
        """The needs and the layers of each model that is placed."""
        best = self.choices[0]
        return list(self.needs.zip(Both(best.target, best.draft)))


def make_plan(models: Both[ModelSpec], given: Given = Given()) -> Plan:
    """Plan the placement. Layers that the params put on devices go there whether they fit or not.

    Raises UsageError for params that place layers themselves and for more sizes than devices, and
    what loading raises.
    """
    facts = require_model(models.target.path)
    site = _survey(models, given)
    layout = _settle(models, site, given)
    site = _without_shared_memory(site, layout)
    needs_of_target = layout.needs.target
    n_ctx_train = facts.n_ctx_train or needs_of_target.n_ctx
    on_cpu = site.holders[-1].free - site.margins[-1]
    return Plan(
        asked=models,
        models=layout.models,
        n_ctx=needs_of_target.n_ctx,
        n_ctx_most=largest_context(layout.placed, [*site.sizes, on_cpu], n_ctx_train),
        n_ctx_train=n_ctx_train,
        uses=_uses(site, layout.shares),
        choices=layout.choices,
        smaller_draft=_smaller_draft(facts, layout, site.rooms, given.alpha),
        states=Both(*(needs.states for needs, _ in layout.placed)),
        outlook=None if given.sizes else foresee(layout.models, given.alpha),
        estimated=site.estimated,
        given=given,
    )


def _survey(models: Both[ModelSpec], given: Given) -> _Site:
    """Return the devices and what they have room for."""
    usable = _devices(models, given)
    margins = [
        default_margin(device.free) if given.margin is None else given.margin for device in usable
    ]
    names = models.map(lambda model: _device_names(model.params, given))
    for_draft = names.draft
    if models.draft is None and names.target is not None:  # where a draft could go
        for_draft = [device.name for device in usable if not device.remote]
    rooms = [
        Room(
            max(0, device.free - margin),
            given.device_speed,
            names.target is None or device.name in names.target,
            for_draft is None or device.name in for_draft,
        )
        for device, margin in zip(usable, margins, strict=True)
    ]
    free = free_memory()
    return _Site(
        devices=tuple(usable),
        rooms=tuple(rooms),
        margins=(*margins, default_margin(free)),
        holders=(*usable, Device(CPU, "memory of this machine", "cpu", False, free, free)),
        estimated=bool(given.sizes) and not has_devices(),
    )


def _settle(models: Both[ModelSpec], site: _Site, given: Given) -> _Layout:
    """Choose a placement; choose again if it takes more by llama.cpp's figures than estimated.

    llama.cpp may need more than the sum of the layers, because it copies weights from the CPU to a
    device for long batches.
    """
    wanted = models.map(lambda model: measure_needs(model.path, model.params))
    before: tuple[PlacementChoice, ...] = ()
    for _ in range(_TRIES):
        choices = _choose(models, wanted, site, given)
        layout = _lay_out(models, wanted, choices, site)
        if site.estimated or choices == before or fits_in(site.sizes, *layout.shares):
            break
        wanted, before = layout.needs, choices
    return layout


def _choose(
    models: Both[ModelSpec], wanted: Both[Needs], site: _Site, given: Given
) -> tuple[PlacementChoice, ...]:
    """Return the choices for these needs, without the target alone if the draft must stay."""
    choices = choose(
        wanted.target,
        wanted.draft,
        site.rooms,
        given.alpha,
        n_target=_n_layers(models.target.params, wanted.target),
        n_draft=_n_layers(models.draft.params, wanted.draft)
        if models.draft and wanted.draft
        else None,
    )
    must_stay = models.draft is not None and given.keep_draft
    return tuple(choice for choice in choices if not must_stay or choice.draft is not None)


def _lay_out(
    models: Both[ModelSpec],
    wanted: Both[Needs],
    choices: tuple[PlacementChoice, ...],
    site: _Site,
) -> _Layout:
    """Return the layout of the best choice, with what llama.cpp says it takes on each device."""
    best = choices[0]
    counts = Both(best.target, best.draft if models.draft else None)
    placed = Both(
        _place(models.target, counts.target, site.devices),
        _place(models.draft, counts.draft, site.devices)
        if models.draft and counts.draft is not None
        else None,
    )
    if site.estimated:
        estimated = tuple(shares_of(of, n) for of, n in wanted.zip(counts))
        return _Layout(choices, wanted, placed, estimated)
    measured = placed.map(lambda model: dry_run(model.path, model.params).shares)
    shares = measured.map(
        lambda of_model: [of_model.get(device.name, Share()) for device in site.holders]
    )
    draft = wanted.draft
    if draft and shares.draft is not None:
        draft = _at_least(draft, shares.draft)
    grown = Both(_at_least(wanted.target, shares.target), draft)
    return _Layout(choices, grown, placed, tuple(shares))


def _without_shared_memory(site: _Site, layout: _Layout) -> _Site:
    """Return the site, with the CPU's memory less what devices that share it take."""
    shared = sum(
        share.total
        for of_model in layout.shares
        for device, share in zip(site.holders, of_model, strict=True)
        if device.unified
    )
    cpu = site.holders[-1]
    return replace(site, holders=(*site.holders[:-1], replace(cpu, free=max(0, cpu.free - shared))))


def _at_least(of: Needs, shares: Sequence[Share]) -> Needs:
    """Return the needs with the compute buffers of a measured placement if those are larger."""
    return replace(of, compute=max([of.compute, *(share.compute for share in shares[:-1])]))


def _devices(models: Both[ModelSpec], given: Given) -> list[Device]:
    """Return the devices of all models, with the given sizes as their free memory."""
    for model in models:
        params = model.params
        by_hand = params.tensor_split or params.override_tensors
        if by_hand or params.split_mode not in ("layer", "none"):
            raise UsageError(
                "a plan places layers itself, so it cannot be combined with --tensor-split, "
                "--override-tensor, --cpu-moe or --split-mode row or tensor"
            )
    usable: dict[str, Device] = {}
    for model in models:
        for device in _usable(model.params):
            usable.setdefault(device.name, device)
    if not usable and not given.sizes:
        for model in models:
            require_placeable(model.params, [])
    if not usable:
        return [
            Device(f"device {i + 1}", "not on this machine", "gpu", False, size, size)
            for i, size in enumerate(given.sizes)
        ]
    if len(given.sizes) > len(usable):
        raise UsageError(
            f"{len(given.sizes)} memory sizes are given but must be at most {len(usable)}, one for "
            "each device"
        )
    present = list(usable.values())
    sized = zip(present, given.sizes, strict=False)
    rest = present[len(given.sizes) :]
    return [*(replace(device, free=size) for device, size in sized), *rest]


def _device_names(params: EngineParams, given: Given) -> list[str] | None:
    """Return the devices that a model may go to; None for all of the devices that are not here."""
    if given.sizes and not has_devices():
        return [] if NO_DEVICE in params.devices else None
    return [device.name for device in _usable(params)]


def _usable(params: EngineParams) -> list[Device]:
    """Return the devices that a model may go to; under split mode none, only the main one."""
    chosen = chosen_devices(params)
    if has_devices():
        require_placeable(params, chosen)
    # For devices that report no memory, llama.cpp takes that of the machine.
    sized = [device if device.total else replace(device, free=free_memory()) for device in chosen]
    return [sized[params.main_gpu]] if params.split_mode == "none" and sized else sized


def has_devices() -> bool:
    """Tell whether this machine has a device that layers can go to."""
    return any(device.takes_layers for device in devices())


def _n_layers(params: EngineParams, of: Needs) -> int | None:
    """Return the number of layers that must go on devices; None if the plan may choose."""
    if params.n_gpu_layers is None:
        return None
    wants_all = params.n_gpu_layers == ALL_LAYERS
    return of.n_layers if wants_all else min(params.n_gpu_layers, of.n_layers)


def _uses(site: _Site, shares: Sequence[Sequence[Share]]) -> tuple[Use, ...]:
    """Return a row for each device, the CPU last; ``shares`` are those of the placed models."""
    both = [*shares, [Share()] * len(site.holders)][:2]
    return tuple(
        Use(device.name, device.description, device.remote, device.free, margin, target, draft)
        for device, margin, target, draft in zip(site.holders, site.margins, *both, strict=True)
    )


def _place(model: ModelSpec, counts: Counts, known: Sequence[Device]) -> ModelSpec:
    """Return the model with params that make llama.cpp put its layers there."""
    taken = [(device.name, n) for device, n in zip(known, counts, strict=True) if n]
    if not taken:
        return replace(model, params=model.params.on_cpu())
    params = replace(
        model.params,
        n_gpu_layers=sum(counts),
        devices=tuple(name for name, _ in taken),
        tensor_split=tuple(float(n) for _, n in taken) if len(taken) > 1 else (),
        split_mode="layer",
        main_gpu=0,
    )
    return replace(model, params=params)


def _smaller_draft(
    facts: Facts, layout: _Layout, rooms: Sequence[Room], alpha: float
) -> tuple[str, int] | None:
    """Return the largest type of a smaller draft that fits whole and is faster, and its bytes.

    None if the draft is on devices with all of its layers.
    """
    best, target, draft = layout.choices[0], layout.needs.target, layout.needs.draft
    if not rooms or (draft and best.draft and sum(best.draft) == draft.n_layers):
        return None
    for name in _DRAFT_TYPES:
        smaller = target.scaled(BITS[name] / facts.bits_per_weight)
        if draft and sum(smaller.weights) >= sum(draft.weights):
            continue
        choices = choose(target, smaller, rooms, alpha)
        if choices and choices[0].draft and sum(choices[0].draft) == smaller.n_layers:
            return (name, sum(smaller.weights)) if choices[0].speed > best.speed else None
    return None
