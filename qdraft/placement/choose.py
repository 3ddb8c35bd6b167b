"""Which layers of target and draft go on which device, when not all fit.

A token's time is that of reading the weights that it needs: bytes over the speed of the memory
that they are in. What is not measured before anything is loaded is assumed, and said to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from qdraft.decoding.policy.model import best_n_draft
from qdraft.decoding.records import DecodeParams
from qdraft.llama.placed import Share

# A further row of a verify batch, as a share of the time of one: weights are read once for all of
# them, and a CPU soon has to compute for longer than it reads.
_ROW_ON_CPU = 0.10
_ROW_ON_DEVICE = 0.02


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that one model needs, with a context of ``n_ctx`` tokens.

    ``weights`` and ``kv`` go by layer; one more entry is the output, which is the embedding's own
    matrix where ``tied``. ``compute`` is the working memory on each device that has a layer, and
    grows by ``compute_per_token`` of context. ``input`` always stays with the CPU, as do
    ``kv_on_cpu`` bytes of cache.
    """

    n_ctx: int
    weights: tuple[int, ...]
    kv: tuple[int, ...]
    input: int
    compute: int
    compute_per_token: float = 0.0
    tied: bool = False
    kv_on_cpu: int = 0

    @property
    def n_layers(self) -> int:
        """All that can be moved: the layers, and the output."""
        return len(self.weights)

    def at(self, n_ctx: int) -> Needs:
        """The same with another context: caches grow with it."""
        kv = tuple(round(size * n_ctx / self.n_ctx) for size in self.kv)
        on_cpu = round(self.kv_on_cpu * n_ctx / self.n_ctx)
        compute = round(self.compute + self.compute_per_token * (n_ctx - self.n_ctx))
        return replace(self, n_ctx=n_ctx, kv=kv, kv_on_cpu=on_cpu, compute=max(0, compute))

    def scaled(self, factor: float) -> Needs:
        """The same model in another type, whose weights are so many times as large."""
        weights = tuple(round(factor * size) for size in self.weights)
        return replace(self, weights=weights, input=round(factor * self.input))

    def of(self, start: int, end: int) -> int:
        """Bytes of weights and caches of the layers from ``start`` to before ``end``."""
        return sum(self.weights[start:end]) + sum(self.kv[start:end])


@dataclass(frozen=True, slots=True)
class Room:
    """A device: the bytes that may be used, its memory's speed over the CPU's, and who may."""

    n_bytes: int
    speed: float
    for_target: bool = True
    for_draft: bool = True


Counts = tuple[int, ...]  # layers on each room


@dataclass(frozen=True, slots=True)
class Choice:
    """Layers on each room, for target and draft; None for a draft that is left out.

    ``speed`` is what is expected over the target on the CPU alone, ``n_draft`` the draft length
    that brings it, ``c`` the time of a draft token over that of a target token. ``fits`` is False
    where layers were asked for that no room has a place for.
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
    """How many of the last ``n`` layers go on each room, the last room filled first.

    llama.cpp moves the last layers first, the output before all, and lays them out over the
    devices in order. ``rooms`` are bytes. None where they do not fit, unless ``forced`` tells
    which of them take layers all the same: then what does not fit goes on the first of those.
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
        place = list(forced).index(True)
        # Layers lie in order: those before it move on to it as well.
        counts[: place + 1] = [0] * place + [sum(counts[: place + 1]) + end - first]
        end = first
    return tuple(counts) if end == first else None


def shares_of(needs: Needs, counts: Sequence[int]) -> list[Share]:
    """What each room holds with these layers on it, and the CPU at the end."""
    start = needs.n_layers - sum(counts)
    copied = needs.weights[-1] if needs.tied and start == needs.n_layers else 0
    weights = needs.input + sum(needs.weights[:start]) - copied
    kv = sum(needs.kv[:start]) + needs.kv_on_cpu
    on_cpu = Share(start, weights, kv, needs.compute)
    shares = []
    for n in counts:
        end = start + n
        compute = needs.compute if n else 0
        shares.append(Share(n, sum(needs.weights[start:end]), sum(needs.kv[start:end]), compute))
        start = end
    return [*shares, on_cpu]


