"""Whether the weights that the CPU computes with fit in its memory, and which to keep if not."""

from __future__ import annotations

import re
from dataclasses import dataclass

from qdraft.gguf.header import Header, Tensor
from qdraft.gguf.parts import read_parts
from qdraft.llama.devices import free_memory
from qdraft.llama.held_pages import Stretch
from qdraft.llama.params import ALL_LAYERS, EngineParams
from qdraft.llama.placed import chosen_devices
from qdraft.llama.spec import Both, ModelSpec
from qdraft.placement.buffers import default_margin
from qdraft.placement.needs import LAYER_NAME, is_tied

_EXPERTS = re.compile(r"_exps\.")
# Joins stretches with less than this between them, which costs less than a lock for each.
_GAP = 2**16


@dataclass(frozen=True, slots=True)
class Residency:
    """The weights in the CPU's memory, and what is free for them before loading; in bytes."""

    free: int
    target: int
    draft: int

    @property
    def margin(self) -> int:
        """What caches, compute buffers and other programs may need: 8 %, at most 1 GiB."""
        return default_margin(self.free)

    @property
    def fits(self) -> bool:
        """Tell whether target and draft stay in memory side by side."""
        return self.target + self.draft + self.margin <= self.free

    @property
    def draft_fits(self) -> bool:
        """Tell whether the draft stays in memory, with room for what streams beside it."""
        return self.draft + self.margin <= self.free * 9 // 10

    @property
    def n_streamed(self) -> int:
        """The bytes of the target that each pass reads from the disk, if the rest stays."""
        if self.fits:
            return 0
        room = max(0, self.free - self.margin - self.draft)
        return max(0, self.target - room)


def find_residency(models: Both[ModelSpec]) -> Residency:
    """Compare the weights of the models with the memory that is free. Raises ModelFileError."""
    target = weights_on_cpu(models.target)
    draft = 0
    if models.draft is not None and not models.draft.path.samefile(models.target.path):
        draft = weights_on_cpu(models.draft)
    return Residency(free_memory(), target, draft)


def weights_on_cpu(model: ModelSpec) -> int:
    """Return the bytes of weights that a model keeps in the CPU's memory."""
    headers = read_parts(model.path)
    return sum(
        tensor.n_bytes or 0
        for header in headers
        for tensor in header.tensors
        if _is_on_cpu(tensor.name, model.params, _n_layers(headers))
    )


def stretches_to_hold(model: ModelSpec, *, whole: bool = False) -> list[Stretch]:
    """Return what each pass reads of the CPU's weights, the most worth holding first.

    Experts come last, because a pass reads few of them; the rows of an embedding matrix that is
    nothing else are not in it, unless the ``whole`` model is to be held.
    """
    headers = read_parts(model.path)
    tied = whole or is_tied(headers)
    n_layers = _n_layers(headers)
    always: list[Stretch] = []
    experts: list[Stretch] = []
    for header in headers:
        for tensor in sorted(header.tensors, key=lambda tensor: tensor.offset):
            if tensor.name == "token_embd.weight" and not tied:
                continue
            if _is_on_cpu(tensor.name, model.params, n_layers):
                group = experts if _EXPERTS.search(tensor.name) else always
                _append(group, _stretch(header, tensor))
    return [*always, *experts]


def _stretch(header: Header, tensor: Tensor) -> Stretch:
    return Stretch(header.path, header.data_start + tensor.offset, tensor.n_bytes or 0)


def _append(stretches: list[Stretch], stretch: Stretch) -> None:
    """Add a stretch, joined with the last one if they are neighbours."""
    last = stretches[-1] if stretches else None
    if last and last.path == stretch.path:
        end = last.start + last.n_bytes
        if 0 <= stretch.start - end < _GAP:
            n_bytes = stretch.start + stretch.n_bytes - last.start
            stretches[-1] = Stretch(last.path, last.start, n_bytes)
            return
    stretches.append(stretch)


def _n_layers(headers: list[Header]) -> int:
    names = (tensor.name for header in headers for tensor in header.tensors)
    return 1 + max(
        (int(match[1]) for name in names if (match := LAYER_NAME.match(name))), default=-1
    )


def _is_on_cpu(name: str, params: EngineParams, n_layers: int) -> bool:
    """Tell whether the CPU computes with a tensor: llama.cpp puts the last layers on devices."""
    n_on_devices = params.n_gpu_layers if chosen_devices(params) else 0
    if n_on_devices in (None, ALL_LAYERS):
        n_on_devices = n_layers + 1
    match = LAYER_NAME.match(name)
    if match:
        return int(match[1]) < n_layers + 1 - (n_on_devices or 0)
    return name.startswith("token_embd") or not n_on_devices
