"""The choice of the layers of target and draft that go on each device if not all fit.

The model of time: a token takes as long as reading its weights, that is their bytes over the speed
of the memory that holds them. qdraft measures nothing before loading, so the speeds are
assumptions, and the plan lists them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from qdraft.decoding.policy.model import best_n_draft
from qdraft.decoding.records import DecodeParams
from qdraft.llama.placed import Share, States

# The extra time of one more row in a verify batch, as a share of the time of one row. The weights
# are read once for all rows, but a CPU soon computes for longer than it reads.
_ROW_ON_CPU = 0.10
_ROW_ON_DEVICE = 0.02


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that one model needs with a context of ``n_ctx`` tokens.

    ``weights`` and ``kv`` have one entry per layer and a last one for the output, which is the
    embedding matrix itself if ``tied``. Each device with a layer needs ``compute`` bytes of compute
    buffers, which grow by ``compute_per_token`` bytes per token of context. ``input`` bytes of
    weights and ``kv_on_cpu`` bytes of cache always stay with the CPU. ``state`` are the bytes of
    recurrent states by layer, which the context does not change, and ``state_on_cpu`` those that
    stay with the CPU; ``states`` says what they are.
    """

    n_ctx: int
    weights: tuple[int, ...]
    kv: tuple[int, ...]
    input: int
    compute: int
    compute_per_token: float = 0.0
    tied: bool = False
    kv_on_cpu: int = 0
    state: tuple[int, ...] = ()
    state_on_cpu: int = 0
    states: States = field(default_factory=States)

    @property
    def n_layers(self) -> int:
        """The number of parts that can be moved: the layers and the output."""
        return len(self.weights)

    def at(self, n_ctx: int) -> Needs:
        """Return the needs with another context size."""
        kv = tuple(round(size * n_ctx / self.n_ctx) for size in self.kv)
        on_cpu = round(self.kv_on_cpu * n_ctx / self.n_ctx)
        compute = round(self.compute + self.compute_per_token * (n_ctx - self.n_ctx))
        return replace(self, n_ctx=n_ctx, kv=kv, kv_on_cpu=on_cpu, compute=max(0, compute))

    def scaled(self, factor: float) -> Needs:
        """Return the needs of the model in a type whose weights are ``factor`` times as large."""
        weights = tuple(round(factor * size) for size in self.weights)
        return replace(self, weights=weights, input=round(factor * self.input))

    def of(self, start: int, end: int) -> int:
        """Return all bytes of the layers from ``start`` to before ``end``."""
        parts = (self.weights, self.kv, self.state)
        return sum(sum(part[start:end]) for part in parts)


@dataclass(frozen=True, slots=True)
class Room:
    """A device: its usable bytes, its memory's speed over the CPU's, and the models it may hold."""

    n_bytes: int
    speed: float
    for_target: bool = True
    for_draft: bool = True


Counts = tuple[int, ...]  # layers in each room


@dataclass(frozen=True, slots=True)
class PlacementChoice:
    """The number of target and draft layers in each room; ``draft`` None leaves the draft out.

    ``speed`` is the expected speed-up over the target on the CPU alone, ``n_draft`` the draft
    length that gives it, and ``c`` the time of a draft token over that of a target token. ``fits``
    is False if the user asked for layers that do not fit.
    """

    target: Counts
    draft: Counts | None
    speed: float
    n_draft: int = 0
    c: float = 0.0
    fits: bool = True


def lay_out(
    needs: Needs, n: int, rooms: Sequence[int], forced: Sequence[bool] = ()
) -> Counts | None:
    """Return how many of the last ``n`` layers go in each room, filling the last room first.

    llama.cpp moves the output first, then the last layers, and spreads them over the devices in
    order. ``rooms`` are bytes. Returns None if the layers do not fit, unless ``forced`` marks rooms
    that must take them: then the first of these takes the rest.
    """
    counts = [0] * len(rooms)
    end = needs.n_layers
    first = needs.n_layers - n
    for i in reversed(range(len(rooms))):
        taken = needs.compute
        while end > first and taken + needs.of(end - 1, end) <= rooms[i]:
            taken += needs.of(end - 1, end)
            counts[i] += 1
            end -= 1
    if end > first and any(forced):
        i = list(forced).index(True)
        # Layers stay in order: those in rooms before this one move here too.
        counts[: i + 1] = [0] * i + [sum(counts[: i + 1]) + end - first]
        end = first
    return tuple(counts) if end == first else None


def shares_of(needs: Needs, counts: Sequence[int]) -> list[Share]:
    """Return the share of each room with these layers in it; the CPU's share is last."""
    start = needs.n_layers - sum(counts)
    copied = needs.weights[-1] if needs.tied and start == needs.n_layers else 0
    weights = needs.input + sum(needs.weights[:start]) - copied
    kv = sum(needs.kv[:start]) + needs.kv_on_cpu
    state = sum(needs.state[:start]) + needs.state_on_cpu
    on_cpu = Share(start, weights, kv, needs.compute, state)
    shares = []
    for n in counts:
        end = start + n
        compute = needs.compute if n else 0
        weights, kv, state = (
            sum(part[start:end]) for part in (needs.weights, needs.kv, needs.state)
        )
        shares.append(Share(n, weights, kv, compute, state))
        start = end
    return [*shares, on_cpu]


def read_times(needs: Needs, counts: Sequence[int], rooms: Sequence[Room]) -> tuple[float, float]:
    """Return the times to read a token's weights on CPU and devices; a byte on the CPU takes 1."""
    start = needs.n_layers - sum(counts)
    on_cpu = float(sum(needs.weights[:start]))
    on_devices = 0.0
    for n, room in zip(counts, rooms, strict=True):
        on_devices += sum(needs.weights[start : start + n]) / room.speed
        start += n
    return on_cpu, on_devices


