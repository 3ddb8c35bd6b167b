"""Where target and draft go on this machine's devices, before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qdraft.errors import UsageError
from qdraft.gguf.facts import Facts, require_model
from qdraft.llama.devices import Device, devices, free_memory
from qdraft.llama.params import ALL_LAYERS, NO_DEVICE, EngineParams
from qdraft.llama.placed import CPU, Share, chosen_devices, require_placeable
from qdraft.placement.choose import (
    Choice,
    Counts,
    Needs,
    Room,
    choose,
    fits_in,
    largest_context,
    shares_of,
)
from qdraft.placement.needs import dry_run, needs

ALPHA = 0.8  # acceptance where nothing is measured yet
DEVICE_SPEED = 8.0  # a device's memory over the CPU's, where nothing is known
_GIB = 2**30
_TRIES = 4  # choices that are made, as long as llama.cpp wants more memory than was reckoned with
# Bits a weight, embeddings and all, of types that make a draft; as llama.cpp's documentation of
# quantize states them for Llama 3.1 8B.
_DRAFT_BITS = {"Q4_K_M": 4.89, "Q3_K_M": 4.0, "Q2_K": 3.16, "IQ2_M": 2.93, "IQ2_XXS": 2.38}


@dataclass(frozen=True, slots=True)
class Given:
    """What is planned with, where it is not what this machine tells.

    ``sizes`` are bytes in place of what is free on the devices, or of devices that are not there.
    ``margin`` bytes of each are kept back. ``alpha`` is the acceptance, ``device_speed`` the speed
    of a device's memory over the CPU's. ``keep_draft`` never leaves the draft out.
    """

    sizes: tuple[int, ...] = ()
    margin: int | None = None
    alpha: float = ALPHA
    device_speed: float = DEVICE_SPEED
    keep_draft: bool = False


@dataclass(frozen=True, slots=True)
class Use:
    """One device: bytes that are free and kept back, and what target and draft need of it."""

    device: str
    description: str
    remote: bool
    free: int
    margin: int
    target: Share
    draft: Share

    @property
    def left(self) -> int:
        """Bytes; negative where it does not fit."""
        return self.free - self.margin - self.target.total - self.draft.total


@dataclass(frozen=True, slots=True)
class Plan:
    """The placement that is expected to be fastest.

    ``choices`` holds the best placement with the draft and that of the target alone, the better
    one first. ``draft`` None was not given, or is better left out. ``n_ctx_most`` is the largest
    context for these layers. ``smaller_draft`` names a type, and its bytes, that would be faster.
    ``estimated`` is True where there is no such device here: its working memory is then taken to
    be that of the CPU.
    """

    target: Path
    draft: Path | None
    n_ctx: int
    n_ctx_most: int
    n_ctx_train: int
    uses: tuple[Use, ...]
    choices: tuple[Choice, ...]
    smaller_draft: tuple[str, int] | None
    estimated: bool
    given: Given
    params: EngineParams
    draft_params: EngineParams

    @property
    def fits(self) -> bool:
        return all(use.left >= 0 for use in self.uses)


def make_plan(
    target: Path,
    draft: Path | None,
    params: EngineParams,
    draft_params: EngineParams,
    given: Given = Given(),
) -> Plan:
    """Place both models; a number of layers that the params give is kept, whether it fits or not.

    llama.cpp is asked what the chosen placement takes of each device; where that is more than was
    reckoned with (it copies weights of the CPU there for long batches) the choice is made again.
    Raises UsageError for settings that lay layers out themselves and for more sizes than devices,
    and what loading raises.
    """
    found = _devices(params, draft_params, given)
    of_target, of_draft = needs(target, params), needs(draft, draft_params) if draft else None
    margins = [_margin(one.free) if given.margin is None else given.margin for one in found]
    for_target, for_draft = _names(params, given), _names(draft_params, given)
    rooms = [
        Room(
            max(0, one.free - margin), given.device_speed,
            for_target is None or one.name in for_target,
            for_draft is None or one.name in for_draft,
        )
        for one, margin in zip(found, margins, strict=True)
    ]  # fmt: skip
    estimated = bool(given.sizes) and not devices_here()
    free = free_memory()
    where = [*found, Device(CPU, "memory of this machine", "cpu", False, free, free)]
    choices: list[Choice] = []
    for _ in range(_TRIES):
        before = choices
        choices = choose(
            of_target, of_draft, rooms, given.alpha,
            n_target=_wanted(params, of_target), n_draft=_wanted(draft_params, of_draft),
        )  # fmt: skip
        if draft and given.keep_draft:
            choices = [choice for choice in choices if choice.draft is not None]
        best = choices[0]
        models: list[tuple[Needs, Counts]] = [(of_target, best.target)]
        if of_draft and best.draft is not None:
            models.append((of_draft, best.draft))
        placed = (
            _laid_out(params, best.target, found),
            _laid_out(draft_params, best.draft or (0,) * len(found), found),
        )
        if estimated:
            shares = [shares_of(of, counts) for of, counts in models]
            break
        told = [dry_run(path, how).shares
                for path, how, _ in zip((target, draft), placed, models, strict=False)
                if path]  # fmt: skip
        shares = [[one.get(device.name, Share()) for device in where] for one in told]
        of_target = _at_least(of_target, shares[0])
        of_draft = _at_least(of_draft, shares[1]) if of_draft and shares[1:] else of_draft
        if choices == before or fits_in([room.n_bytes for room in rooms], *shares):
            break
    shared = sum(
        share.total
        for of_model in shares
        for device, share in zip(where, of_model, strict=True)
        if device.unified
    )
    where[-1] = replace(where[-1], free=max(0, free - shared))
    models[0] = (of_target, best.target)
    if of_draft and best.draft is not None:
        models[1] = (of_draft, best.draft)
    facts = require_model(target)
    return Plan(
        target=target,
        draft=draft if best.draft is not None else None,
        n_ctx=of_target.n_ctx,
        n_ctx_most=largest_context(
            models,
            [*(room.n_bytes for room in rooms), where[-1].free - _margin(free)],
            facts.n_ctx_train or of_target.n_ctx,
        ),
        n_ctx_train=facts.n_ctx_train or of_target.n_ctx,
        uses=_uses(where, [*margins, _margin(free)], shares),
        choices=tuple(choices),
        smaller_draft=_smaller(facts, of_target, of_draft, rooms, best, given.alpha),
        estimated=estimated,
        given=given,
        params=placed[0],
        draft_params=placed[1],
    )  # fmt: skip


def _at_least(of: Needs, shares: Sequence[Share]) -> Needs:
    """The needs with the working memory that llama.cpp told for a placement, if that is more."""
    return replace(of, compute=max([of.compute, *(share.compute for share in shares[:-1])]))


def _devices(params: EngineParams, draft_params: EngineParams, given: Given) -> list[Device]:
    """The devices of both, with the sizes that are given in place of what is free."""
    for one in (params, draft_params):
        if one.tensor_split or one.override_tensors or one.split_mode not in ("layer", "none"):
            raise UsageError(
                "a plan lays layers out itself: it takes no --tensor-split, --override-tensor, "
                "--cpu-moe or --split-mode row or tensor"
            )
    found = _usable(params)
    found += [one for one in _usable(draft_params) if one.name not in {d.name for d in found}]
    if not found and not given.sizes:
        for one in (params, draft_params):
            require_placeable(one, found)
    if not found:
        return [
            Device(f"device {i + 1}", "not here, planned for", "gpu", False, size, size)
            for i, size in enumerate(given.sizes)
        ]
    if len(given.sizes) > len(found):
        raise UsageError(f"{len(given.sizes)} sizes of memory are given for {len(found)} devices")
    sized = zip(found, given.sizes, strict=False)
    return [*(replace(one, free=size) for one, size in sized), *found[len(given.sizes) :]]


def _names(params: EngineParams, given: Given) -> list[str] | None:
    """The devices that a model may go to; None for any, where all are made up."""
    if given.sizes and not devices_here():
        return [] if NO_DEVICE in params.devices else None
    return [one.name for one in _usable(params)]


def _usable(params: EngineParams) -> list[Device]:
    """The devices that a model may go to: under split mode none the main one alone."""
    found = chosen_devices(params)
    if devices_here():
        require_placeable(params, found)
    # Some tell no memory of theirs: llama.cpp then takes that of the machine.
    found = [one if one.total else replace(one, free=free_memory()) for one in found]
    return [found[params.main_gpu]] if params.split_mode == "none" and found else found


def devices_here() -> bool:
    """Is there any device that layers can go to?"""
    return any(one.takes_layers for one in devices())


def _margin(n_bytes: int) -> int:
    """What is kept back for all that is not counted: 8 %, 1 GiB at most."""
    return min(_GIB, n_bytes * 8 // 100)


def _wanted(params: EngineParams, of: Needs | None) -> int | None:
    """The number of layers that must be on devices; None where that is free."""
    if params.n_gpu_layers is None or of is None:
        return None
    all_of_them = params.n_gpu_layers == ALL_LAYERS
    return of.n_layers if all_of_them else min(params.n_gpu_layers, of.n_layers)


def _uses(
    found: Sequence[Device], margins: Sequence[int], shares: Sequence[Sequence[Share]]
) -> tuple[Use, ...]:
    """The table of devices, the CPU last; ``shares`` are the target's and the draft's, if any."""
    both = [*shares, [Share()] * len(found)][:2]
    return tuple(
        Use(one.name, one.description, one.remote, one.free, margin, target, draft)
        for one, margin, target, draft in zip(found, margins, *both, strict=True)
    )


def _laid_out(params: EngineParams, counts: Counts, found: Sequence[Device]) -> EngineParams:
    """The params that have llama.cpp lay the layers out so."""
    taken = [(one.name, n) for one, n in zip(found, counts, strict=True) if n]
    if not taken:
        return params.on_cpu()
    return replace(
        params,
        n_gpu_layers=sum(counts),
        devices=tuple(name for name, _ in taken),
        tensor_split=tuple(float(n) for _, n in taken) if len(taken) > 1 else (),
        split_mode="layer",
        main_gpu=0,
    )


def _smaller(
    facts: Facts,
    target: Needs,
    draft: Needs | None,
    rooms: Sequence[Room],
    best: Choice,
    alpha: float,
) -> tuple[str, int] | None:
    """The largest type of a draft that is smaller than what is there, fits whole, and gains.

    Looked for where there is no draft, or it is not all on devices.
    """
    if not rooms or (draft and best.draft and sum(best.draft) == draft.n_layers):
        return None
    for name, bits in _DRAFT_BITS.items():
        tried = target.scaled(bits / facts.bits_per_weight)
        if draft and sum(tried.weights) >= sum(draft.weights):
            continue
        found = choose(target, tried, rooms, alpha)
        if found and found[0].draft and sum(found[0].draft) == tried.n_layers:
            gains = found[0].speed > best.speed
            return (name, sum(tried.weights)) if gains else None
    return None