def read_times(needs: Needs, counts: Sequence[int], rooms: Sequence[Room]) -> tuple[float, float]:
    """Time to read a token's weights, on the CPU and on devices; a byte of the CPU's takes 1."""
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
) -> list[Choice]:
    """The best placement with the draft (if there is one) and the best of the target alone.

    The better one first; empty where there is no room at all. ``n_target`` and ``n_draft`` are
    numbers of layers that are laid out whether they fit or not; None is any that fits. For each
    number of target layers the draft gets as many as still fit, and the other way round where the
    draft may go to fewer rooms. It is left out where all its place went to the target and it is not
    expected to pay from the CPU; a draft that only does not pay is kept: the loop sees that by
    itself.
    """
    whole = sum(target.weights)
    sizes = [room.n_bytes if room.for_target else 0 for room in rooms]
    draft_sizes = [room.n_bytes if room.for_draft else 0 for room in rooms]
    for_target = [room.for_target for room in rooms]
    for_draft = [room.for_draft for room in rooms]
    first = _most(draft, draft_sizes, n_draft, for_draft) if draft else None
    alone: list[Choice] = []
    both: list[Choice] = []
    for n in range(target.n_layers + 1) if n_target is None else (n_target,):
        forced = for_target if n_target is not None else ()
        counts = lay_out(target, n, sizes, forced)
        if counts is not None:
            speed = whole / sum(read_times(target, counts, rooms))
            fits = fits_in(sizes, shares_of(target, counts))
            alone.append(Choice(counts, None, speed, fits=fits))
        if draft is None:
            continue
        pairs: list[tuple[Counts | None, Counts | None]] = []
        if counts is not None:
            left = _left(draft_sizes, shares_of(target, counts))
            pairs.append((counts, _most(draft, left, n_draft, for_draft)))
        if first is not None:
            beside = lay_out(target, n, _left(sizes, shares_of(draft, first)), forced)
            pairs.append((beside, first))
        both += [
            _choice(target, draft, of_target, of_draft, rooms, alpha)
            for of_target, of_draft in pairs
            if of_target is not None and of_draft is not None
        ]
    best = [max(kind, key=lambda one: (one.fits, one.speed)) for kind in (both, alone) if kind]
    if draft is not None and both and best[0].n_draft == 0 and n_draft is None:
        could_be = sum(first or ())
        if could_be and not sum(best[0].draft or ()):
            best.reverse()  # the target took its place, and from the CPU it is no use
    return best


def _left(sizes: Sequence[int], taken: Sequence[Share]) -> list[int]:
    """What is left of rooms; the CPU is not one of them."""
    return [max(0, size - share.total) for size, share in zip(sizes, taken, strict=False)]


def fits_in(sizes: Sequence[int], *models: Sequence[Share]) -> bool:
    """Is there room for the shares of all models? ``sizes`` may leave the CPU out."""
    taken = [sum(share.total for share in of_room) for of_room in zip(*models, strict=True)]
    return all(size <= room for size, room in zip(taken, sizes, strict=False))


def _choice(
    target: Needs,
    draft: Needs,
    counts: Counts,
    of_draft: Counts,
    rooms: Sequence[Room],
    alpha: float,
) -> Choice:
    """What this placement of both is expected to bring, with the best draft length."""
    on_cpu, on_devices = read_times(target, counts, rooms)
    token = on_cpu + on_devices
    c = sum(read_times(draft, of_draft, rooms)) / token
    row = (_ROW_ON_CPU * on_cpu + _ROW_ON_DEVICE * on_devices) / token
    most = DecodeParams().most_drafted
    k, gain = best_n_draft(alpha, c, {k + 1: 1 + row * k for k in range(1, most + 1)})
    sizes = [room.n_bytes for room in rooms]
    fits = fits_in(sizes, shares_of(target, counts), shares_of(draft, of_draft))
    return Choice(counts, of_draft, gain * sum(target.weights) / token, k, c, fits)


def _most(
    needs: Needs, left: Sequence[int], n: int | None, allowed: Sequence[bool]
) -> Counts | None:
    """The most layers of a draft that fit what is left; just ``n``, fit or not, where given."""
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
    """The largest context, in steps of 256 tokens up to ``n_most``, that fits these layers.

    ``rooms`` are bytes, the CPU's last.
    """
    low, high = 0, max(0, n_most // 256)
    while low < high:
        middle = (low + high + 1) // 2
        shares = [shares_of(needs.at(256 * middle), counts) for needs, counts in models]
        low, high = (middle, high) if fits_in(rooms, *shares) else (low, middle - 1)
    return 256 * low