def choose(
    target: Needs,
    draft: Needs | None,
    rooms: Sequence[Room],
    alpha: float,
    *,
    n_target: int | None = None,
    n_draft: int | None = None,
) -> list[PlacementChoice]:
    """Return the best placement with the draft, if there is one, and the best of the target alone.

    The better one comes first; the list is empty if nothing fits. ``n_target`` and ``n_draft`` are
    numbers of layers that go on devices whether they fit or not; None leaves the number free. For
    each number of target layers the draft gets as many layers as still fit. The draft may be
    limited to fewer rooms, so this also tries to place the draft first.

    The target alone comes first if it has taken all memory for the draft, and drafting from the CPU
    is not expected to pay off. A draft that fits but does not pay off stays: the loop notices that.
    """
    forced = [room.for_target for room in rooms] if n_target is not None else []
    layouts = [
        (n, lay_out(target, n, _sizes_for_target(rooms), forced))
        for n in (range(target.n_layers + 1) if n_target is None else (n_target,))
    ]
    alone = [_choice_alone(target, counts, rooms) for _, counts in layouts if counts is not None]
    best = _best(alone)
    if draft is None:
        return best
    first = _most(draft, rooms, n_draft)
    both: list[PlacementChoice] = []
    for n, counts in layouts:
        pairs: list[tuple[Counts | None, Counts | None]] = []
        if counts is not None:  # the target first
            pairs.append((counts, _most(draft, rooms, n_draft, shares_of(target, counts))))
        if first is not None:  # the draft first
            left = _left(_sizes_for_target(rooms), shares_of(draft, first))
            pairs.append((lay_out(target, n, left, forced), first))
        both += [
            _choice_of_both(target, draft, of_target, of_draft, rooms, alpha)
            for of_target, of_draft in pairs
            if of_target is not None and of_draft is not None
        ]
    best = _best(both) + best
    if both and best[0].n_draft == 0 and n_draft is None:
        has_room = sum(first or ()) > 0
        if has_room and not sum(best[0].draft or ()):
            best.reverse()  # the target took the draft's memory; on the CPU it cannot pay off
    return best


def _best(choices: Sequence[PlacementChoice]) -> list[PlacementChoice]:
    """Return the fastest choice, in a list: of those that fit, or else of those that do not."""
    return [max(choices, key=lambda choice: (choice.fits, choice.speed))] if choices else []


def _sizes_for_target(rooms: Sequence[Room]) -> list[int]:
    return [room.n_bytes if room.for_target else 0 for room in rooms]


def _left(sizes: Sequence[int], taken: Sequence[Share]) -> list[int]:
    """Return the bytes left in each room; ``sizes`` does not include the CPU."""
    return [max(0, size - share.total) for size, share in zip(sizes, taken, strict=False)]


def fits_in(sizes: Sequence[int], *models: Sequence[Share]) -> bool:
    """Tell whether the shares of all models fit; ``sizes`` may leave the CPU out."""
    taken = [sum(share.total for share in of_room) for of_room in zip(*models, strict=True)]
    return all(size <= room for size, room in zip(taken, sizes, strict=False))


def _choice_alone(target: Needs, counts: Counts, rooms: Sequence[Room]) -> PlacementChoice:
    """Return this placement of the target, without a draft."""
    speed = sum(target.weights) / sum(read_times(target, counts, rooms))
    fits = fits_in(_sizes_for_target(rooms), shares_of(target, counts))
    return PlacementChoice(counts, None, speed, fits=fits)


def _choice_of_both(
    target: Needs,
    draft: Needs,
    counts: Counts,
    of_draft: Counts,
    rooms: Sequence[Room],
    alpha: float,
) -> PlacementChoice:
    """Return this placement of both models, with the best draft length."""
    on_cpu, on_devices = read_times(target, counts, rooms)
    token = on_cpu + on_devices
    c = sum(read_times(draft, of_draft, rooms)) / token
    row = (_ROW_ON_CPU * on_cpu + _ROW_ON_DEVICE * on_devices) / token
    most = DecodeParams().most_drafted
    k, gain = best_n_draft(alpha, c, {k + 1: 1 + row * k for k in range(1, most + 1)})
    sizes = [room.n_bytes for room in rooms]
    fits = fits_in(sizes, shares_of(target, counts), shares_of(draft, of_draft))
    return PlacementChoice(counts, of_draft, gain * sum(target.weights) / token, k, c, fits)


def _most(
    needs: Needs, rooms: Sequence[Room], n: int | None, taken: Sequence[Share] = ()
) -> Counts | None:
    """Return the most layers of a draft that fit beside ``taken``; with ``n``, that many."""
    allowed = [room.for_draft for room in rooms]
    sizes = [room.n_bytes if room.for_draft else 0 for room in rooms]
    left = _left(sizes, taken) if taken else sizes
    if n is not None:
        return lay_out(needs, n, left, allowed)
    for n_layers in range(needs.n_layers, -1, -1):
        counts = lay_out(needs, n_layers, left)
        if counts is not None:
            return counts
    return None


def largest_context(
    models: Sequence[tuple[Needs, Counts]], rooms: Sequence[int], n_most: int
) -> int:
    """Return the largest context that fits with these layers: a multiple of 256 up to ``n_most``.

    ``rooms`` are bytes; the CPU's are last.
    """
    low, high = 0, max(0, n_most // 256)
    while low < high:
        middle = (low + high + 1) // 2
        shares = [shares_of(needs.at(256 * middle), counts) for needs, counts in models]
        low, high = (middle, high) if fits_in(rooms, *shares) else (low, middle - 1)
    return 256 * low
